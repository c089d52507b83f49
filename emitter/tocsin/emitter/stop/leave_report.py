"""How a rank leaves: what becomes of the checkpoint, and what it reports, once."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Literal

from tocsin.emitter.process.isolation import from_signal
from tocsin.emitter.process.stderr import print_line
from tocsin.emitter.stop import saving
from tocsin.emitter.stop.exception import StopTraining
from tocsin.emitter.stop.processes import BEFORE_UPDATE
from tocsin.emitter.stop.rank_socket import RankSocket
from tocsin.schemas.monotonic_clock import unix_us
from tocsin.schemas.records.checkpoints import Checkpoint
from tocsin.schemas.records.events import Data, clip
from tocsin.schemas.records.frames import RecordOrigin
from tocsin.schemas.records.stops.commands import StopCheckpoint, StopLeft, StopRequested

logger = logging.getLogger(__name__)

FLUSH_S: Final = 2.0
"""How long a leaving rank waits for its last records to be acknowledged, seconds."""

ExitPoint = Literal["optimizer_step", "scaler_update", "backward", "evaluation"]
"""Where a rank leaves for a command."""

Emit = Callable[[Data], object]
Flush = Callable[[float], object]


class LeaveReport:
    """The leaving of one rank. On the training's thread, but for `confirm`."""

    def __init__(
        self,
        origin: RecordOrigin,
        emit: Emit,
        socket: RankSocket,
        *,
        flush: Flush | None,
        finite: Callable[[], bool] | None,
    ) -> None:
        self.over = False
        """Whether this rank has left."""
        self._origin = origin
        self._emit = emit
        self._socket = socket
        self._flush = flush
        self._finite = finite
        self._lock = threading.Lock()
        self._early: tuple[int, saving.Choice] | None = None
        """Where it has left before an update, as long as no command has confirmed that."""
        self._command: StopRequested | None = None
        """The one that was obeyed."""
        self._confirmed = threading.Event()

    def await_confirmation(self, timeout_s: float) -> None:
        """Where this rank has left before an update: wait for the command that confirms it."""
        if self._early is not None:
            self._confirmed.wait(timeout_s)

    def choose(
        self,
        policy: str | None,
        most: Callable[[int], int | None] | None,
        kept: Callable[[str], saving.Choice],
    ) -> saving.Choice | None:
        """What becomes of the checkpoint; None: one is to be saved. All ranks choose the same.

        Waits for a GPU, on which the weights are, and for the other ranks. Raises only what a
        signal handler of the user's has raised.

        Args:
            policy: what the stop asks for; None: it is not known, and the others save none then,
                either.
            most: gives the highest of what all ranks pass; None: there is no such number.
            kept: the choice where nothing is saved, and why not.
        """
        if policy is not None and policy != "save":
            return kept("")
        bad = policy is None
        why = "a rank has not received the command" if bad else "the weights are not finite"
        try:
            bad = bad or self._finite is None or not self._finite()
        except Exception as error:
            # An emitter hook's isolation: what cannot be looked at is not saved.
            if from_signal(error):
                raise
            bad, why = True, f"the weights cannot be read: {type(error).__name__}"
        if self._origin.world_size > 1:
            others = None if most is None else most(int(bad))
            if others is None:
                bad, why = True, "the ranks do not leave together"
            elif others and not bad:
                bad, why = True, "another rank cannot save"
        return kept(why) if bad else None

    def report(
        self,
        stop: StopTraining,
        command: StopRequested | None,
        exit_point: ExitPoint,
        step: int,
        choice: saving.Choice,
    ) -> None:
        """Say that this rank leaves for a command, and wait until that has arrived; once."""
        if self.over:
            return
        self.over = True
        command_id = "" if command is None else command.command_id
        with self._reporting(stop):
            if command is not None and command_id:
                self._emit_left(command, exit_point, step, choice)
            self._socket.send({"kind": "left", "command_id": command_id, "step": step})

    def report_early(self, stop: StopTraining, step: int, choice: saving.Choice) -> None:
        """Say that this rank leaves before an update, and wait until that has arrived; `confirm`
        follows when its command comes.
        """
        self.over = True
        with self._lock:
            self._early, command = (step, choice), self._command
        with self._reporting(stop):
            self._socket.send({"kind": "left", "step": max(step, 0), BEFORE_UPDATE: True})
            if command is not None:
                # It came while a checkpoint was saved or written.
                self.confirm(command)

    @contextmanager
    def _reporting(self, stop: StopTraining) -> Iterator[None]:
        """What is reported inside has arrived afterwards, or is given up; then it is printed."""
        try:
            yield
            if self._flush is not None:
                self._flush(FLUSH_S)
        except Exception as error:
            # An emitter hook's isolation: the stop comes through even if it cannot be reported.
            if from_signal(error):
                raise
            logger.warning("the stop could not be reported", exc_info=True)
        self._print(stop)

    def confirm(self, command: StopRequested) -> None:
        """A command has come: answer it, if this rank has left for it already; else when it does.
        From the listening thread, or the training's.
        """
        with self._lock:
            self._command = command
            early, self._early = self._early, None
        if early is None:
            return
        step, choice = early
        if choice.decision == "protected":
            choice = saving.kept(command, choice.reason)
        self._emit_left(command, BEFORE_UPDATE, step, choice)
        self._confirmed.set()

    def _emit_left(
        self, command: StopRequested, exit_point: str, step: int, choice: saving.Choice
    ) -> None:
        who = self._origin.fields
        if self._origin.rank == 0 or choice.decision == "not_saved":
            self._emit(self._chosen(command, choice, step))
        self._emit(
            StopLeft(
                **who, command_id=command.command_id, issue_id=command.issue_id,
                step=max(step, 0), edge=exit_point, left_us=unix_us(),
            )
        )  # fmt: skip

    def _chosen(self, command: StopRequested, choice: saving.Choice, step: int) -> StopCheckpoint:
        checkpoint = None
        if choice.decision == "saved" and choice.path:
            path = os.path.abspath(choice.path)
            checkpoint = Checkpoint(path=clip(path), step=max(step, 0), finite=True)
        elif choice.decision == "protected":
            checkpoint = command.last_good_checkpoint
        return StopCheckpoint(
            **self._origin.fields, command_id=command.command_id, issue_id=command.issue_id,
            decision=choice.decision, checkpoint=checkpoint, reason=clip(choice.reason, 500),
        )  # fmt: skip

    def _print(self, stop: StopTraining) -> None:
        if not self._socket.has_listener:
            at = "" if stop.step is None else f" at step {stop.step:,}"
            print_line(f"training stopped{at}: {stop.reason}")
