"""One rank of one training, listening for a stop: it verifies commands, and leaves its loop.

A daemon thread sleeps on the rank's socket. Each rank verifies a command for itself; it does not
trust the launcher that hands it over. `tocsin.emitter.stop.exit_points` is where the training's
thread asks it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from tocsin.emitter.stop import before_update, datagrams, saving
from tocsin.emitter.stop.exception import StopTraining, taken_over
from tocsin.emitter.stop.leave_report import Emit, ExitPoint, Flush, LeaveReport
from tocsin.emitter.stop.rank_agreement import Agreement
from tocsin.emitter.stop.rank_socket import RankSocket
from tocsin.emitter.stop.verification import (
    NO_STOP,
    STOP,
    Facts,
    Memory,
    SignedCommand,
    decide,
    read_keys,
    trusted_paths,
)
from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.schemas.records.events import clip
from tocsin.schemas.records.frames import RecordOrigin, Who
from tocsin.schemas.records.runs import CaptureDegraded
from tocsin.schemas.records.stops.commands import StopAcknowledged, StopRefused, StopRequested

logger = logging.getLogger(__name__)

COMMAND_COPY_WAIT_S: Final = 0.5
"""How long a rank that leaves with the others waits for its own copy of the command, seconds."""

EVALUATION_EXIT_WAIT_S: Final = 5.0
"""Evaluation batches are not exit points of all ranks: one leaves there only this long after it
has received the command, seconds."""

FRAMEWORK_STOP_WAIT_S: Final = 5.0
"""How long a framework that has taken a stop over may go on without ending its loop, seconds."""

UNCONFIRMED_SAVE_WAIT_S: Final = 5.0
"""How long a rank without its copy of the command waits for a write that goes on, seconds."""

CONFIRMATION_WAIT_S: Final = 5.0
"""How long a rank that has left before an update stays for the command that confirms it, seconds.
"""

RequestDetail = Callable[[int, str], object]
"""Capture more for so many steps, and why. Called on the listening thread; must not wait."""


class _TakenOver(NamedTuple):
    stop: StopTraining
    command: StopRequested | None
    exit_point: ExitPoint
    step: int
    at: float
    choice: saving.Choice | None
    writes: int


class Rank:
    """One rank of one training, listening."""

    def __init__(
        self,
        origin: RecordOrigin,
        emit: Emit,
        *,
        flush: Flush | None = None,
        local_rank: int = 0,
        restart_count: int = 0,
        training: int = 0,
        agreed: Agreement | None = None,
        request_detail: RequestDetail | None = None,
        finite: Callable[[], bool] | None = None,
        now_ms: Callable[[], int] = unix_ms,
    ) -> None:
        self.origin: Final = origin
        self.step = -1
        self.refused: Final[Counter[str]] = Counter()
        self.awake = agreed is not None
        self._emit = emit
        self._agreed = agreed
        self._request_detail = request_detail
        self._now_ms = now_ms
        self._memory = Memory()
        self._command: StopRequested | None = None
        self._received_at = 0.0
        self._received = threading.Event()
        self._saving = False
        self._taken_over: _TakenOver | None = None
        self._closed = False
        self._socket = RankSocket(origin, self._apply)
        self._leaving = LeaveReport(origin, emit, self._socket, flush=flush, finite=finite)
        self._question = before_update.Question(self._socket)
        self._early = before_update.Decision(self._question, origin.world_size)
        self._socket.listen(local_rank, restart_count, training)

    @property
    def socket(self) -> Path | None:
        """Where this rank listens; None if it could not."""
        return self._socket.path

    def at_exit_point(self, exit_point: ExitPoint, step: int) -> None:
        """Leave here if it is time. Raises StopTraining.

        May wait for the other ranks before that; where it leaves, for a checkpoint that is being
        written, or is to be, and until its report has arrived.
        """
        if self._saving:
            return
        taken = self._taken_over
        if taken is not None:
            if step > taken.step or time.monotonic() - taken.at > FRAMEWORK_STOP_WAIT_S:
                self.leave()
            return
        command = self._command
        if self._agreed is not None and exit_point != "evaluation":
            leave = self._agreed.at_exit_point(command is not None)
            if self._agreed.broken is not None:
                self._end_agreement(self._agreed.broken, step)
            elif self._agreed.closed:
                # The script has destroyed its process group: it steps alone from here on.
                self._agreed = None
                self.awake = command is not None
            elif leave:
                # Another rank heard; the datagram to this one may be on its way still, or lost.
                self._received.wait(COMMAND_COPY_WAIT_S)
                self._leave(self._command, exit_point, step)
        if command is None:
            return
        waiting = self._agreed is not None and (
            exit_point != "evaluation"
            or time.monotonic() - self._received_at < EVALUATION_EXIT_WAIT_S
        )
        if not waiting:
            self._leave(command, exit_point, step)

    def alert(self) -> None:
        """Something went wrong: have the ranks ready to leave together; never waits."""
        if self._agreed is not None:
            self._agreed.alert()

    def leave(self) -> None:
        """The loop has ended for a stop that was taken over, or should have. Raises StopTraining
        then; otherwise nothing happens.
        """
        taken = self._taken_over
        if taken is not None:
            choice = taken.choice or saving.framework_choice(taken.writes)
            self._leaving.report(taken.stop, taken.command, taken.exit_point, taken.step, choice)
            raise taken.stop

    def receive(self, signed: SignedCommand) -> None:
        """Verify a command; from the listening thread."""
        origin = self.origin
        facts = Facts(
            origin.run_id,
            origin.incarnation,
            read_keys(trusted_paths(os.environ)),
            stops_off=NO_STOP if os.environ.get(STOP) == "off" else "",
        )
        verdict = decide(signed, facts, self._memory, self._now_ms())
        if verdict.why is not None:
            self.refused[verdict.why] += 1
            if self.refused[verdict.why] == 1 and verdict.command_id:
                self._emit(
                    StopRefused(
                        **self._who(), command_id=verdict.command_id, why=verdict.why,
                        reason=clip(verdict.text, 500),
                    )
                )  # fmt: skip
            return
        command = verdict.command
        if command is None:
            return
        self._memory.note(signed, command)
        if verdict.reason != "obey":
            return
        self._memory.obey(command)
        self._received_at = time.monotonic()
        self._command = command
        self._received.set()
        self.awake = True
        self._emit(
            StopAcknowledged(
                **self._who(), command_id=command.command_id, issue_id=command.issue_id,
                step=self.step if self.step >= 0 else None,
            )
        )  # fmt: skip
        # At once, if it has left already before the update that this command is about.
        self._leaving.confirm(command)

    def await_command(self) -> None:
        """Where this rank has left before an update: wait for the command, within
        `CONFIRMATION_WAIT_S`.
        """
        self._leaving.await_confirmation(CONFIRMATION_WAIT_S)

    @property
    def updates_unguarded(self) -> bool:
        """Whether this rank takes no part in leaving before updates any more."""
        return self._early.off is not None or self._leaving.over

    def leaves_before_update(self, bad: bool, step: int, *, alike: bool) -> bool:
        """Whether this rank leaves before the update of `step`: `bad` are its gradients, and those
        of all ranks where they are `alike`. May wait for the listener of the node and other ranks.
        """
        if self._leaving.over or self._saving or self._taken_over is not None:
            return False
        was_off = self._early.off
        leaves = self._early.decide(bad, step, self._agreed, alike=alike)
        if (why := self._early.off) is not None and why != was_off:
            self._degraded(before_update.PROBE, why, step)
        return leaves

    def leave_before_update(
        self, reason: str, step: int, policy: before_update.CheckpointPolicy
    ) -> NoReturn:
        """Raise StopTraining: the step after `step`, the last completed one (-1: none), is not
        made. Waits for a checkpoint that is being written, or is to be.
        """
        saving.writes.wait(UNCONFIRMED_SAVE_WAIT_S)
        choice = self._leaving.choose(
            policy,
            None if self._agreed is None else self._agreed.vote,
            partial(saving.kept_until_command, policy),
        )
        stop = StopTraining(reason, step=step if step >= 0 else None, save=choice is None)
        self._leaving.report_early(stop, step, choice or self._save())
        raise stop

    def close(self) -> None:
        """Stop listening, and say that this training is over."""
        if self._closed:
            return
        self._closed = True
        self.awake = False
        if self._agreed is not None:
            self._agreed.close()
        self._socket.close(self.step)

    def _who(self) -> Who:
        return self.origin.fields

    def _apply(self, message: datagrams.Message) -> None:
        if message["kind"] == "stop":
            signed = SignedCommand.from_message(message)
            if signed is not None:
                self.receive(signed)
        elif message["kind"] == before_update.MAY_LEAVE:
            self._question.answered(message)
        elif message["kind"] == "look_closer" and self._request_detail is not None:
            self._request_detail(
                datagrams.number(message, "steps"), datagrams.text(message, "reason")
            )

    def _end_agreement(self, why: str, step: int) -> None:
        self._agreed = None
        self.awake = self._command is not None
        self._degraded("stop_agreement", f"each rank exits independently: {why}", step)

    def _degraded(self, probe: str, reason: str, step: int) -> None:
        logger.warning("stop: %s", reason)
        self._emit(
            CaptureDegraded(**self._who(), probe=probe, reason=clip(reason, 500), step=max(step, 0))
        )

    def _leave(self, command: StopRequested | None, exit_point: ExitPoint, step: int) -> None:
        reason = "another rank received a stop" if command is None else command.reason
        issue_id = None if command is None else command.issue_id
        if self._leaving.over:
            # Somebody has caught it, and goes on.
            raise StopTraining(reason, step=step, issue_id=issue_id)
        # A write on another thread would be cut off.
        saving.writes.wait(UNCONFIRMED_SAVE_WAIT_S if command is None else command.grace_s)
        choice = self._leaving.choose(
            None if command is None else command.checkpoint,
            None if self._agreed is None else self._agreed.most,
            partial(saving.kept, command),
        )
        stop = StopTraining(reason, step=step, issue_id=issue_id, save=choice is None)
        # Both of these are inside a step of the loop; the others may be far from its end.
        if exit_point in ("optimizer_step", "scaler_update") and taken_over(stop):
            ended = saving.writes.ended
            self._taken_over = _TakenOver(
                stop, command, exit_point, step, time.monotonic(), choice, ended
            )
            self.awake = True
            return
        self._leaving.report(stop, command, exit_point, step, choice or self._save())
        raise stop

    def _save(self) -> saving.Choice:
        # What saves may run through batches: they are no exit points now.
        self._saving = True
        try:
            return saving.save()
        finally:
            self._saving = False
