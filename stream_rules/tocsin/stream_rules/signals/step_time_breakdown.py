"""Where the time of steps went, from the columns of the step scalars.

The parts are seconds on the clock of the training thread: `data` (inside of data loaders),
`compute` (forward and backward), `optimizer`, `checkpoint`, and `rest`, whatever else the loop
does. An evaluation between two steps is no part of a step: it is taken off. On a GPU this clock
shows where the thread waited for it.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from tocsin.schemas.records.frames import StepFrame
from tocsin.stream_rules.reading.tensor_rows import Doubles
from tocsin.stream_rules.rule import Input, scalar

PARTS: Final = ("data", "compute", "optimizer", "checkpoint", "rest")
_COLUMNS: Final = {
    "data": ("data_wait_s",),
    "compute": ("forward_s", "backward_s"),
    "optimizer": ("optimizer_s",),
    "checkpoint": ("checkpoint_s",),
}

INPUTS: Final[tuple[Input, ...]] = (
    scalar("step_time_s"),
    *(scalar(name, optional=True) for names in _COLUMNS.values() for name in names),
    scalar("evaluation_s", optional=True),
)
"""What a rule on step times reads."""


def step_time_breakdown(frame: StepFrame) -> Doubles | None:
    """Seconds of each step (rows) in each of `PARTS` (columns); None: no step time was sent.

    A step whose time is not finite has NaN in `rest`. The sum of a row is the step's own time.
    """
    total = frame.column("step_time_s")
    if total is None:
        return None
    parts = np.zeros((len(total), len(PARTS)))
    for j, names in enumerate(_COLUMNS.values()):
        for name in names:
            if (seconds := _seconds(frame, name)) is not None:
                parts[:, j] += seconds
    own = total.astype(np.float64)
    if (evaluation := _seconds(frame, "evaluation_s")) is not None:
        own -= evaluation
    rest = own - parts[:, :-1].sum(axis=1)
    # Not finite stays not finite: it is no time.
    parts[:, -1] = np.where(np.isfinite(own), np.maximum(rest, 0.0), np.nan)
    return parts


def lowest_rank_breakdown(frame: StepFrame, lowest: int | None) -> Doubles | None:
    """As `step_time_breakdown`, for frames of the `lowest` rank so far or of a lower one.

    None: the frame is of a higher rank, for which none is made, or has no step time.
    """
    if lowest is not None and frame.origin.rank > lowest:
        return None
    return step_time_breakdown(frame)


def _seconds(frame: StepFrame, column: str) -> Doubles | None:
    values = frame.column(column)
    if values is None:
        return None
    seconds = values.astype(np.float64)
    seconds[~np.isfinite(seconds)] = 0.0
    return seconds
