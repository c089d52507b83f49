"""`loss_input_mismatch`: a loss function is given something else than it expects.

The training process looks at what a few calls of the loss functions of `torch.nn.functional` are
given: a sample of the scores and targets, and the operation that made the scores, which autograd
knows. Each branch is a property of all looks of one function; it is said after `for_looks` of them,
those of one step counted once.

- `probabilities_as_logits`: a cross-entropy, which takes the softmax itself, is given the output
  of a softmax or of a sigmoid, or rows of numbers in [0, 1] that sum to 1 within `tolerance`; the
  binary one with logits likewise, of a sigmoid or a softmax. Nothing is wrong in the numbers, and
  the loss cannot fall below some value: 1.46 with ten classes.
- `probabilities_as_logarithms`: `nll_loss` is given probabilities, not their logarithms.
- `logits_as_logarithms`: `nll_loss` is given numbers above 0, which no logarithm of a probability
  is; such a loss falls without end.
- `cut_off_logits`: a cross-entropy is given the output of a ReLU, which cannot say "less likely".
- `targets_out_of_range`: targets of a binary cross-entropy outside [0, 1]: classes 1 and 2, or
  pixels up to 255.
- `unreachable_targets`: more than `unreachable` of a regression's targets are outside of what the
  last activation can put out, as of a sigmoid against standardised targets.
- `each_with_each`: scores [n, 1] and targets [n]: the loss of numbers is broadcast to n · n pairs.
- `logarithms_as_logits`: a cross-entropy is given the output of a log-softmax, which does no harm,
  and says that the model's end was made for `nll_loss`: an info.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from pydantic import Field

from tocsin.schemas.records.issues import Evidence, Fact, Severity, Subject
from tocsin.schemas.records.program_facts import LossInputsSeen
from tocsin.schemas.records.runs import RunData
from tocsin.stream_rules.rule import (
    Clear,
    Finding,
    Holds,
    Moment,
    Outcome,
    Params,
    Rule,
    RuleMeta,
    event,
)

_CERTAIN: Final = 1e-6
_ABOVE: Final = 1e-3
_BINARY: Final = ("binary_cross_entropy", "binary_cross_entropy_with_logits")
_REASONS: Final = {
    "probabilities_as_logits": "{function} expects logits, and is given probabilities{made}",
    "probabilities_as_logarithms": "nll_loss expects logarithms of probabilities, and is given "
    "probabilities{made}",
    "logits_as_logarithms": "nll_loss expects logarithms of probabilities, and is given numbers "
    "up to {high:.3g}{made}",
    "cut_off_logits": "{function} expects logits, and is given the output of a ReLU, of which none "
    "is negative",
    "targets_out_of_range": "{function} expects targets from 0 to 1, and is given {least:.3g} to "
    "{most:.3g}",
    "unreachable_targets": "{share:.0f} % of the targets of {function} cannot be put out{made}",
    "each_with_each": "the shapes of scores and targets of {function} do not fit: each is compared "
    "with each",
    "logarithms_as_logits": "{function} takes the log-softmax itself, and is given one already",
}
_REMEDIES: Final = {
    "probabilities_as_logits": "Give the loss what the model puts out before its softmax or "
    "sigmoid; apply that only where you predict.",
    "probabilities_as_logarithms": "End the model in log_softmax, or give its logits to "
    "cross_entropy.",
    "logits_as_logarithms": "Use cross_entropy, or put log_softmax in front of nll_loss.",
    "cut_off_logits": "Leave out the activation behind the last layer.",
    "targets_out_of_range": "Make the targets 0 and 1, or anything between.",
    "unreachable_targets": "Leave out the last activation, or scale the targets into its range.",
    "each_with_each": "Make both of one shape: squeeze the scores, or unsqueeze the targets.",
    "logarithms_as_logits": "Leave out the log-softmax, or use nll_loss.",
}
BRANCHES: Final = tuple(_REASONS)


class LossInputMismatchParams(Params):
    """Parameters of `loss_input_mismatch`."""

    for_looks: int = Field(default=2, ge=1)
    """How many looks in a row. Unit: looks."""
    unknown_looks: int = Field(default=5, ge=1)
    """The same where only the numbers say that they are outputs of a sigmoid. Unit: looks."""
    tolerance: float = Field(default=5e-3, gt=0, lt=0.5)
    """How far the sum of a row of probabilities is from 1; bfloat16 is that coarse."""
    unreachable: float = Field(default=0.1, gt=0, lt=1)
    """How many of the targets cannot be reached. Unit: share."""


@dataclass(slots=True)
class _Watched:
    step: int = -1
    looks: int = 0
    first_step: int = 0
    holds: bool = False


@dataclass(slots=True)
class _State:
    rank: int | None = None
    watched: dict[str, _Watched] = field(default_factory=dict)


class LossInputMismatch(Rule[LossInputMismatchParams, _State]):
    """One episode for each loss function and branch."""

    meta = RuleMeta(
        name="loss_input_mismatch",
        version=1,
        family="data",
        meaning="A loss function is given something else than it expects.",
        severity="warning",
        comes="maybe",
        inputs=(event(LossInputsSeen),),
        capture_hint="losses of torch.nn.functional and their modules are seen, from the second "
        "step on, unless they are part of a compiled graph",
        remedy="Give the loss function what its documentation asks for.",
        does_not_see="Losses that are written by hand or compiled, and labels that are wrong.",
        params=LossInputMismatchParams,
        branches={
            "probabilities_as_logits": "Probabilities where logits are expected.",
            "probabilities_as_logarithms": "Probabilities where their logarithms are.",
            "logits_as_logarithms": "Logits where logarithms of probabilities are.",
            "cut_off_logits": "Logits that passed a ReLU.",
            "targets_out_of_range": "Targets that are no probabilities.",
            "unreachable_targets": "Targets that the last activation cannot reach.",
            "each_with_each": "Shapes that compare each score with each target.",
            "logarithms_as_logits": "A log-softmax is taken twice: an info.",
        },
        resolve_after_steps=0,
    )
    state_type = _State

    def on_event(self, data: RunData, at: Moment) -> Iterable[Outcome]:
        if not isinstance(data, LossInputsSeen) or data.mode != "train":
            return
        state = self.state
        if state.rank is not None and data.rank > state.rank:
            return
        if data.rank != state.rank:
            state.rank, state.watched = data.rank, {}
        found = self._branches(data)
        for branch in BRANCHES:
            key = f"{data.function} {branch}"
            if branch in found or key in state.watched:
                yield from self._look(key, branch, data, found.get(branch))

    def _look(
        self, key: str, branch: str, data: LossInputsSeen, needed: int | None
    ) -> Iterable[Outcome]:
        watched = self.state.watched.setdefault(key, _Watched())
        if data.step < watched.step:
            return
        new = data.step > watched.step
        if needed is None:
            # Of several calls of a step all must be so.
            watched.looks, watched.step, watched.holds = 0, data.step, False
            yield Clear(data.step, about=key)
            return
        if new:
            watched.first_step = data.step if not watched.looks else watched.first_step
            watched.looks, watched.step, watched.holds = watched.looks + 1, data.step, True
        if watched.holds and watched.looks >= needed:
            yield self._finding(key, branch, data, watched, needed)
        else:
            yield Holds(data.step, about=key)

    def _branches(self, data: LossInputsSeen) -> dict[str, int]:
        """The branches that hold, each with the number of looks that it needs."""
        params, made = self.params, data.made_by
        needs = params.for_looks
        found: dict[str, int] = {}
        sums = (data.row_sum_min, data.row_sum_max)
        within = data.minimum >= -_CERTAIN and data.maximum <= 1 + params.tolerance
        whole = data.classes > 1 and all(
            total is not None and abs(total - 1) <= params.tolerance for total in sums
        )
        flat = data.maximum - data.minimum <= _CERTAIN
        shares = within and whole and not flat
        if data.function == "cross_entropy":
            if made in ("softmax", "sigmoid") or shares:
                found["probabilities_as_logits"] = needs
            elif made == "log_softmax":
                found["logarithms_as_logits"] = needs
            elif made == "relu":
                found["cut_off_logits"] = needs
        elif data.function == "nll_loss" and made != "log_softmax":
            if shares or (made in ("softmax", "sigmoid") and within):
                found["probabilities_as_logarithms"] = needs
            elif data.maximum > _ABOVE:
                found["logits_as_logarithms"] = needs
        elif data.function == "binary_cross_entropy_with_logits":
            if made in ("softmax", "sigmoid"):
                found["probabilities_as_logits"] = needs
            elif not made and within and not flat and data.rows >= 8:
                found["probabilities_as_logits"] = params.unknown_looks
            elif made == "relu":
                found["cut_off_logits"] = needs
        least, most = data.target_min, data.target_max
        if data.function in _BINARY:
            if (least or 0.0) < -_ABOVE or (most or 0.0) > 1 + _ABOVE:
                found["targets_out_of_range"] = needs
        elif (data.unreachable or 0.0) > params.unreachable:
            found["unreachable_targets"] = needs
        if data.broadcast:
            found["each_with_each"] = needs
        return found

    def _finding(
        self, key: str, branch: str, data: LossInputsSeen, watched: _Watched, needed: int
    ) -> Finding:
        severity: Severity | None = "info" if branch == "logarithms_as_logits" else None
        made = f" by {data.made_by}" if data.made_by else ""
        facts = [
            Fact(name="looks", value=float(watched.looks), limit=float(needed)),
            Fact(name="smallest", value=data.minimum),
            Fact(name="largest", value=data.maximum),
        ]
        if data.made_by:
            facts.insert(0, Fact(name="made_by", value=data.made_by))
        optional = {
            "row_sum_smallest": data.row_sum_min,
            "row_sum_largest": data.row_sum_max,
            "target_smallest": data.target_min,
            "target_largest": data.target_max,
        }
        facts += [Fact(name=n, value=v) for n, v in optional.items() if v is not None]
        return Finding(
            about=key,
            branch=branch,
            subject=Subject(kind="loss", name=data.function),
            reason=_REASONS[branch].format(
                function=data.function,
                made=made,
                high=data.maximum,
                least=data.target_min or 0.0,
                most=data.target_max or 0.0,
                share=100 * (data.unreachable or 0.0),
            ),
            first_step=watched.first_step,
            first_rank=data.rank,
            severity=severity,
            remedy=_REMEDIES[branch],
            evidence=Evidence(
                facts=tuple(facts),
                explanation="a sample of what the function was given, and the operation that made "
                "it, as autograd names it",
            ),
        )
