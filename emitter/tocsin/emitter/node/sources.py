"""A source of samples that is read as often as it is worth, and never ends the others.

`Paced` reads in the sampler's thread: what turns out to be expensive is read less often, and its
last values are in between, so that the columns stay the same. `ThreadedSource` reads in a thread of
its own: for what can be slow or hang, as drivers and network file systems do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final

from tocsin.emitter.process.stderr import print_line

Sample = dict[str, float]
"""Values by column; the names carry their unit."""

Read = Callable[[float], Sample]
"""Reads a source; the argument is a monotonic clock, seconds."""

SHARE: Final = 0.0004
"""Of one core: what one source may cost. One that costs more is read less often."""

FAILURES: Final = 5
"""Readings in a row that fail before a source is left alone."""

SLOW_S: Final = 1.0
"""A reading beside the sampler that takes longer is called slow, seconds."""

REST: Final = 10
"""A slow source rests so many times as long as it took."""

KEPT_S: Final = 10.0
"""How long the last values stand for a source that does not answer, seconds at least."""

EMPTY_S: Final = 5.0
"""How often a source that has nothing is asked again, seconds: most machines have no GPU."""

_FIRST_WAIT_S: Final = 0.05
_EARLY_S: Final = 0.02


class Paced:
    """One source, read at most every `least_s` seconds."""

    def __init__(
        self,
        name: str,
        read: Read,
        *,
        least_s: float = 0.0,
        share: float = SHARE,
        report: Callable[[str], None] = print_line,
    ) -> None:
        self._name = name
        self._read = read
        self._least_s = least_s - _EARLY_S
        self._share = share
        self._report = report
        self._due_s = float("-inf")
        self._cost_s = 0.0
        self._failed = 0
        self._last: Sample = {}

    def sample(self, now_s: float) -> Sample:
        """The source's reading, or the last one if it is not due."""
        if now_s < self._due_s:
            return self._last
        before_s = time.thread_time()
        try:
            self._last = self._read(now_s)
            self._failed = 0
        # The isolation of a probe: the others go on.
        except Exception as error:
            self._last = {}
            self._failed += 1
            if self._failed >= FAILURES:
                self._due_s = float("inf")
                self._report(f"{self._name}: not sampled any more: {error}")
                return self._last
        cost_s = time.thread_time() - before_s
        # The lesser of two: what is made at the first reading only is not paid again.
        self._due_s = now_s + max(self._least_s, min(cost_s, self._cost_s) / self._share)
        self._cost_s = cost_s
        return self._last


class ThreadedSource:
    """One source, read in a daemon thread of its own that nobody ever waits for long."""

    def __init__(
        self,
        name: str,
        read: Read,
        *,
        least_s: float = 0.0,
        report: Callable[[str], None] = print_line,
    ) -> None:
        self._name = name
        self._read = read
        self._least_s = least_s - _EARLY_S
        self._report = report
        self._thread: threading.Thread | None = None
        self._questions: SimpleQueue[float | None] = SimpleQueue()
        self._answers: SimpleQueue[tuple[float, Sample | Exception]] = SimpleQueue()
        self._asked_s: float | None = None
        self._last_sample_s: float | None = None
        self._due_s = float("-inf")
        self._kept_s = KEPT_S
        self._at_s = float("-inf")
        self._last: Sample = {}
        self._failed = 0
        self._answered = False
        self._reported_slow = self._reported_silent = False

    def sample(self, now_s: float) -> Sample:
        """The source's last reading; nothing if it is too old.

        Waits for half of the time since the sample before, and a second, at most.
        """
        gap_s = 0.0 if self._last_sample_s is None else now_s - self._last_sample_s
        self._last_sample_s = now_s
        if self._asked_s is not None:
            self._collect(now_s, 0.0)
        elif now_s >= self._due_s and self._ask(now_s):
            self._collect(now_s, max(_FIRST_WAIT_S, min(SLOW_S, gap_s / 2)))
        return self._last if now_s - self._at_s <= max(self._kept_s, 2.5 * gap_s) else {}

    def close(self) -> None:
        """Let the thread end, once it is done with what it reads."""
        self._due_s = float("inf")
        self._questions.put(None)

    def _ask(self, now_s: float) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="tocsin-sample-beside", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self._give_up(error)
                return False
            self._thread = thread
        self._asked_s = now_s
        self._questions.put(now_s)
        return True

    def _collect(self, now_s: float, wait_s: float) -> None:
        assert self._asked_s is not None
        try:
            took_s, answer = (
                self._answers.get(timeout=wait_s) if wait_s else self._answers.get(False)
            )
        except Empty:
            if now_s - self._asked_s > KEPT_S and not self._reported_silent:
                self._reported_silent = True
                self._report(
                    f"{self._name}: no answer for {KEPT_S:g} s; left out until there is one"
                )
            return
        asked_s, self._asked_s = self._asked_s, None
        # The first one loads a driver, which takes seconds once.
        slow = took_s > SLOW_S and self._answered
        self._answered = True
        pause_s = max(self._least_s, REST * took_s if slow else 0.0)
        if not answer:
            pause_s = max(pause_s, EMPTY_S)
        self._due_s = now_s + pause_s
        self._kept_s = max(KEPT_S, 2.5 * (took_s + pause_s))
        if slow and not self._reported_slow:
            self._reported_slow = True
            self._report(
                f"{self._name}: a reading took {took_s:.1f} s; sampled every {REST * took_s:.0f} s"
            )
        if isinstance(answer, Exception):
            self._failed += 1
            if self._failed >= FAILURES:
                self._give_up(answer)
            return
        self._failed = 0
        self._last, self._at_s = answer, asked_s + took_s

    def _give_up(self, error: Exception) -> None:
        self._due_s = float("inf")
        self._last = {}
        self._report(f"{self._name}: not sampled any more: {error}")

    def _work(self) -> None:
        while (now_s := self._questions.get()) is not None:
            before_s = time.monotonic()
            answer: Sample | Exception
            try:
                answer = self._read(now_s)
            # The isolation of a probe; handed to whoever asked.
            except Exception as error:
                answer = error
            self._answers.put((time.monotonic() - before_s, answer))
