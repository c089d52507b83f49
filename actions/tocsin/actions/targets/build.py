"""From targets to the queues in which their backends are asked: each has its own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Final

from tocsin.actions.decision.planned import Place
from tocsin.actions.decision.retry import Outcome
from tocsin.actions.decision.stop_policy import StopPolicy
from tocsin.actions.delivery.receiver_queues import Notice, ReceiverQueue, target_queue
from tocsin.actions.delivery.stop_command import command_of
from tocsin.actions.targets.backend_stops import BackendStops
from tocsin.actions.targets.kind import JobSeen, StopAsked, Target, TargetContext, TargetJob
from tocsin.actions.targets.registry import TargetKinds
from tocsin.schemas.configuration.file import Config
from tocsin.schemas.configuration.targets import TargetConfig
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.events import clip

AT_ONCE: Final = 8
"""Attempts at one backend at a time; it has other users."""

LONGEST_S: Final = 120.0
"""An attempt that has not ended by then counts as failed, whatever a kind of target does."""

_MS: Final = timedelta(milliseconds=1)


class Targets:
    """Opens the targets of one configuration; `close` it at the end."""

    def __init__(self, context: TargetContext, kinds: TargetKinds) -> None:
        self._context = context
        self._kinds = kinds
        self._opened: list[Target] = []

    def open(self, targets: Mapping[str, TargetConfig]) -> dict[str, ReceiverQueue]:
        """The queue of each target, by the queue's name.

        Raises:
            ConfigurationError: a target cannot be used. The message shows no secret.
            MissingExtra: what a target needs is not installed.
        """
        queues: dict[str, ReceiverQueue] = {}
        for name, config in targets.items():
            kind = self._kinds.kind_of(config)
            kind.check_installed()
            target = kind.target(name, config, self._context)
            self._opened.append(target)
            queues[target_queue(name)] = ReceiverQueue(partial(attempt, target), at_once=AT_ONCE)
        return queues

    async def close(self) -> None:
        """Close all of them."""
        for target in self._opened:
            await target.close()


def check_installed(targets: Mapping[str, TargetConfig], kinds: TargetKinds) -> None:
    """Raises MissingExtra: what a target needs is not installed; the message names both."""
    for target in targets.values():
        kinds.kind_of(target).check_installed()


def stop_policy(config: Config, kinds: TargetKinds, place: Place) -> StopPolicy:
    """Which target may end which job. Pure."""
    can_end = {
        name: partial(kinds.kind_of(target).can_end, target)
        for name, target in config.targets.items()
    }
    return StopPolicy(config.policy, can_end, place)


def backend_stops(config: Config, kinds: TargetKinds, place: Place) -> BackendStops:
    """What a configuration says about asking backends. Pure."""
    confirm_ms = {name: target.confirm_within // _MS for name, target in config.targets.items()}
    return BackendStops(stop_policy(config, kinds, place), confirm_ms)


async def attempt(target: Target, notice: Notice) -> Outcome:
    """Look at the job, and ask for its end unless that was done already or is not needed."""
    stop = notice.delivery
    assert stop.backend is not None
    job = job_of(stop)
    try:
        async with asyncio.timeout(LONGEST_S):
            seen = await target.inspect(job)
            if seen.state != "running" or stop.backend.asked_ms is not None:
                return _seen(seen)
            return _outcome(await target.stop(job))
    except TimeoutError:
        return Outcome(failure="timeout", backend="unknown")


def job_of(stop: Delivery) -> TargetJob:
    """The job that a stop is about, as its entry in the ledger names it."""
    assert stop.backend is not None
    return TargetJob(
        run_id=stop.run_id,
        incarnation=stop.incarnation,
        scheduler=stop.backend.job,
        started_ms=stop.backend.started_ms,
        delivery_id=stop.delivery_id,
        reason=" ".join(command_of(stop.event or {}).data.reason.split()),
    )


def _seen(seen: JobSeen) -> Outcome:
    text = clip(seen.reason, 300)
    if seen.state == "ended":
        return Outcome(done=text, backend="ended")
    if seen.state == "replaced":
        return Outcome(forbidden=text, backend="replaced")
    return Outcome(later=text, backend="running" if seen.state == "running" else "unknown")


def _outcome(answer: StopAsked) -> Outcome:
    text = clip(answer.reason, 300)
    if answer.result == "accepted":
        return Outcome(later=text, backend="asked")
    if answer.result == "refused":
        return Outcome(forbidden=text, backend="refused")
    later_ms = answer.retry_after_ms
    wait = None if later_ms is None else str(-(-later_ms // 1000))
    return Outcome(later=text, backend="unknown", retry_after=wait)
