"""`loss_input_mismatch`: a loss function receives the wrong kind of input.

The training process checks the inputs of a few calls of the loss functions of
`torch.nn.functional`: a sample of the scores and targets, and the operation that produced the
scores, which autograd knows. Each branch must be true in all checks of one function; it is reported
after `for_looks` of them, counting each step once.

- `probabilities_as_logits`: a cross-entropy, which applies the softmax itself, receives the output
  of a softmax or of a sigmoid, or rows of values in [0, 1] that sum to 1 within `tolerance`; or the
  binary cross-entropy with logits receives the output of a sigmoid or a softmax. The values look
  normal, but the loss cannot fall below a certain value: 1.46 with ten classes.
- `probabilities_as_logarithms`: `nll_loss` receives probabilities, not their logarithms.
- `logits_as_logarithms`: `nll_loss` receives values above 0, which cannot be logarithms of
  probabilities; such a loss falls without end.
- `cut_off_logits`: a cross-entropy receives the output of a ReLU, which cannot be negative.
- `targets_out_of_range`: targets of a binary cross-entropy outside [0, 1]: classes 1 and 2, or
  pixels up to 255.
- `unreachable_targets`: more than `unreachable` of a regression's targets are outside the range of
  the last activation, such as a sigmoid with standardised targets.
- `each_with_each`: scores have the shape [n, 1] and targets [n]: a regression loss broadcasts them,
  and compares n · n pairs.
- `logarithms_as_logits`: a cross-entropy receives the output of a log-softmax. This does no harm,
  but shows that the model's output was designed for `nll_loss`. An info.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from pydantic import Field

from tocsin.schemas.records.issues import Severity, Subject
from tocsin.schemas.records.program_facts import LossInputsSeen
from tocsin.schemas.records.runs import RunData
from tocsin.stream_rules.outcomes import Clear, Finding, Holds, Moment, Outcomes, fact
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, event
from tocsin.stream_rules.signals.loss_inputs import leading_loss_inputs

_CERTAIN: Final = 1e-6
_ABOVE: Final = 1e-3
_BINARY: Final = ("binary_cross_entropy", "binary_cross_entropy_with_logits")
_REASONS: Final = {
    "probabilities_as_logits": "{function} expects logits but receives probabilities{made}",
    "probabilities_as_logarithms": "nll_loss expects log-probabilities but receives "
    "probabilities{made}",
    "logits_as_logarithms": "nll_loss expects log-probabilities but receives values up to "
    "{high:.3g}{made}",
    "cut_off_logits": "{function} expects logits but receives the output of a ReLU, which is never "
    "negative",
    "targets_out_of_range": "{function} expects targets from 0 to 1 but receives {least:.3g} to "
    "{most:.3g}",
    "unreachable_targets": "the model cannot output {share:.0f} % of the targets of "
    "{function}{made}",
    "each_with_each": "the shapes of scores and targets of {function} do not match: every score is "
    "compared with every target",
    "logarithms_as_logits": "{function} applies the log-softmax itself but receives the output of "
    "one",
}
_REMEDIES: Final = {
    "probabilities_as_logits": "Pass the model's output before its softmax or sigmoid to the loss; "
    "apply those only for predictions.",
    "probabilities_as_logarithms": "End the model with log_softmax, or pass its logits to "
    "cross_entropy.",
    "logits_as_logarithms": "Use cross_entropy, or add log_softmax before nll_loss.",
    "cut_off_logits": "Remove the activation after the last layer.",
    "targets_out_of_range": "Scale the targets to the range 0 to 1.",
    "unreachable_targets": "Remove the last activation, or scale the targets into its range.",
    "each_with_each": "Give both the same shape: squeeze the scores, or unsqueeze the targets.",
    "logarithms_as_logits": "Remove the log-softmax, or use nll_loss.",
}
BRANCHES: Final = tuple(_REASONS)


class LossInputMismatchParams(Params):
    """Parameters of `loss_input_mismatch`."""

    for_looks: int = Field(default=2, ge=1)
    """Consecutive checks. Unit: looks."""
    unknown_looks: int = Field(default=5, ge=1)
    """The same if only the values suggest outputs of a sigmoid. Unit: looks."""
    tolerance: float = Field(default=5e-3, gt=0, lt=0.5)
    """Largest distance from 1 of the sum of a row of probabilities; allows for bfloat16."""
    unreachable: float = Field(default=0.1, gt=0, lt=1)
    """Share of targets that cannot be reached. Unit: share."""


@dataclass(slots=True)
class _Check:
    step: int = -1
    looks: int = 0
    first_step: int = 0
    holds: bool = False


@dataclass(slots=True)
class _State:
    rank: int | None = None
    check: dict[str, _Check] = field(default_factory=dict)


class LossInputMismatch(Rule[LossInputMismatchParams, _State]):
    """One episode for each loss function and branch."""

    meta = RuleMeta(
        name="loss_input_mismatch",
        version=1,
        family="data",
        meaning="A loss function receives the wrong kind of input, such as probabilities where it "
        "expects logits.",
        severity="warning",
        available="maybe",
        inputs=(event(LossInputsSeen),),
        capture_hint="losses of torch.nn.functional and their modules are captured from the second "
        "step on, unless they are part of a compiled graph",
        remedy="Pass the inputs that the loss function's documentation requires.",
        does_not_see="Losses that are written by hand or compiled, and labels that are wrong.",
        params=LossInputMismatchParams,
        branches={
            "probabilities_as_logits": "Probabilities where logits are expected.",
            "probabilities_as_logarithms": "Probabilities where log-probabilities are expected.",
            "logits_as_logarithms": "Logits where log-probabilities are expected.",
            "cut_off_logits": "Logits that passed a ReLU.",
            "targets_out_of_range": "Targets that are not probabilities.",
            "unreachable_targets": "Targets that the last activation cannot reach.",
            "each_with_each": "Shapes that compare each score with each target.",
            "logarithms_as_logits": "The log-softmax is applied twice. An info.",
        },
        resolve_after_steps=0,
    )
    state_type = _State

    def on_event(self, data: RunData, at: Moment) -> Outcomes:
        state = self.state
        inputs = leading_loss_inputs(data, state.rank)
        if inputs is None:
            return
        if inputs.rank != state.rank:
            state.rank, state.check = inputs.rank, {}
        found = self._branches(inputs)
        for branch in BRANCHES:
            key = f"{inputs.function} {branch}"
            if branch in found or key in state.check:
                yield from self._inspect(key, branch, inputs, found.get(branch))

    def _inspect(
        self, key: str, branch: str, inputs: LossInputsSeen, needed: int | None
    ) -> Outcomes:
        check = self.state.check.setdefault(key, _Check())
        if inputs.step < check.step:
            return
        new = inputs.step > check.step
        if needed is None:
            # Of several calls of a step all must be so.
            check.looks, check.step, check.holds = 0, inputs.step, False
            yield Clear(inputs.step, about=key)
            return
        if new:
            check.first_step = inputs.step if not check.looks else check.first_step
            check.looks, check.step, check.holds = check.looks + 1, inputs.step, True
        if check.holds and check.looks >= needed:
            yield self._finding(key, branch, inputs, check, needed)
        else:
            yield Holds(inputs.step, about=key)

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
        self, key: str, branch: str, data: LossInputsSeen, check: _Check, needed: int
    ) -> Finding:
        severity: Severity | None = "info" if branch == "logarithms_as_logits" else None
        made = f" by {data.made_by}" if data.made_by else ""
        facts = [
            fact("looks", check.looks, limit=needed),
            fact("smallest", data.minimum),
            fact("largest", data.maximum),
        ]
        if data.made_by:
            facts.insert(0, fact("made_by", data.made_by))
        optional = {
            "row_sum_smallest": data.row_sum_min,
            "row_sum_largest": data.row_sum_max,
            "target_smallest": data.target_min,
            "target_largest": data.target_max,
        }
        facts += [fact(n, v) for n, v in optional.items() if v is not None]
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
            first_step=check.first_step,
            first_rank=data.rank,
            severity=severity,
            remedy=_REMEDIES[branch],
            facts=tuple(facts),
            explanation="from a sample of the function's inputs, and the operation that "
            "produced them according to autograd",
        )
