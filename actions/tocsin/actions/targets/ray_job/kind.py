"""Jobs that were submitted to a Ray cluster.

A submission id belongs to one job until it is deleted. A driver in the cluster that was not
submitted has no such id, and Ray stops none of these.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Final
from urllib.parse import quote

from pydantic import JsonValue, SecretStr

from tocsin.actions.decision.retry import Outcome
from tocsin.actions.receivers.http import HttpPoster, Method, http_url, tls_context
from tocsin.actions.receivers.webhook.endpoint import tls_problems
from tocsin.actions.targets.answers import (
    instead,
    not_seen,
    stop_asked,
    succeeded,
    warning,
    why_another,
    word,
)
from tocsin.actions.targets.kind import JobSeen, StopAsked, TargetContext, TargetJob, TargetKind
from tocsin.actions.targets.ray_job.config import RayTarget
from tocsin.schemas import monotonic_clock
from tocsin.schemas.configuration.problems import Loc, Problem
from tocsin.schemas.configuration.settings import value_of
from tocsin.schemas.configuration.values import format_duration
from tocsin.schemas.errors import ConfigurationError

GRACE: Final = timedelta(seconds=3)

_SUBMISSION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:@+-]{0,199}")
_JOB: Final = re.compile(r"[0-9a-f]{8}")
_ENDED: Final = frozenset({"STOPPED", "SUCCEEDED", "FAILED"})


class Ray(TargetKind[RayTarget]):
    """Ends jobs that were submitted."""

    config = RayTarget
    scheduler = "ray"
    libraries = ("aiohttp",)

    def check(self, config: RayTarget, loc: Loc) -> Iterator[Problem]:
        """TLS files without TLS."""
        yield from tls_problems(config.tls, (config.address,), loc)

    def warnings(self, config: RayTarget, loc: Loc) -> Iterator[Problem]:
        """A grace that Ray gives only to jobs which were submitted with it."""
        if config.grace > GRACE:
            seconds = -(-config.grace // timedelta(seconds=1))
            yield warning(
                (*loc, "grace"),
                "grace_of_backend",
                f"Ray kills a job {format_duration(GRACE)} after SIGTERM, unless it was submitted "
                f"with RAY_JOB_STOP_WAIT_TIME_S={seconds}",
                f"ray job submit --runtime-env-json "
                f'\'{{"env_vars": {{"RAY_JOB_STOP_WAIT_TIME_S": "{seconds}"}}}}\'',
            )

    def target(self, name: str, config: RayTarget, context: TargetContext) -> RayJobs:
        """The jobs of the cluster."""
        what = f"target {name!r}"
        address = value_of(config.address, context.secrets)
        if address is None:
            raise ConfigurationError(f"{what}: there is no address of the cluster")
        return RayJobs(
            HttpPoster(context.guard),
            SecretStr(http_url(address, what).get_secret_value().rstrip("/")),
            value_of(config.token, context.secrets),
            None
            if config.tls is None
            else tls_context(config.tls, folder=context.folder, what=what),
        )


class RayJobs:
    """The jobs of one cluster."""

    def __init__(
        self,
        poster: HttpPoster,
        address: SecretStr,
        token: SecretStr | None = None,
        tls: ssl.SSLContext | None = None,
        now_ms: Callable[[], int] = monotonic_clock.unix_ms,
    ) -> None:
        self._poster = poster
        self._address = address
        self._token = token
        self._tls = tls
        self._now_ms = now_ms

    async def inspect(self, job: TargetJob) -> JobSeen:
        """Show whether the job still runs."""
        seen, _ = await self._described(job)
        return seen

    async def stop(self, job: TargetJob) -> StopAsked:
        """Look, and ask the cluster to end the job if it is this incarnation."""
        if (why := _refused(job)) is not None:
            return StopAsked("refused", why)
        seen, submission = await self._described(job)
        if seen.state != "running":
            return instead(seen)
        outcome, answer = await self._ask("POST", f"{submission}/stop")
        if succeeded(outcome) and answer != {"stopped": True}:
            # Ray found no process of it: it ended in between, or Ray has lost it.
            seen, _ = await self._described(job)
            if seen.state != "running":
                return instead(seen)
            return StopAsked("failed", "Ray answered that it stopped nothing")
        return stop_asked(outcome, "asked to end it", self._now_ms())

    async def close(self) -> None:
        """Close the connections."""
        await self._poster.close()

    async def _described(self, job: TargetJob) -> tuple[JobSeen, str]:
        """What is seen of the job, and the part of a path that names it."""
        if (why := _refused(job)) is not None:
            return not_seen(why), ""
        names = job.scheduler.names
        outcome, answer = await self._ask("GET", quote(names.get("submission") or names["job"]))
        if not succeeded(outcome):
            return not_seen(outcome.text()), ""
        if not isinstance(answer, Mapping):
            return not_seen("this is not a Ray cluster's answer"), ""
        return seen_of(job, answer), quote(str(answer.get("submission_id")))

    async def _ask(self, method: Method, path: str) -> tuple[Outcome, JsonValue]:
        url = SecretStr(f"{self._address.get_secret_value()}/api/jobs/{path}")
        return await self._poster.ask(method, url, None, self._token, tls=self._tls)


def seen_of(job: TargetJob, answer: Mapping[str, JsonValue]) -> JobSeen:
    """The state of the job, if the answer is about this one. Pure."""
    submission, ray_job = (job.scheduler.names.get(key, "") for key in ("submission", "job"))
    if answer.get("type") != "SUBMISSION":
        return not_seen("it was not submitted to the cluster, and Ray stops only jobs that were")
    same = answer.get("submission_id") == submission if submission else True
    if not same or (not submission and answer.get("job_id") != ray_job):
        return not_seen("Ray shows another job")
    began = answer.get("start_time")
    if not isinstance(began, int):
        return not_seen("Ray does not show when the job began")
    if (why := why_another(began, job)) is not None:
        return JobSeen("replaced", why)
    state = word(answer.get("status"))
    if state in _ENDED:
        return JobSeen("ended", state)
    # A newer Ray can start a driver again under the same id, and tells the driver nothing of it.
    if answer.get("attempt_number"):
        return not_seen("Ray has started the job again, and it is not certain which life was meant")
    if state in ("PENDING", "RUNNING"):
        return JobSeen("running", state)
    return not_seen("Ray shows the job in a state that is not known here")


def _refused(job: TargetJob) -> str | None:
    """Why the names that the run recorded identify no job; None if they do."""
    names = job.scheduler.names
    submission = names.get("submission", "")
    if not (
        _SUBMISSION.fullmatch(submission) if submission else _JOB.fullmatch(names.get("job", ""))
    ):
        return "the run recorded no submission id and no job id of Ray"
    return None if job.started_ms else "the run recorded no start, so its job is not certain"
