"""Calls of AWS about a job.

boto3 blocks, so a look or a stop runs in a thread; each of its calls is one attempt, whose
connection and answer have time limits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from tocsin.actions.decision.retry import Outcome
from tocsin.actions.receivers.aws import ClientFactory, Service, call, make_client, status_of
from tocsin.actions.targets.answers import instead, not_seen, stop_asked, succeeded
from tocsin.actions.targets.kind import JobSeen, StopAsked, TargetJob
from tocsin.schemas import monotonic_clock
from tocsin.schemas.records.runs import SchedulerJob

Request = Callable[[Any], Mapping[str, Any]]
"""One call with a client; returns the answer. Blocks."""

REGION: Final = r"[a-z]{2}(-[a-z]+)+-[0-9]"
"""Names of regions."""


class AwsBackend(Protocol):
    """What a service is asked about a job. Pure but for the requests that it returns."""

    service: Service

    def region(self, scheduler: SchedulerJob) -> str | None:
        """The region that the run recorded; None if it recorded none that can be one. Our signed
        requests go to a host of that name."""
        ...

    def refused(self, job: TargetJob) -> str | None:
        """Why the names that the run recorded identify no job; None if they do."""
        ...

    def describe(self, job: TargetJob) -> Request:
        """The call that shows the job."""
        ...

    def seen(self, job: TargetJob, answer: Mapping[str, Any]) -> JobSeen:
        """What that answer shows."""
        ...

    def is_ending(self, answer: Mapping[str, Any]) -> bool:
        """Whether the service was asked to end it before."""
        ...

    def end(self, job: TargetJob) -> Request:
        """The call that ends the job."""
        ...


class AwsJobs:
    """The jobs of one service in one account. One per target."""

    def __init__(
        self, backend: AwsBackend, region: str | None, make: ClientFactory = make_client
    ) -> None:
        self._backend = backend
        self._region = region
        self._make = make

    async def inspect(self, job: TargetJob) -> JobSeen:
        """Show whether the job still runs."""
        return await asyncio.to_thread(self._inspect, job)

    async def stop(self, job: TargetJob) -> StopAsked:
        """Look, and ask the service to end the job if it is this incarnation."""
        return await asyncio.to_thread(self._stop, job)

    async def close(self) -> None:
        """Nothing stays open."""

    def _inspect(self, job: TargetJob) -> JobSeen:
        seen, _ = self._described(job)
        return seen

    def _stop(self, job: TargetJob) -> StopAsked:
        why = self._backend.refused(job)
        if why is not None:
            return StopAsked("refused", why)
        seen, answer = self._described(job)
        if seen.state != "running":
            return instead(seen)
        if self._backend.is_ending(answer):
            return StopAsked("accepted", seen.reason)
        outcome, _ = self._call(job, self._backend.end(job))
        asked = stop_asked(outcome, "asked to end it", monotonic_clock.unix_ms())
        if asked.result == "refused":
            # A job that ends by itself in between cannot be ended any more.
            seen, _ = self._described(job)
            return instead(seen) if seen.state in ("ended", "replaced") else asked
        return asked

    def _described(self, job: TargetJob) -> tuple[JobSeen, Mapping[str, Any]]:
        why = self._backend.refused(job)
        if why is not None:
            return not_seen(why), {}
        outcome, answer = self._call(job, self._backend.describe(job))
        if not succeeded(outcome):
            return not_seen(outcome.text()), {}
        return self._backend.seen(job, answer), answer

    def _call(self, job: TargetJob, request: Request) -> tuple[Outcome, Mapping[str, Any]]:
        answers: list[Mapping[str, Any]] = []

        def one() -> int:
            region = self._region or self._backend.region(job.scheduler)
            client = self._make(self._backend.service, region)
            try:
                answers.append(request(client))
            finally:
                client.close()
            return status_of(answers[0])

        outcome = call(one)
        return outcome, answers[0] if answers else {}
