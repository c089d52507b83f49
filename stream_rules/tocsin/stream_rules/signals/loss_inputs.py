"""What loss functions receive in training, as the leading rank sees it."""

from __future__ import annotations

from tocsin.schemas.records.program_facts import LossInputsSeen
from tocsin.schemas.records.runs import RunData


def leading_loss_inputs(data: RunData, rank: int | None) -> LossInputsSeen | None:
    """A check of the inputs in training, of this rank or a lower one; None: nothing to evaluate.

    A lower rank than `rank` leads from then on: its caller starts again.
    """
    if not isinstance(data, LossInputsSeen) or data.mode != "train":
        return None
    return None if rank is not None and data.rank > rank else data
