"""A person's stop: which training is meant, the command, and what its answers say. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final, Literal

from tocsin.actions.delivery.stop_command import NOT_AFTER_MS
from tocsin.bus.port import BusError, BusUnavailable
from tocsin.console.views.stop_history import StopHistory, checkpoint_line, history_facts
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.ids import new_id
from tocsin.schemas.records.events import Event
from tocsin.schemas.records.run_view import StopView
from tocsin.schemas.records.runs import RunData
from tocsin.schemas.records.runs_fold import CommandSeen, RunSeen
from tocsin.schemas.records.stops.commands import (
    StopAcknowledged,
    StopAnswer,
    StopCheckpoint,
    StopEscalated,
    StopExited,
    StopExpired,
    StopLeft,
    StopRefused,
    StopRequested,
)
from tocsin.schemas.records.stops.progress import answered
from tocsin.schemas.text import plain_line

UNDER_WAY: Final = frozenset(
    {"requested", "acknowledged", "checkpoint_decided", "left", "escalated"}
)

_SHORT: Final = 8


def stop_under_way(run: RunSeen) -> StopView | None:
    """The stop of this training that somebody else has asked for, if it is not done yet."""
    return run.stop if run.stop is not None and run.stop.state in UNDER_WAY else None


def check_running(run: RunSeen) -> None:
    """Raises ConfigurationError: there is nothing to stop."""
    if (end := run.ended) is not None:
        code = "" if end.exit_code is None else f" with exit code {end.exit_code}"
        raise ConfigurationError(
            f"run {plain_line(run.run_id)} has ended ({end.outcome or 'ended'}{code}); there is "
            "nothing to stop; `tocsin status` lists what is running"
        )


def stop_event(
    run: RunSeen, reason: str, *, requested_by: str, grace_s: float, now_ms: int
) -> Event[StopRequested]:
    """A fresh command for that training, still to be signed."""
    command = StopRequested(
        command_id=new_id(),
        run_id=run.run_id,
        incarnation=run.incarnation,
        reason=reason,
        requested_by=requested_by,
        requested_ms=now_ms,
        not_after_ms=now_ms + NOT_AFTER_MS,
        nonce=new_id(),
        grace_s=grace_s,
    )
    return Event.wrap(
        command,
        id=command.command_id,
        source="/console",
        time_ms=now_ms,
        subject=f"/runs/{run.run_id}",
    )


Ending = Literal["stopped", "refused", "expired"]


class Answers:
    """What a run answers to one command: lines for people, and whether it is over."""

    def __init__(self, run: RunSeen, command_id: str, *, key: str) -> None:
        """`key` is how to trust who signs here.

        Who obeys it, and which ranks have gone, is known by the answers alone: give `apply` all of
        them, those to a command that was under way already from its first on.
        """
        self._run = run
        self._command_id = command_id
        known = run.stop
        self._view = known if known is not None and known.command_id == command_id else None
        self.ending: Ending | None = None
        self._asked: CommandSeen | None = None
        self._key = key
        self._acknowledged = False
        self._by_launcher = False
        self._left: set[int] = set()
        self._all_left = False
        self._last_ms: int | None = None

    def requested(self, command: CommandSeen) -> None:
        """The command as the bus has it; the first answer is shown with the time since it came."""
        self._asked, self._last_ms = command, command.append_ms

    @property
    def view(self) -> StopView:
        """How far it has come."""
        return self._view or StopView(state="requested", command_id=self._command_id)

    @property
    def received(self) -> bool:
        """Whether anybody has answered."""
        return self.view.state != "requested"

    def apply(self, data: RunData, at_ms: int) -> str | None:
        """One event of the run's telemetry; the line to say, if it is news of this command."""
        same = data.incarnation == self._run.incarnation
        if same and data.role == "launcher":
            self._by_launcher = True
        if not isinstance(data, StopAnswer):
            return None
        if data.command_id != self._command_id:
            # Commands to one training have one effect, which may be reported of the first alone.
            if not same or not isinstance(data, StopLeft | StopEscalated | StopExited):
                return None
            data = data.model_copy(update={"command_id": self._command_id})
        self._view = answered(self._view, data, at_ms)
        line = self._line(data)
        if line is None:
            return None
        # A clock that was set back must not give a negative time.
        since = None if self._last_ms is None else max(0, at_ms - self._last_ms)
        self._last_ms = at_ms
        return line if since is None else f"{line}  ({since:,} ms later)"

    def _line(self, data: StopAnswer) -> str | None:
        match data:
            case StopAcknowledged():
                new, self._acknowledged = not self._acknowledged, True
                self._by_launcher |= data.role == "launcher"
                self._check_all_left(data.world_size)
                who = "its launcher" if data.role == "launcher" else f"rank {data.rank}"
                return f"acknowledged by {who}" if new else None
            case StopCheckpoint():
                return checkpoint_line(data.decision, data.checkpoint, data.reason)
            case StopLeft():
                new = data.rank not in self._left
                self._left.add(data.rank)
                self._check_all_left(data.world_size)
                at = "" if data.step is None else f" at step {data.step:,}"
                return f"rank {data.rank} left its loop{at}" if new else None
            case StopEscalated():
                return f"{data.how} to the job: {plain_line(data.reason)}"
            case StopExited():
                self.ending = "stopped"
                return {
                    "edge": f"the job exited cleanly with {data.exit_code}",
                    "itself": f"the job had already exited with {data.exit_code}",
                }.get(data.how, f"the job was stopped by {data.how}, exit code {data.exit_code}")
            case StopRefused() if self.view.state == "refused":
                self.ending = "refused"
                advice = _ADVICE.get(data.why, "").format(key=self._key)
                why = f"refused ({data.why}): {plain_line(data.reason) or data.why}"
                return f"{why}; {advice}" if advice else why
            case StopRefused():
                return f"rank {data.rank} refused ({data.why}): {plain_line(data.reason)}"
            case StopExpired():
                self.ending = "expired"
                return f"expired: {plain_line(data.reason) or 'no reply in time'}"
            case _:
                return None

    def _check_all_left(self, world_size: int) -> None:
        self._all_left = len(self._left) >= world_size

    @property
    def perhaps_over(self) -> bool:
        """Whether all ranks have left their loops, and no launcher was heard: without one nobody
        sees the process end. One that there is may not have answered yet."""
        return self.ending is None and self._all_left and not self._by_launcher

    def conclude(self) -> None:
        """There is no launcher."""
        self.ending = "stopped"

    def unconfirmed(self, waited_s: float) -> str:
        """What to say when the wait is over and the job has not gone."""
        run = "tocsin status"
        if self.received:
            return f"not confirmed within {waited_s:g} s, but {self.view.state}; see `{run}`"
        line = f"no reply within {waited_s:g} s: {LISTENERS}"
        if self._asked is not None:
            until = datetime.fromtimestamp(self._asked.command.not_after_ms / 1000, UTC)
            line += f". The command is valid until {until:%H:%M:%S} UTC, in case the run reconnects"
        return line

    def as_json(self, *, sent: bool, message: str) -> str:
        """One JSON object; `message` is the last line for people."""
        return json.dumps(
            {
                "version": 1,
                "run_id": self._run.run_id,
                "incarnation": self._run.incarnation,
                "sent": sent,
                "confirmed": self.ending == "stopped",
                "message": message,
                "stop": history_facts(StopHistory(self.view, self._asked)),
            },
            indent=2,
        )


LISTENERS: Final = (
    "check that its `tocsin run` (or `start()`) is running and reaches this bus; `tocsin status` "
    "shows when it last reported"
)
"""What to look at when nobody answers."""


def requested_line(run: RunSeen, command_id: str) -> str:
    """The line that the command is on the bus."""
    return f"asked run {plain_line(run.run_id)} to stop (command {command_id[:_SHORT]})"


def unsure_line(error: BusUnavailable) -> str:
    """The line that the bus became unreachable while the command was sent."""
    return (
        f"the bus did not confirm the command: {plain_line(str(error))}; it may have "
        "arrived: once the bus is back, see `tocsin status`"
    )


def away_line(error: BusError) -> str:
    """The line that the bus became unreachable before the job was observed to exit."""
    return (
        f"the stop was requested, but the bus is unreachable: {plain_line(str(error))}; once it is "
        "back, see `tocsin status`"
    )


def under_way_line(run: RunSeen, stop: StopView, command: CommandSeen | None) -> str:
    """The line that another stop of the run is in progress."""
    who = StopHistory(stop, command).requested_by
    by = f", requested by {who}" if who else ""
    return (
        f"a stop of run {plain_line(run.run_id)} is already in progress ({stop.state}{by}); "
        "no other was sent, waiting for this one"
    )


_ADVICE: Final[Mapping[str, str]] = {
    "untrusted_key": (
        "copy {key} into a folder of keys that the run trusts (TOCSIN_STOP_KEYS, else "
        "stop.trusted_keys, else its user's own ~/.config/tocsin/keys), or stop it as its user; "
        "folders are read again at each command"
    ),
    "bad_signature": "something changed the command or the key {key}; try again",
    "stops_off": "end it where it runs: Ctrl-C, kill, or its scheduler",
    "other_incarnation": "another training of the run has started, or its last has ended; "
    "try again",
    "expired": "the clocks of the two machines are minutes apart, or the bus is slow",
}
