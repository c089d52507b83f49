"""What this process does with tocsin: one training after the other, the last one ended when the
process ends.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from _sitebuiltins import Quitter
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Final, NoReturn

from tocsin.emitter.plan.settings import CaptureSettings, capture_settings, lay_over
from tocsin.emitter.process.environment import CAPTURE
from tocsin.emitter.process.identity import identify, rank_of
from tocsin.emitter.process.isolation import Isolation, to_stderr
from tocsin.emitter.process.stderr import print_line
from tocsin.emitter.training.training import SETTINGS, Shape, Training
from tocsin.schemas.records.runs import Outcome

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from multiprocessing.util import Finalize

CLOSE_S: Final = 5.0
CAPTURE_S: Final = 2.0

MAX_EARLY: Final = 10_000
"""Calls before the first optimizer step that are kept until it comes."""


class Session:
    """The trainings of this process, until the process ends; `training` is the one under way."""

    def __init__(self, environ: Mapping[str, str], isolation: Isolation) -> None:
        self.isolation: Final = isolation
        self.training: Training | None = None
        self.after_begin: Callable[[Training], None] | None = None
        self.before_end: Callable[[float], None] | None = None
        """Hands over what is on its way, for at most so many seconds."""
        self.on_exit: Callable[[], None] | None = None
        self.early: list[Callable[[], None]] = []
        """What was called before the training began, to be done once it has."""
        self.labels: dict[str, str] = {}
        # JSON that is laid over the section `capture` of the environment.
        self.capture = ""
        self._environ = environ
        self._outcome: Outcome = "completed"
        self._reason = ""
        self._exit_asked: tuple[object, int] = (None, 0)
        self._not_kept = 0
        self._announced = False
        self._over = False
        self._closing: list[threading.Thread] = []
        self._at_exit_of_child: Finalize | None = None
        self._pid = os.getpid()
        self._watch_the_end()

    def start(
        self,
        place: tuple[int, int] | None = None,
        agree: Callable[[str], str] | None = None,
    ) -> Training:
        """A training begins; `place` is (rank, world size) where torch.distributed knows it.

        `agree` takes the identity that this rank knows, and returns the one of all ranks.

        Raises:
            ConfigurationError, OSError, RuntimeError: it cannot be watched.
        """
        if self.training is not None:
            return self.training
        rank, local_rank, world_size = rank_of(self._environ)
        if place is not None:
            rank, world_size = place
        identity = identify(self._environ, rank=rank, local_rank=local_rank, world_size=world_size)
        if agree is not None:
            try:
                identity = identity.joined(agree(identity.claim))
            except Exception:
                # An emitter hook's isolation: this rank speaks for itself then.
                logger.warning("the ranks did not agree on their training", exc_info=True)
        try:
            settings = capture_settings(lay_over(self._environ.get(CAPTURE, ""), self.capture))
        except ValueError as error:
            self.isolation.switch_off(SETTINGS, f"{CAPTURE}: {error}; the defaults hold")
            settings = CaptureSettings()
        self.training = Training(
            identity, settings, self.isolation, self._environ, after=tuple(self._closing)
        )
        self._pid = os.getpid()
        return self.training

    def keep(self, call: Callable[[], None]) -> None:
        """Do it once the training has begun. Beyond `MAX_EARLY` it is left out, and counted."""
        if len(self.early) < MAX_EARLY:
            self.early.append(call)
            return
        if self._not_kept == 0:
            print_line(
                f"more than {MAX_EARLY:,} calls of run.log and others before the first step: "
                "no more are kept until it comes"
            )
        self._not_kept += 1

    def announce(self, shape: Shape) -> None:
        """Say that the training has begun, once."""
        if self.training is not None and not self._announced:
            self._announced = True
            after_begin, self.after_begin = self.after_begin, None
            if after_begin is not None:
                self.isolation.run("stop", after_begin, self.training)
            self.training.start(shape, self.labels)
            if self._not_kept:
                print_line(
                    f"calls of run.log and others that were not kept: {self._not_kept:,}, behind "
                    f"the first {MAX_EARLY:,} before the first step"
                )
                self._not_kept = 0
            early, self.early = self.early, []
            for call in early:
                self.isolation.run("api", call)

    def end_training(self) -> None:
        """The training is over, and another begins in this process. Does not wait: what is not
        sent yet is sent from another thread.
        """
        training, self.training = self.training, None
        self._announced = False
        if training is None:
            return
        if self.before_end is not None:
            self.isolation.run("end of capture", self.before_end, 0.0)
        self.isolation.run("end of training", training.emit_end, "completed")
        closing = threading.Thread(
            target=training.sender.close, args=(CLOSE_S,), name="tocsin-close", daemon=True
        )
        closing.start()
        self._closing = [*(each for each in self._closing if each.is_alive()), closing]

    def end(self, outcome: Outcome | None = None, *, timeout_s: float = CLOSE_S) -> None:
        """The training is over; waits for the bus for at most `timeout_s`."""
        if os.getpid() != self._pid or self._over:
            return
        self._over = True
        self.isolation.run("exit hooks", self._leave_the_end)
        self.isolation.run("outcome", self._note_the_exit)
        training = self.training
        if training is not None:
            if self.before_end is not None:
                self.isolation.run("end of capture", self.before_end, CAPTURE_S)
            self.isolation.report_off()
            self.isolation.run(
                "end of training",
                training.end,
                outcome or self._outcome,
                self._reason,
                timeout_s=timeout_s,
            )
            if "end of training" in self.isolation.off:
                # Its thread would go on to report that this rank lives.
                self.isolation.run("sender", training.sender.close, timeout_s)
        until = time.monotonic() + timeout_s
        for closing in self._closing:
            closing.join(max(0.0, until - time.monotonic()))
        self.isolation.report = to_stderr
        self.isolation.report_off()
        if self.on_exit is not None:
            self.isolation.run("end of services", self.on_exit)

    def _leave_the_end(self) -> None:
        """Take our hooks away: a process may watch thousands of trainings, one after the other."""
        atexit.unregister(self.end)
        if self._at_exit_of_child is not None:
            self._at_exit_of_child.cancel()
        if sys.excepthook is self._note:
            sys.excepthook = self._previous_hook
        if sys.exit is self._noted_exit:
            sys.exit = self._previous_exit
        if Quitter.__call__ is self._noted_quit:
            _set_quit(self._previous_quit)

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
            self._note_status(status)
            previous_exit(status)

        sys.exit = self._noted_exit = noted_exit
        previous_quit = self._previous_quit = Quitter.__call__

        def noted_quit(quitter: Quitter, code: str | int | None = None) -> NoReturn:
            self._note_status(code)
            previous_quit(quitter, code)

        self._noted_quit = noted_quit
        _set_quit(noted_quit)
        self._watch_the_end_of_a_child()

    def _note_status(self, status: object) -> None:
        """The exception hook is not called for an exit, and at the end the status is not known."""
        if threading.current_thread() is threading.main_thread():
            self._exit_asked = (status, self._steps())

    def _watch_the_end_of_a_child(self) -> None:
        """A child of `multiprocessing` leaves without the usual exit: no hook is called there."""
        process = sys.modules.get("multiprocessing.process")
        if process is None or process.parent_process() is None:
            return
        from multiprocessing.util import Finalize

        def end() -> None:
            error = sys.exc_info()[1]
            if isinstance(error, SystemExit):
                self._exit_asked = (error.code, self._steps())
            elif error is not None:
                self._outcome, self._reason = "failed", type(error).__name__
            self.end()

        self._at_exit_of_child = Finalize(None, end, exitpriority=0)

    def _steps(self) -> int:
        return 0 if self.training is None else self.training.next_step

    def _note_the_exit(self) -> None:
        """An exit was called with a failing status, and not caught to train on."""
        status, step = self._exit_asked
        if succeeded(status) or step != self._steps() or self._outcome != "completed":
            return
        self._outcome, self._reason = "failed", SystemExit.__name__


def succeeded(status: object) -> bool:
    """Whether a `SystemExit` with that code is the end of a process that did what it should."""
    return status is None or status == 0


def _set_quit(call: Callable[[Quitter, str | int | None], NoReturn]) -> None:
    """`exit()` and `quit()` of scripts: objects of one class, which raise without `sys.exit`."""
    setattr(Quitter, "__call__", call)  # noqa: B010  (for mypy a method is not assigned)
