"""apprise in a child process that is guarded: one message, and what came of it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from tocsin.actions.decision.retry import Outcome, phrase_of
from tocsin.actions.receivers.address_guard import AddressGuard
from tocsin.actions.receivers.chat.child import Result, Task
from tocsin.schemas.process.own_python import python_command, python_environment

logger = logging.getLogger(__name__)

TIMEOUT_S: Final = 40.0
"""For one attempt as a whole, the start of the child included."""

AT_ONCE: Final = 2
"""Children at a time: each costs a second of a core."""

_MODULE: Final = "tocsin.actions.receivers.chat.child"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """For tests: where hosts are really to be looked for, and whom to trust there."""

    connect_to: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    ca: Path | None = None


class AppriseProcess:
    """Starts children, at most `AT_ONCE` at a time. One per sender."""

    def __init__(
        self,
        guard: AddressGuard,
        *,
        timeout_s: float = TIMEOUT_S,
        place: Place | None = None,
        command: Sequence[str] | None = None,
    ) -> None:
        self._guard = guard
        self._timeout_s = timeout_s
        self._place = place or Place()
        self._command = command or python_command(_MODULE)
        self._room = asyncio.Semaphore(AT_ONCE)

    async def deliver(self, url: str, title: str, body: str) -> Outcome:
        """One attempt. Raises nothing but CancelledError."""
        task = Task(
            url=url,
            title=title,
            body=body,
            private=self._guard.private,
            allow=[str(network) for network in self._guard.allow],
            connect_to=self._place.connect_to,
        )
        async with self._room:
            try:
                async with asyncio.timeout(self._timeout_s):
                    result = await self._run(task)
            except TimeoutError:
                return Outcome(failure="timeout")
            except OSError as error:
                logger.warning(
                    "no process for a chat message",
                    extra={"action": "chat", "reason": type(error).__name__},
                )
                return Outcome(later="the process for chat messages could not be started")
        if result is None:
            return Outcome(later="the process for chat messages failed")
        return outcome_of(result)

    async def _run(self, task: Task) -> Result | None:
        environ = {
            name: value
            for name, value in python_environment(os.environ).items()
            # A proxy would connect where the guard does not see.
            if not name.lower().endswith("_proxy")
        }
        if self._place.ca is not None:
            environ["REQUESTS_CA_BUNDLE"] = str(self._place.ca)
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # What apprise logs may quote an answer.
            stderr=asyncio.subprocess.DEVNULL,
            cwd="/",
            env=environ,
        )
        try:
            out, _ = await process.communicate(json.dumps(asdict(task)).encode())
        except BaseException:
            if process.returncode is None:
                process.kill()
                await asyncio.shield(process.wait())
            raise
        if process.returncode != 0:
            return None
        try:
            return Result(**json.loads(out))
        except (ValueError, TypeError):
            return None


def outcome_of(result: Result) -> Outcome:
    """What the child's result means. Pure."""
    status = result.status
    good = status is not None and 200 <= status < 300
    if result.sent and not good:
        # Whatever else was asked on the way: it is there, and must not come twice.
        return Outcome(done="sent")
    if not result.sent:
        if result.refused is not None:
            return Outcome(forbidden=result.refused)
        if result.failure is not None:
            return Outcome(failure=result.failure)
    if status is not None and good == result.sent:
        return Outcome(status=status, phrase=phrase_of(status), retry_after=result.retry_after)
    if result.requests:
        return Outcome(later="the service did not take the message")
    return Outcome(forbidden="the chat URL cannot be used: a part of it is missing or wrong")
