"""The GPUs of a node in a frame of its samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from tocsin.schemas.records.frames import Doubles, SystemFrame

IN_USE_SHARE: Final = 0.02
"""Of a GPU's memory: below it no process holds any. Drivers reserve less; a context alone takes
some hundred megabytes."""

CAPTURE_HINT: Final = "NVIDIA GPUs are sampled on the node through its driver"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU in a frame."""

    number: str
    frame: SystemFrame

    @property
    def name(self) -> str:
        """The GPU as issues call it: `gpu 0 of node-17`."""
        return f"gpu {self.number} of {self.frame.node}"

    def column(self, what: str) -> Doubles | None:
        """`gpu.N.WHAT` over the samples, float64[samples]; None: it is not in this frame."""
        return self.frame.column(f"gpu.{self.number}.{what}")

    @property
    def is_jobs(self) -> bool:
        """Whether it is the job's, or nobody knows whose."""
        of_job = self.column("of_job")
        return of_job is None or not len(of_job) or bool(of_job[-1])

    @property
    def taken(self) -> bool:
        """Whether some process holds memory of it, or nobody knows."""
        used, total = self.column("memory_used_bytes"), self.column("memory_total_bytes")
        if used is None or total is None or not len(used):
            return True
        return bool(used[-1] > IN_USE_SHARE * total[-1])

    def memory_percent(self) -> Doubles | None:
        """How much of its memory is in use, float64[samples]; NaN where the size is not known."""
        return memory_percent(self.column)


def memory_percent(column: Callable[[str], Doubles | None]) -> Doubles | None:
    """How much of a GPU's memory is in use, float64[samples], from its columns; NaN where the size
    is not known, None where it is not sampled.
    """
    used, total = column("memory_used_bytes"), column("memory_total_bytes")
    if used is None or total is None:
        return None
    with np.errstate(all="ignore"):
        return np.where(total > 0, 100 * used / total, np.nan)


def gpus_with(frame: SystemFrame, *columns: str) -> Iterator[Gpu]:
    """The GPUs that have any of these columns, in the frame's order, the job's or not."""
    numbers: dict[str, None] = {}
    for name in frame.columns:
        if name.startswith("gpu."):
            number, _, what = name[4:].partition(".")
            if what in columns:
                numbers[number] = None
    for number in numbers:
        yield Gpu(number, frame)
