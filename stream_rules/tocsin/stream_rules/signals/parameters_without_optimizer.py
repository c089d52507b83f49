"""Parameters that have gradients and are in no optimizer: nothing will ever change them.

The training process looks for them twice in the first steps. It is a warning if they belong to the
trained model, because parameters that are frozen on purpose have `requires_grad` False and no
gradients. It is also a warning if the optimizer has parameters that no longer belong to a module:
they were replaced after the optimizer was created. Otherwise it is an info: the network of a
perceptual loss, or a critic, has unused gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tocsin.schemas.records.frames import TensorFrame
from tocsin.schemas.records.issues import Severity, Subject
from tocsin.stream_rules.outcomes import Finding, Outcomes, fact
from tocsin.stream_rules.reading.tensor_rows import LowestRankRows, named

COLLECTION: Final = "not_optimized"
BRANCH: Final = "in_no_optimizer"


@dataclass(slots=True)
class ParametersWithoutOptimizer:
    """Unowned gradients at the first check, which the second must confirm."""

    frames: LowestRankRows = field(default_factory=LowestRankRows)
    before: list[str] = field(default_factory=list)

    def inspect(self, frame: TensorFrame) -> Outcomes:
        """Take a look's rows."""
        whole = self.frames.assemble(frame)
        if whole is None:
            return
        before, self.before = set(self.before), list(whole.rows)
        rows = [i for i, name in enumerate(whole.rows) if name in before]
        inside, orphans = whole.count("inside"), whole.count("orphans")
        if not rows or inside is None or orphans is None:
            return
        replaced = int(orphans.max())
        severity: Severity = "warning" if replaced or bool(np.any(inside[rows] > 0)) else "info"
        name = whole.rows[rows[0]]
        others = f" and {len(rows) - 1} others" if len(rows) > 1 else ""
        why = (
            f"; {replaced} tensors of the optimizer belong to no module: they were replaced after "
            "it was made"
            if replaced
            else ""
        )
        yield Finding(
            about=COLLECTION,
            branch=BRANCH,
            subject=Subject(kind="tensor", name=name, collection="gradients"),
            reason=f"{name}{others} have gradients but are in no optimizer{why}",
            first_step=0,
            first_rank=self.frames.rank,
            severity=severity,
            remedy="Create the optimizer after the model is complete, from all of its parameters; "
            "set requires_grad to False for those that should not be trained.",
            facts=(
                fact("not_optimized", len(rows), unit="tensors"),
                fact("of_the_trained_model", inside[rows].sum()),
                fact("replaced", replaced, unit="tensors"),
            ),
            followed=len(rows) - 1,
            also=named(whole.rows, rows[1:]),
        )
