"""What this process does with tocsin: at most one training, ended when the process ends."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Final, NoReturn

from tocsin.emitter.identity import identify, rank_of
from tocsin.emitter.settings import CAPTURE, CaptureSettings, capture_settings, lay_over
from tocsin.emitter.training import Shape, Training
from tocsin.emitter.wall import Wall, to_stderr
from tocsin.schemas.runs import Outcome

CLOSE_S: Final = 5.0


class Session:
    """The training of this process, from when it begins until the process ends."""

    def __init__(self, environ: Mapping[str, str], wall: Wall) -> None:
        self.wall: Final = wall
        self.training: Training | None = None
        self.after_begin: Callable[[Training], None] | None = None
        self.before_end: Callable[[], None] | None = None
        self.on_exit: Callable[[], None] | None = None
        self.labels: dict[str, str] = {}
        # JSON that is laid over the section `capture` of the environment.
        self.capture = ""
        self._environ = environ
        self._outcome: Outcome = "completed"
        self._reason = ""
        self._exit_asked: tuple[object, int] = (None, 0)
        self._announced = False
        self._over = False
        self._pid = os.getpid()
        self._watch_the_end()

    def begin(self, place: tuple[int, int] | None = None) -> Training:
        """A training begins; `place` is (rank, world size) where torch.distributed knows it.

        Raises:
            ConfigurationError, OSError, RuntimeError: it cannot be watched.
        """
        if self.training is not None:
            return self.training
        rank, local_rank, world_size = rank_of(self._environ)
        if place is not None:
            rank, world_size = place
        identity = identify(self._environ, rank=rank, local_rank=local_rank, world_size=world_size)
        try:
            settings = capture_settings(lay_over(self._environ.get(CAPTURE, ""), self.capture))
        except ValueError as error:
            self.wall.switch_off("settings", f"{CAPTURE}: {error}; the defaults hold")
            settings = CaptureSettings()
        self.training = Training(identity, settings, self.wall, self._environ)
        self._pid = os.getpid()
        return self.training

    def announce(self, shape: Shape) -> None:
        """Say that the training has begun, once."""
        if self.training is not None and not self._announced:
            self._announced = True
            if self.after_begin is not None:
                self.wall.call("stop", self.after_begin, self.training)
            self.training.begin(shape, self.labels)

    def end(self, outcome: Outcome | None = None, *, timeout_s: float = CLOSE_S) -> None:
        """The training is over; waits for the bus for at most `timeout_s`."""
        if os.getpid() != self._pid or self._over:
            return
        self._over = True
        self.wall.call("exit hooks", self._leave_the_end)
        self.wall.call("outcome", self._note_the_exit)
        training = self.training
        if training is not None:
            if self.before_end is not None:
                self.wall.call("end of capture", self.before_end)
            self.wall.say_what_is_off()
            self.wall.call(
                "end of training",
                training.end,
                outcome or self._outcome,
                self._reason,
                timeout_s=timeout_s,
            )
            if "end of training" in self.wall.off:
                # Its thread would go on to say that this rank lives.
                self.wall.call("sender", training.sender.close, timeout_s)
        self.wall.report = to_stderr
        self.wall.say_what_is_off()
        if self.on_exit is not None:
            self.wall.call("end of services", self.on_exit)

    def _leave_the_end(self) -> None:
        """Take our hooks away: a process may watch thousands of trainings, one after the other."""
        atexit.unregister(self.end)
        if sys.excepthook is self._note:
            sys.excepthook = self._previous_hook
        if sys.exit is self._noted_exit:
            sys.exit = self._previous_exit

    def _watch_the_end(self) -> None:
        atexit.register(self.end)
        previous = self._previous_hook = sys.excepthook

        def note(
            kind: type[BaseException], error: BaseException, traceback: TracebackType | None
        ) -> None:
            interrupted = issubclass(kind, KeyboardInterrupt)
            self._outcome = "interrupted" if interrupted else "failed"
            # The type alone: a message may hold what must not leave the machine.
            self._reason = kind.__name__
            previous(kind, error, traceback)

        sys.excepthook = self._note = note
        previous_exit = self._previous_exit = sys.exit

        def noted_exit(status: str | int | None = None, /) -> NoReturn:
            # The exception hook is not called for it, and at the exit nobody tells the status.
            if threading.current_thread() is threading.main_thread():
                self._exit_asked = (status, self._steps())
            previous_exit(status)

        sys.exit = self._noted_exit = noted_exit

    def _steps(self) -> int:
        return 0 if self.training is None else self.training.next_step

    def _note_the_exit(self) -> None:
        """`sys.exit` was called with a status that says failure, and not caught to train on."""
        status, step = self._exit_asked
        if succeeded(status) or step != self._steps() or self._outcome != "completed":
            return
        self._outcome, self._reason = "failed", SystemExit.__name__


def succeeded(status: object) -> bool:
    """Whether a `SystemExit` with that code is the end of a process that did what it should."""
    return status is None or status == 0
