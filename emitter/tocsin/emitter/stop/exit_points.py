"""Where a training process leaves its loop when it is told to stop.

Capture calls `started` when a training begins, `check` at each edge (outside of its isolation)
and `finished` at its end. In between a daemon thread sleeps on the rank's socket. A command is
verified by each rank for itself; the launcher that hands it over is not taken at its word.

While nothing was heard `check` costs an attribute or two; with several ranks there is also the
agreement (`tocsin.emitter.stop.rank_agreement`).

A framework that can end its loop in good order takes the stop over (`take_over`): it is not raised
at the edge then, but when the loop has ended (`leave`), or at the next edge if the loop goes on.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal, NamedTuple

from tocsin.emitter.process.identity import Who, who_speaks
from tocsin.emitter.process.isolation import from_signal
from tocsin.emitter.process.stderr import print_line
from tocsin.emitter.stop import datagrams, rank_agreement, saving
from tocsin.emitter.stop.exception import StopTraining as StopTraining
from tocsin.emitter.stop.exception import take_over as take_over
from tocsin.emitter.stop.exception import taken_over
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
from tocsin.schemas.monotonic_clock import unix_ms, unix_us
from tocsin.schemas.records.events import Data, clip
from tocsin.schemas.records.frames import Speaker
from tocsin.schemas.records.runs import CaptureDegraded, Checkpoint
from tocsin.schemas.records.stops import (
    StopAcknowledged,
    StopCheckpoint,
    StopLeft,
    StopRefused,
    StopRequested,
)

logger = logging.getLogger(__name__)

FLUSH_S: Final = 2.0
"""How long a leaving rank waits for its last records to be acknowledged, seconds."""

TOLD_S: Final = 0.5
"""How long a rank that leaves with the others waits for its own copy of the command, seconds."""

EVALUATION_S: Final = 5.0
"""Evaluation batches are not edges of all ranks: one leaves there only this long after it heard."""

TAKEN_S: Final = 5.0
"""How long a framework that has taken a stop over may go on without ending its loop, seconds."""

UNTOLD_GRACE_S: Final = 5.0
"""How long a rank without its copy of the command waits for a write that goes on, seconds."""

Edge = Literal["optimizer_step", "scaler_update", "backward", "evaluation"]
Emit = Callable[[Data], object]
Flush = Callable[[float], object]
Look = Callable[[int, str], object]
"""Capture more for so many steps, and why. Called on the listening thread; must not wait."""


class _Taken(NamedTuple):
    stop: StopTraining
    command: StopRequested | None
    edge: Edge
    step: int
    at: float
    choice: saving.Choice | None
    writes: int


class Rank:
    """One rank of one training, listening."""

    def __init__(
        self,
        speaker: Speaker,
        emit: Emit,
        *,
        flush: Flush | None = None,
        local_rank: int = 0,
        restart_count: int = 0,
        training: int = 0,
        agreed: rank_agreement.Agreement | None = None,
        look_closer: Look | None = None,
        finite: Callable[[], bool] | None = None,
        now_ms: Callable[[], int] = unix_ms,
    ) -> None:
        self.speaker: Final = speaker
        self.step = -1
        self.refused: Final[Counter[str]] = Counter()
        self.awake = agreed is not None
        self._emit = emit
        self._flush = flush
        self._agreed = agreed
        self._look_closer = look_closer
        self._finite = finite
        self._now_ms = now_ms
        self._memory = Memory()
        self._heard: StopRequested | None = None
        self._heard_at = 0.0
        self._told = threading.Event()
        self._left = self._saving = False
        self._taken: _Taken | None = None
        self._closed = False
        self._launcher = os.environ.get("TOCSIN_LAUNCHER", "")
        self._endpoint = self._open()
        if self._endpoint is not None:
            self._say_hello(local_rank, restart_count, training)
            threading.Thread(target=self._listen, name="tocsin-stop", daemon=True).start()

    @property
    def socket(self) -> Path | None:
        """Where this rank listens; None if it could not."""
        return None if self._endpoint is None else self._endpoint.path

    def at_edge(self, edge: Edge, step: int) -> None:
        """Leave here if it is time. Raises StopTraining."""
        if self._saving:
            return
        taken = self._taken
        if taken is not None:
            if step > taken.step or time.monotonic() - taken.at > TAKEN_S:
                self.leave()
            return
        command = self._heard
        if self._agreed is not None and edge != "evaluation":
            leave = self._agreed.at_edge(command is not None)
            if self._agreed.broken is not None:
                self._end_agreement(self._agreed.broken, step)
            elif self._agreed.closed:
                # The script has destroyed its process group: it steps alone from here on.
                self._agreed = None
                self.awake = command is not None
            elif leave:
                # Another rank heard; the datagram to this one may be on its way still, or lost.
                self._told.wait(TOLD_S)
                self._leave(self._heard, edge, step)
        if command is None:
            return
        waiting = self._agreed is not None and (
            edge != "evaluation" or time.monotonic() - self._heard_at < EVALUATION_S
        )
        if not waiting:
            self._leave(command, edge, step)

    def alert(self) -> None:
        """Something went wrong: have the ranks ready to leave together; never waits."""
        if self._agreed is not None:
            self._agreed.alert()

    def leave(self) -> None:
        """The loop has ended for a stop that was taken over, or should have. Raises StopTraining
        then; otherwise nothing happens.
        """
        taken = self._taken
        if taken is not None:
            choice = taken.choice or saving.of_framework(taken.writes)
            self._report_leaving(taken.stop, taken.command, taken.edge, taken.step, choice)
            raise taken.stop

    def hear(self, signed: SignedCommand) -> None:
        """Judge a command; from the listening thread."""
        speaker = self.speaker
        facts = Facts(
            speaker.run_id,
            speaker.incarnation,
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
        self._heard_at = time.monotonic()
        self._heard = command
        self._told.set()
        self.awake = True
        self._emit(
            StopAcknowledged(
                **self._who(), command_id=command.command_id, issue_id=command.issue_id,
                step=self.step if self.step >= 0 else None,
            )
        )  # fmt: skip

    def close(self) -> None:
        """Stop listening, and say that this training is over."""
        if self._closed:
            return
        self._closed = True
        self.awake = False
        if self._agreed is not None:
            self._agreed.close()
        if self._endpoint is not None:
            if self._launcher:
                datagrams.send(
                    self._launcher,
                    {
                        "kind": "finished", "pid": os.getpid(), "rank": self.speaker.rank,
                        "incarnation": self.speaker.incarnation, "step": self.step,
                    },
                )  # fmt: skip
            # Wakes the thread, which closes its socket itself.
            datagrams.send(self._endpoint.path, {"kind": "close"})

    def _who(self) -> Who:
        return who_speaks(self.speaker)

    def _open(self) -> datagrams.Endpoint | None:
        folder = os.environ.get("TOCSIN_RUNTIME_DIR")
        if not folder:
            return None  # neither a launcher nor `start()`: nobody would know where
        try:
            endpoint = datagrams.Endpoint(Path(folder) / f"r{self.speaker.rank}-{os.getpid()}.sock")
        except OSError as error:
            logger.warning("no stop can reach this rank: %s", error)
            return None
        endpoint.set_blocking()
        return endpoint

    def _say_hello(self, local_rank: int, restart_count: int, training: int) -> None:
        if self._launcher:
            datagrams.send(
                self._launcher,
                {
                    "kind": "hello", "role": "trainer", "pid": os.getpid(),
                    "rank": self.speaker.rank, "local_rank": local_rank,
                    "world_size": self.speaker.world_size,
                    "incarnation": self.speaker.incarnation,
                    "restart_count": restart_count, "training": training,
                    "socket": str(self.socket),
                },
            )  # fmt: skip

    def _listen(self) -> None:
        endpoint = self._endpoint
        assert endpoint is not None
        while not self._closed:
            try:
                message = endpoint.receive()
            except OSError:
                break
            if message is None:
                continue
            try:
                self._take(message)
            except Exception:
                # The isolation of this thread: one bad message must not end the listening.
                logger.warning("a message was not understood", exc_info=True)
        endpoint.close()

    def _take(self, message: datagrams.Message) -> None:
        if message["kind"] == "stop":
            signed = SignedCommand.of(message)
            if signed is not None:
                self.hear(signed)
        elif message["kind"] == "look_closer" and self._look_closer is not None:
            self._look_closer(datagrams.number(message, "steps"), datagrams.text(message, "reason"))

    def _end_agreement(self, why: str, step: int) -> None:
        self._agreed = None
        self.awake = self._heard is not None
        reason = f"each rank leaves at its own edge: {why}"
        logger.warning("stop: %s", reason)
        self._emit(
            CaptureDegraded(
                **self._who(), probe="stop_agreement", reason=clip(reason, 500), step=max(step, 0)
            )
        )

    def _leave(self, command: StopRequested | None, edge: Edge, step: int) -> None:
        reason = "another rank received a stop" if command is None else command.reason
        issue_id = None if command is None else command.issue_id
        if self._left:
            # Somebody has caught it, and goes on.
            raise StopTraining(reason, step=step, issue_id=issue_id)
        # A write on another thread would be cut off.
        saving.writes.wait(UNTOLD_GRACE_S if command is None else command.grace_s)
        choice = self._choose(command)
        stop = StopTraining(reason, step=step, issue_id=issue_id, save=choice is None)
        # Both of these are inside a step of the loop; the others may be far from its end.
        if edge in ("optimizer_step", "scaler_update") and taken_over(stop):
            ended = saving.writes.ended
            self._taken = _Taken(stop, command, edge, step, time.monotonic(), choice, ended)
            self.awake = True
            return
        if choice is None:
            # What saves may run through batches: they are no edges now.
            self._saving = True
            try:
                choice = saving.save()
            finally:
                self._saving = False
        self._report_leaving(stop, command, edge, step, choice)
        raise stop

    def _choose(self, command: StopRequested | None) -> saving.Choice | None:
        """What becomes of the checkpoint; None: one is to be saved. All ranks choose the same.

        Without the command it is not known what it asks for; the others save none then, either.
        """
        if command is not None and command.checkpoint != "save":
            return saving.kept(command)
        bad = command is None
        why = "a rank has not received the command" if bad else "the weights are not finite"
        try:
            bad = bad or self._finite is None or not self._finite()
        except Exception as error:
            # An emitter hook's isolation: what cannot be looked at is not saved.
            if from_signal(error):
                raise
            bad, why = True, f"the weights cannot be read: {type(error).__name__}"
        if self.speaker.world_size > 1:
            most = None if self._agreed is None else self._agreed.most(int(bad))
            if most is None:
                bad, why = True, "the ranks do not leave together"
            elif most and not bad:
                bad, why = True, "another rank cannot save"
        return saving.kept(command, why) if bad else None

    def _report_leaving(
        self,
        stop: StopTraining,
        command: StopRequested | None,
        edge: Edge,
        step: int,
        choice: saving.Choice,
    ) -> None:
        if self._left:
            return
        self._left = True
        command_id = "" if command is None else command.command_id
        try:
            if command is not None and command_id:
                if self.speaker.rank == 0 or choice.decision == "not_saved":
                    self._emit(self._chosen(command, choice, step))
                self._emit(
                    StopLeft(
                        **self._who(), command_id=command_id, issue_id=stop.issue_id,
                        step=max(step, 0), edge=edge, left_us=unix_us(),
                    )
                )  # fmt: skip
            if self._launcher:
                datagrams.send(
                    self._launcher,
                    {
                        "kind": "left", "command_id": command_id, "rank": self.speaker.rank,
                        "incarnation": self.speaker.incarnation, "pid": os.getpid(), "step": step,
                    },
                )  # fmt: skip
            if self._flush is not None:
                self._flush(FLUSH_S)
        except Exception as error:
            # An emitter hook's isolation: the stop comes through even if it cannot be told.
            if from_signal(error):
                raise
            logger.warning("the stop could not be reported", exc_info=True)
        if not self._launcher:
            print_line(f"training stopped at step {step:,}: {stop.reason}")

    def _chosen(self, command: StopRequested, choice: saving.Choice, step: int) -> StopCheckpoint:
        checkpoint = None
        if choice.decision == "saved" and choice.path:
            path = os.path.abspath(choice.path)
            checkpoint = Checkpoint(path=clip(path), step=max(step, 0), finite=True)
        elif choice.decision == "protected":
            checkpoint = command.last_good_checkpoint
        return StopCheckpoint(
            **self._who(), command_id=command.command_id, issue_id=command.issue_id,
            decision=choice.decision, checkpoint=checkpoint, reason=clip(choice.reason, 500),
        )  # fmt: skip


def leave() -> None:
    """A loop whose framework had taken a stop over has ended: raise that StopTraining. Otherwise
    nothing happens.
    """
    rank = _rank
    if rank is not None:
        rank.leave()


_rank: Rank | None = None


def started(
    speaker: Speaker,
    emit: Emit,
    *,
    flush: Flush | None = None,
    local_rank: int = 0,
    restart_count: int = 0,
    training: int = 0,
    look_closer: Look | None = None,
    finite: Callable[[], bool] | None = None,
) -> Rank:
    """A training begins in this process: listen, and say hello to the launcher.

    `emit` must be safe to call from another thread and must not wait; `flush(timeout_s)` waits
    until what was emitted is acknowledged. `look_closer` is told when a rule asks for more.
    `finite` says whether the weights are, now; it may raise what it likes.
    """
    global _rank
    finished()
    stops_off = os.environ.get(STOP) == "off"
    agreed = None if stops_off or speaker.world_size < 2 else rank_agreement.current()
    _rank = Rank(
        speaker, emit, flush=flush, local_rank=local_rank, restart_count=restart_count,
        training=training, agreed=agreed, look_closer=look_closer, finite=finite,
    )  # fmt: skip
    return _rank


def check(edge: Edge, step: int) -> None:
    """An edge where this process can leave. Raises StopTraining if a verified stop is due here."""
    rank = _rank
    if rank is not None:
        rank.step = step
        if rank.awake:
            try:
                rank.at_edge(edge, step)
            except Exception as error:
                # An emitter hook's isolation: only the stop leaves, and that is no `Exception`.
                if from_signal(error):
                    raise
                rank.awake = False
                logger.warning(
                    "a check between two steps has failed; the training continues", exc_info=True
                )


def asks(step: int) -> bool:
    """The same edge, passed by quickly: whether `check` has more to do there than to note it."""
    rank = _rank
    if rank is None:
        return False
    rank.step = step
    return rank.awake


def listening() -> Rank | None:
    """The rank of the training of this process: who passes edges by quickly asks it himself."""
    return _rank


def alert() -> None:
    """Something went wrong in this rank that a stop may follow. On the training's thread."""
    rank = _rank
    if rank is not None:
        rank.alert()


def finished() -> None:
    """The training is over; nothing is heard any more. Without a training it does nothing."""
    global _rank
    rank, _rank = _rank, None
    if rank is not None:
        rank.close()


def _in_child() -> None:
    # A forked data-loader worker is not a rank: it must not leave, nor take the socket's file away.
    global _rank
    _rank = None


os.register_at_fork(after_in_child=_in_child)
