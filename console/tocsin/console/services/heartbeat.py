"""The pings of a worker or a run to a dead man's switch, while it makes progress.

The switch is another process, mostly another machine. So a ping says only who is alive; that
somebody is not follows from pings that do not come.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Literal
from urllib.parse import quote

from pydantic import SecretStr

from tocsin.actions.decision.retry import Outcome
from tocsin.actions.receivers.address_guard import AddressGuard
from tocsin.actions.receivers.http import HttpPoster, http_url
from tocsin.console.context import CommandContext
from tocsin.console.services.reload import TakeOver
from tocsin.runtime import metrics as names
from tocsin.runtime.clock import Clock, SystemClock
from tocsin.runtime.metrics import Metrics
from tocsin.runtime.worker import Worker
from tocsin.schemas.configuration.heartbeat import SENDER
from tocsin.schemas.configuration.settings import value_of
from tocsin.schemas.errors import require_extra

logger = logging.getLogger(__name__)

TIMEOUT_S: Final = 5.0
"""For one ping."""

LAST_S: Final = 2.0
"""For the last one: a run must not wait long for it."""

_RETRY_MS: Final = 10_000
_FIRST_ROUND_MS: Final = 250

Result = Literal["sent", "failed", "withheld"]


@dataclass(frozen=True, slots=True)
class Target:
    """Where to ping, and how often."""

    url: SecretStr
    every_ms: int
    runs: bool


def target_of(context: CommandContext) -> Target | None:
    """What the configuration says; None: nowhere, or the secret is optional and missing.

    Raises:
        ConfigurationError: a secret is no URL.
        MissingExtra: aiohttp is not installed.
    """
    config = context.config.heartbeat
    url = None if config is None else value_of(config.url, context.secrets)
    if config is None or url is None:
        return None
    require_extra("actions", "heartbeat", "aiohttp")
    return Target(
        http_url(url, "the section 'heartbeat'"),
        config.every // timedelta(milliseconds=1),
        config.runs,
    )


def sender_url(url: SecretStr, sender: str) -> SecretStr:
    """The URL with the name of the sender in its place. Pure."""
    return SecretStr(url.get_secret_value().replace(SENDER, quote(sender, safe="@:")))


def sender_name(service: str, http: str | None = None) -> str:
    """`rules@HOST`; with the port of `--http`, which differs between the workers of one host."""
    port = "" if http is None else ":" + http.rpartition(":")[2]
    return f"{service}@{socket.gethostname()}{port}"


def run_name(run_id: str) -> str:
    """`run@ID`, as long as `tocsin heartbeat check` takes a name. Pure."""
    return f"run@{run_id}"[:200]


def why_withheld(rounds: Sequence[int | None], now_ms: int, every_ms: int) -> str | None:
    """Why there is no ping now; None if all workers have ended a round within `every_ms`. Pure.

    Args:
        rounds: when each worker ended its last round, if it has ended any.
    """
    ended = [at_ms for at_ms in rounds if at_ms is not None]
    if len(ended) < len(rounds):
        return "no round has ended yet"
    age_ms = now_ms - min(ended)
    return f"the last round ended {age_ms / 1000:.0f} s ago" if age_ms > every_ms else None


class Heartbeat:
    """A part that pings while workers make progress. It harms none of them, whatever it meets.

    Args:
        sender: the name of this process for the switch.
        workers: all must make progress.
        guard: which addresses may be reached.
        is_over: asked at the end: whether this was meant to end, so that nobody is alerted.
        run: whether it belongs to a run: no ping before the run is older than an interval.
    """

    def __init__(
        self,
        target: Target | None,
        *,
        sender: str,
        service: str,
        workers: Sequence[Worker],
        guard: AddressGuard,
        is_over: Callable[[], bool],
        run: bool = False,
        software: str = "tocsin",
        clock: Clock | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self._sender = sender
        self._service = service
        self._workers = workers
        self._poster = HttpPoster(guard, software=software, timeout_s=TIMEOUT_S)
        self._is_over = is_over
        self._run = run
        self._clock = clock or SystemClock()
        self._metrics = metrics or Metrics()
        self._stopping = False
        self._woken = asyncio.Event()
        self._last: Result = "sent"
        self._pinged = False
        self._target = self._wanted(target)
        self._started_ms = self._clock.now_ms()
        self._due_ms = self._started_ms + self._delay_ms()

    async def prepare(self, context: CommandContext) -> TakeOver:
        """What takes over another configuration. Raises ConfigurationError: it cannot be used."""
        target = self._wanted(target_of(context))

        async def take_over() -> None:
            if target != self._target:
                self._target = target
                self._due_ms = self._clock.now_ms()
                self._woken.set()

        return take_over

    def stop(self) -> None:
        """Ask `run` to return."""
        self._stopping = True
        self._woken.set()

    async def run(self) -> None:
        """Ping until `stop`; then once more, to say that this is the end, if it is meant to be."""
        try:
            while not self._stopping:
                self._woken.clear()
                await self.beat()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._wait_s()):
                        await self._woken.wait()
            if self._pinged and self._target is not None and self._is_over():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LAST_S):
                        await self._ping(self._target, ending=True)
        finally:
            await self._poster.close()

    async def beat(self) -> None:
        """One ping if it is due and all workers make progress."""
        target, now_ms = self._target, self._clock.now_ms()
        if target is None or now_ms < self._due_ms:
            return
        rounds = [worker.last_round_ms for worker in self._workers]
        why = why_withheld(rounds, now_ms, target.every_ms)
        if why is not None and now_ms - self._started_ms <= target.every_ms:
            # A worker that has just started ends its first round soon.
            self._due_ms = now_ms + _FIRST_ROUND_MS
            return
        if why is not None:
            self._record("withheld", why)
            self._due_ms = now_ms + min(target.every_ms, _RETRY_MS)
            return
        outcome = await self._ping(target, ending=False)
        if self._target is not target:
            return  # changed meanwhile: the new one is due already
        if outcome.status is not None and 200 <= outcome.status < 300:
            self._pinged = True
            self._record("sent", "")
            self._due_ms = now_ms + target.every_ms
        else:
            self._record("failed", outcome.text())
            self._due_ms = now_ms + min(target.every_ms, _RETRY_MS)

    async def _ping(self, target: Target, *, ending: bool) -> Outcome:
        content = {"version": 1, "sender": self._sender, "ending": ending}
        return await self._poster.post(
            sender_url(target.url, self._sender),
            json.dumps(content).encode(),
            {"content-type": "application/json"},
        )

    def _record(self, result: Result, why: str) -> None:
        """Count it; log the first of its kind, not each one of an outage."""
        self._metrics.add(names.HEARTBEATS, 1, service=self._service, result=result)
        if result != self._last:
            self._last = result
            if result == "sent":
                logger.info("heartbeats are sent again", extra={"action": "heartbeat"})
            else:
                message = "heartbeat %s: %s"
                logger.warning(message, result, why, extra={"action": "heartbeat"})

    def _wanted(self, target: Target | None) -> Target | None:
        return target if target is not None and (target.runs or not self._run) else None

    def _delay_ms(self) -> int:
        return self._target.every_ms if self._run and self._target is not None else 0

    def _wait_s(self) -> float | None:
        if self._target is None:
            return None
        return max(0.0, (self._due_ms - self._clock.now_ms()) / 1000)
