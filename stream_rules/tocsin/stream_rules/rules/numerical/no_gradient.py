"""`no_gradient`: a parameter that should be trained gets no gradient.

The training process checks the parameters of its optimizers after a step: after each of the first
ten, every tenth of the first 200, and every fiftieth after that. A parameter without a `.grad` was
not reached by the backward pass. The rule counts it after `for_steps` consecutive checks, and not
before three times its longest earlier gap, because an expert or a head that is used occasionally
gets a gradient again. For some of these steps it is also known which modules were called, with
gradients on or off, unless the model is compiled.

- `nothing`: no parameter has a gradient. The loss is computed with another model, or from plain
  numbers.
- `detached`: the first layer of the optimizer's model is among them, or `share` of the tensors are,
  and they were called with gradients on: a `detach()`, `.data`, `item()` or a new tensor cut them
  off.
- `lost`: the same, but gradients arrived before.
- `unused`: any other case, as an info. A layer whose output the loss does not use (the pooler of a
  BERT that classifies tokens), one that is called under `no_grad()`, or not at all: often on
  purpose, and then better left out of the optimizer.
- `untrained`: frozen weights (`requires_grad` is False) in front of the first layer that trains
  still have the values of their initialisation, and are `frozen_share` of all weights: most often a
  backbone whose pretrained weights were not loaded. It is known at one of the steps 5 to 9.
- `discarded`: `zero_grad()` is called in front of each backward call of a loop that accumulates
  gradients, so that a step uses those of its last micro-batch alone. Known of loops that get their
  batches from one `DataLoader`, after 20 steps with the same number of micro-batches.

The first four need no tuned limits, because the training process knows them exactly. Five checks
leave room for a model that alternates between several tasks.

Gradients that are cleared on purpose do not count as discarded: several backward calls for one
batch (SAM, attacks on the inputs, separate losses of several tasks), weights that change in
between, steps with gradients that the program has put together itself (DP-SGD), and batches that a
loop skips now and then.

Untrained weights are matrices and filters, at least 3 of them, in modules that the forward pass
calls. They are within the exact bound of PyTorch's uniform initialisations, or are normal while all
biases and scales around them are untouched; trained weights leave these bounds within a few steps.
The rule ignores weights that the program writes to (a momentum encoder), separate copies of the
model (a target network, a distilled random network), models whose optimizer alternates with another
(a GAN), a fixed embedding, and one or two layers of random features. A deep random network that is
frozen on purpose looks the same as the fault: set `frozen_share` to 1 for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
from pydantic import Field

from tocsin.schemas.records.frames import StepFrame, TensorFrame
from tocsin.schemas.records.issues import Subject
from tocsin.stream_rules.outcomes import Clear, Finding, Holds, Moment, Outcomes, fact
from tocsin.stream_rules.rule import Params, RuleMeta, scalar, tensors
from tocsin.stream_rules.rule_bases import RowState, TensorRowRule

_TURNS: Final = 3
_REMEDIES: Final = {
    "nothing": "Check that the optimizer was made from the parameters of the model whose loss is "
    "computed, and that the loss is not computed from plain numbers (item(), numpy(), no_grad()).",
    "unused": "If this is intended, remove these parameters from the optimizer or set "
    "requires_grad to False; otherwise find out why the loss does not depend on them.",
    "discarded": "Call optimizer.zero_grad() once for each step: after optimizer.step(), or before "
    "the first of its backward() calls.",
    "untrained": "Load the pretrained weights before you freeze these layers, and check that "
    "load_state_dict() found their names; or set requires_grad to True to train them.",
}

UNTRAINED: Final = "untrained"
DISCARDED: Final = "discarded"
_SHOWN: Final = ("std", "absmax", "bound", "kurtosis")

Counts = npt.NDArray[np.int64]


class NoGradientParams(Params):
    """Parameters of `no_gradient`."""

    for_steps: int = Field(default=5, ge=1)
    """Consecutive checks without a gradient. Unit: looks."""
    share: float = Field(default=0.5, gt=0, le=1)
    """Share of all trainable tensors that is too large, wherever they are. Unit: share."""
    frozen_share: float = Field(default=0.6, gt=0, le=1)
    """Share of a model's weights that must be frozen and untrained; 1 switches this off. Unit:
    share."""


@dataclass(slots=True)
class _State(RowState):
    open: list[str] = field(default_factory=list)


class NoGradient(TensorRowRule[NoGradientParams, _State]):
    """One episode for each branch; it names the first such parameter and how many others."""

    meta = RuleMeta(
        name="no_gradient",
        version=1,
        family="numerical",
        meaning="A parameter that should be trained gets no gradient.",
        severity="warning",
        available="maybe",
        inputs=(
            scalar("without_gradient"),
            tensors("no_gradient", optional=True),
            tensors(UNTRAINED, optional=True),
            scalar("gradients_discarded", optional=True),
        ),
        capture_hint="gradients are checked when a PyTorch optimizer steps",
        remedy="Look for detach(), .data, item(), numpy(), torch.tensor(...) or no_grad() between "
        "these layers and the loss.",
        does_not_see="A gradient that arrives and is zero: vanishing_gradient and dead_relu cover "
        "those. In a compiled model the calls of layers are not seen; only a cut through most of "
        "the model can be distinguished from unused layers. Frozen weights with a custom "
        "initialisation, in a compiled or sharded model, or below `frozen_share`.",
        params=NoGradientParams,
        branches={
            "nothing": "No parameter of the optimizer has a gradient.",
            "detached": "The first layers, or many layers, are cut off from the loss.",
            "lost": "The same, but gradients arrived before.",
            "unused": "Other parameters get no gradient. An info.",
            DISCARDED: "Gradients of most micro-batches are cleared before a step uses them.",
            UNTRAINED: "Most of the model is frozen at its initial values.",
        },
        resolve_after_steps=0,
    )
    state_type = _State

    def on_steps(self, frame: StepFrame, at: Moment) -> Outcomes:
        missing = frame.column("without_gradient")
        if missing is not None and len(missing) and missing[-1] == 0:
            yield from self._close(())
        yield from self._discards(frame)

    def _discards(self, frame: StepFrame) -> Outcomes:
        counts, lengths = frame.column("gradients_discarded"), frame.column("steps_discarding")
        if counts is None or lengths is None:
            return
        known = np.flatnonzero(np.isfinite(counts) & np.isfinite(lengths))
        if not len(known):
            return
        step, each = int(frame.steps[known[-1]]), int(counts[known[-1]])
        length = int(lengths[known[-1]])
        if not each:
            yield Clear(about=DISCARDED)
            return
        first = max(0, step - length + 1)
        yield Finding(
            about=DISCARDED,
            branch=DISCARDED,
            subject=Subject(kind="run", name="gradients"),
            reason=f"the gradients of {each} of the {each + 1} micro-batches of each step are "
            f"cleared before the step uses them, since step {first}",
            first_step=first,
            first_rank=frame.origin.rank,
            remedy=_REMEDIES[DISCARDED],
            facts=(
                fact("micro_batches_discarded", each),
                fact("micro_batches", each + 1),
                fact("steps", length, unit="steps"),
            ),
            explanation="after a backward call, the next one found no gradient, although no "
            "optimizer had made a step in between",
        )

    def on_table(self, table: TensorFrame, at: Moment) -> Outcomes:
        if table.collection == UNTRAINED:
            yield from self._untrained(table)
            return
        found: dict[str, Counts] = {
            name: np.asarray(counts, np.int64)
            for name in table.count_columns
            if (counts := table.count(name)) is not None
        }
        needed = {"steps", "called", "silent_calls", "watched", "longest", "had", "place"}
        if not needed <= found.keys() or "trainable" not in found:
            return
        enough = np.maximum(self.params.for_steps, _TURNS * found["longest"])
        rows = np.flatnonzero(found["steps"] >= enough)
        if not len(rows):
            return
        branches = self._branches(found, rows)
        for branch, chosen in branches.items():
            yield self._finding(table, found, branch, chosen.tolist())
        yield from self._close(branches)

    def _untrained(self, table: TensorFrame) -> Outcomes:
        matrices, frozen = table.count("matrices"), table.count("frozen")
        if matrices is None:
            return
        # Of a large model not all are looked at; nine in ten of those that were are untrained.
        found = len(table.rows) if frozen is None else int(frozen.max())
        share = found / max(1, int(matrices.max()))
        if share < self.params.frozen_share:
            return
        shown = ((column, table.column(column)) for column in _SHOWN)
        yield self.row_finding(
            table,
            range(len(table.rows)),
            collection="weights",
            branch=UNTRAINED,
            reason=f"{found} of {int(matrices.max())} weights, from {table.rows[0]} on, are frozen "
            "and still have the values of their initialisation",
            first_step=0,
            remedy=_REMEDIES[UNTRAINED],
            facts=(
                fact("frozen_share", share, limit=self.params.frozen_share),
                fact("untrained", len(table.rows), unit="tensors"),
                *(fact(n, v[0]) for n, v in shown if v is not None and v[0]),
            ),
            explanation="requires_grad is False, nothing writes to them, and their values are "
            "distributed as an initialisation draws them: below the bound of a uniform one, or "
            "normal beside untouched biases and scales",
        )

    def _branches(self, found: dict[str, Counts], rows: Counts) -> dict[str, Counts]:
        trainable = int(found["trainable"].max())
        if len(rows) >= max(1, trainable):
            return {"nothing": rows}
        watched = found["watched"][rows]
        called = (watched > 0) & (2 * found["called"][rows] >= watched)
        unseen = watched == 0
        much = len(rows) >= self.params.share * trainable
        cut = rows[called] if not (much and unseen.all()) else rows
        first = bool((found["place"][cut] == 0).any()) if len(cut) else False
        if not len(cut) or not (first or len(cut) >= self.params.share * trainable):
            return {"unused": rows}
        rest = np.setdiff1d(rows, cut)
        branch = "lost" if bool(found["had"][cut].all()) else "detached"
        return {branch: cut} if not len(rest) else {branch: cut, "unused": rest}

    def _close(self, branches: Iterable[str]) -> Outcomes:
        state = self.state
        still = list(branches)
        for branch in state.open:
            yield Holds(about=branch) if branch in still else Clear(about=branch)
        state.open = still

    def _finding(
        self, table: TensorFrame, found: dict[str, Counts], branch: str, rows: list[int]
    ) -> Finding:
        name, looks = table.rows[rows[0]], int(found["steps"][rows[0]])
        others = f" and {len(rows) - 1} other tensors" if len(rows) > 1 else ""
        trainable = int(found["trainable"].max())
        take, get, to_be, have = (
            ("take", "get", "are", "have") if others else ("takes", "gets", "is", "has")
        )
        reasons = {
            "nothing": f"none of the {trainable} tensors of the optimizer gets a gradient",
            "detached": f"{name}{others} {take} part in forward passes and {get} no gradient",
            "lost": f"{name}{others} {take} part in forward passes and {get} no gradient any more",
            "unused": f"{name}{others} {to_be} to be trained and {have} had no gradient",
        }
        return self.row_finding(
            table,
            rows,
            collection="gradients",
            branch=branch,
            reason=f"{reasons[branch]}, in {looks} consecutive checks",
            first_step=max(0, table.step - looks + 1),
            severity="info" if branch == "unused" else None,
            remedy=_REMEDIES.get(branch),
            facts=(
                fact("looks_without", looks, limit=self.params.for_steps),
                fact("without_gradient", len(rows), unit="tensors"),
                fact("trainable", trainable, unit="tensors"),
                fact("called", found["called"][rows].max()),
                fact("called_without_grad", found["silent_calls"][rows].max()),
                fact("watched", found["watched"][rows].max(), unit="steps"),
            ),
            explanation="`.grad` was None after the optimizer's step although requires_grad "
            "was set",
        )
