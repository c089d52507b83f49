"""Leaving before an update that would write a gradient that is not finite.

A rank sees such a gradient itself, and no command can be there in time. So what a command would
prove is asked of who listens on this node: the launcher, or what stands in for it. It answers no
unless the configuration asks for this, stops are on, and a stop of this run would be obeyed.
Several ranks leave only together. Once they have agreed, and not before, a launcher forbids
torchrun to start them again; ranks that stay keep their restarts. `start()` has no way to torchrun:
without a launcher it starts ranks again that have left, as after any other stop, while it has
restarts left. The command of the run's own rule follows, and confirms the stop
(`tocsin.emitter.stop.leave_report`).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Final, Literal, cast, get_args

from tocsin.emitter.stop import datagrams
from tocsin.emitter.stop.processes import Members, Trainer
from tocsin.emitter.stop.rank_agreement import Agreement
from tocsin.emitter.stop.rank_socket import RankSocket

VARIABLE: Final = "TOCSIN_BEFORE_UPDATE"
"""What such a stop does about the checkpoint; absent where ranks never leave so."""

PROBE: Final = "before_update"
"""The name under which it is reported that a rank takes part no more."""

MAY_LEAVE: Final = "may_leave"
"""The kind of the question, and of its answer."""

LEAVES: Final = "leaves"
"""Marks the word of a rank that it leaves now."""

ASK_S: Final = 3.0
"""How long a rank waits for an answer, seconds; the second one comes when torchrun knows, for which
the launcher waits less long (`launch.escalation.AGENTS_S`)."""

CheckpointPolicy = Literal["protect_last_good", "save", "skip"]


def policy_of(environ: Mapping[str, str]) -> CheckpointPolicy | None:
    """What the environment of a job asks for; None: its ranks leave for commands only."""
    value = environ.get(VARIABLE, "")
    return cast("CheckpointPolicy", value) if value in get_args(CheckpointPolicy) else None


def who_asks(message: datagrams.Message, members: Members) -> Trainer | None:
    """The rank that asks the listener of its node; None if nobody of this job does."""
    if message["kind"] != MAY_LEAVE:
        return None
    pid, incarnation = datagrams.number(message, "pid"), datagrams.text(message, "incarnation")
    asking = members.with_pid(pid, incarnation) if incarnation == members.incarnation else []
    return asking[-1] if asking else None


def leaves(message: datagrams.Message) -> bool:
    """Whether the rank that asks has its permission, and leaves now."""
    return message.get(LEAVES) is True


def answer(trainer: Trainer, on: bool) -> None:
    """Tell a rank that asked; does not wait."""
    datagrams.send(trainer.socket, {"kind": MAY_LEAVE, "on": on})


class Question:
    """A rank's question to the listener of its node."""

    def __init__(self, socket: RankSocket) -> None:
        self._socket = socket
        self._answered = threading.Event()
        self._on = False

    def ask(self, step: int) -> bool:
        """Whether this rank may leave before the update of this step. Waits up to `ASK_S`; no
        answer is a no.
        """
        return self._on_question({"kind": MAY_LEAVE, "step": step})

    def leave(self, step: int) -> None:
        """Have the listener prepare for this rank's end: nobody starts it again. Waits up to
        `ASK_S`, and goes on without an answer, as a stop by a command does.
        """
        self._on_question({"kind": MAY_LEAVE, "step": step, LEAVES: True})

    def answered(self, message: datagrams.Message) -> None:
        """Take the answer; from the listening thread."""
        self._on = message.get("on") is True
        self._answered.set()

    def _on_question(self, message: datagrams.Message) -> bool:
        self._on = False
        self._answered.clear()
        if not self._socket.send(message):
            return False
        self._answered.wait(ASK_S)
        return self._on


class Decision:
    """Whether one rank leaves before an update. On the training's thread.

    Attributes:
        off: why this rank takes part no more; None while it does. It is so on all ranks at the same
            step, but where ranks do not step alike.
    """

    def __init__(self, question: Question, world_size: int) -> None:
        self.off: str | None = None
        self._question = question
        self._several = world_size > 1

    def decide(self, bad: bool, step: int, agreed: Agreement | None, *, alike: bool) -> bool:
        """Whether to leave, where this rank's gradients are `bad`, before the update of `step`.

        `alike`: all ranks have the same gradients, since they are averaged; else all of them call
        this before each update, and wait for each other.
        """
        if self.off is not None:
            return False
        if not self._several:
            return bad and self._permitted(self._question.ask(step), step)
        if agreed is None:
            self.off = "the ranks do not agree on steps"
            return False
        if not alike:
            most = self._vote(agreed, int(bad))
            bad = most is not None and most > 0
        if not bad:
            return False
        # All ranks are here now; one that may not keeps the others.
        refused = self._vote(agreed, int(not self._question.ask(step)))
        return refused is not None and self._permitted(refused == 0, step)

    def _permitted(self, may: bool, step: int) -> bool:
        if may:
            self._question.leave(step)
        else:
            # The update is made: what it destroys is not saved by asking again at the next one.
            self.off = "the update was made: no stop is permitted"
        return may

    def _vote(self, agreed: Agreement, value: int) -> int | None:
        most = agreed.vote(value)
        if most is None:
            self.off = "the ranks do not make the same updates"
        return most
