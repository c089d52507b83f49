"""How long the GPU itself worked on the phases of a step: CUDA events, read when they are there.

On a GPU the training thread hands work over and goes on; its clock does not show how long the
work takes. At a step that is due an event is put into the stream where a phase begins, about eight
in all, and their distances are read at a later step, when the GPU has passed them: nobody waits.

The columns are `forward_device_s`, `backward_device_s` and `optimizer_device_s`, in seconds, over
all micro-batches and optimizers since the step before. A GPU that runs out of work inside of a
phase is waited for in these, too. What comes between a step and the next batch belongs to none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Final, Protocol

import torch

from tocsin.emitter.process.isolation import Isolation
from tocsin.emitter.statistics.async_copy import is_recording
from tocsin.emitter.statistics.driver_objects import DriverObjects

PROBE: Final = "device time"

EVERY: Final = 10
"""Steps between two that are timed on the GPU: an event costs some µs on the training thread."""

MAX_MARKS: Final = 256
"""A step with more of them is not timed."""

MAX_WAITING: Final = 8

COLUMNS: Final = ("forward_device_s", "backward_device_s", "optimizer_device_s")

Report = Callable[[int, tuple[str, ...], tuple[float, ...]], None]


class Event(Protocol):
    """What of `torch.cuda.Event` is used."""

    def query(self) -> bool:
        """Whether the GPU has come by."""
        ...

    def elapsed_time(self, end_event: Event, /) -> float:
        """Milliseconds from this event to that."""
        ...


def events_on(device: torch.device) -> Callable[[], Event]:
    """Puts an event into that GPU's current stream, at each call."""

    def put() -> Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        found: Event = event
        return found

    return put


class CudaTiming(DriverObjects):
    """The marks of one step, and those that the GPU has not reached yet."""

    def __init__(
        self,
        report: Report,
        put_event: Callable[[], Event],
        *,
        isolation: Isolation,
        is_recording: Callable[[], bool] = is_recording,
    ) -> None:
        super().__init__()
        self._report: Final = report
        self._put_event = put_event
        self._isolation: Final = isolation
        self._is_recording = is_recording
        self._marks: list[tuple[int, Event]] = []
        self._whole = True
        self._waiting: deque[tuple[int, list[tuple[int, Event]]]] = deque()

    def forward(self) -> None:
        """What follows is a forward pass if a backward call ends it."""
        self._isolation.run(PROBE, self._mark, 0)

    def backward(self) -> None:
        """A backward call begins."""
        self._isolation.run(PROBE, self._mark, 1)

    def optimizer(self) -> None:
        """An optimizer's step begins."""
        self._isolation.run(PROBE, self._mark, 2)

    def _mark(self, phase: int) -> None:
        if len(self._marks) >= MAX_MARKS or self._is_recording():
            # In a CUDA graph an event of ours would be replayed for ever.
            self._whole = False
            return
        self._marks.append((phase, self._put_event()))

    def close_step(self, step: int) -> None:
        """The step is over, its last mark stands behind it."""
        marks, whole = self._marks, self._whole
        self._marks, self._whole = [], True
        if whole and len(marks) > 1:
            self._waiting.append((step, marks))
        while len(self._waiting) > MAX_WAITING:
            self._waiting.popleft()

    @property
    def waiting(self) -> bool:
        """Whether there are steps whose times are still to come."""
        return bool(self._waiting)

    def poll(self) -> None:
        """Report the steps that the GPU has passed. Never waits."""
        if is_recording():
            return  # to ask an event now would end the recording
        while self._waiting and self._waiting[0][1][-1][1].query():
            step, marks = self._waiting.popleft()
            seconds = [0.0, 0.0, 0.0]
            for (phase, began), (following, ended) in pairwise(marks):
                # Before a step or another batch it is clipping or logging, no forward pass.
                if phase or following == 1:
                    seconds[phase] += began.elapsed_time(ended) / 1000
            self._report(step, COLUMNS, (seconds[0], seconds[1], seconds[2]))
