"""`target_leak`: the inputs contain the answer, so a language model learns to copy it.

In a few of the first steps the training process compares the targets of a cross-entropy with the
ids that the model's embeddings received in the same step, at positions whose next token is
different. There, a target is the token itself, the next token, or neither. It also records whether
attention at these positions can see the next one, according to its mask or its probabilities.

- `unshifted_targets`: at least `same` of the targets are the tokens themselves, and no position can
  see the next one: a causal model must predict the token that it has just read. Its loss falls to
  zero, but it cannot continue a text.
- `no_causal_mask`: at least `following` of the targets are the next tokens, and at least `ahead` of
  the positions can see the next one in each captured attention. The loss falls far below what is
  possible, in evaluations, too; at generation time those tokens do not exist, and the text is
  nonsense.

Each is reported after `for_looks` checks. A step may call several losses, an auxiliary one among
them; each is compared with the one that was called in its place in the step before. A masked
encoder has neither relation at the positions that its loss counts; one that receives its own
targets in both directions may be an autoencoder and is ignored; a decoder with open attention to an
encoder also has its own causal attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from pydantic import Field

from tocsin.schemas.records.issues import Subject
from tocsin.schemas.records.program_facts import LossInputsSeen
from tocsin.schemas.records.runs import RunData
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, event
from tocsin.stream_rules.signals.loss_inputs import leading_loss_inputs

_REASONS: Final = {
    "unshifted_targets": "the targets of {function} are the tokens that the model has just read: "
    "{share:.1f} % of {tokens} that differ from the next one",
    "no_causal_mask": "the targets of {function} are the next tokens, and every attention can see "
    "them, at {ahead} {tokens} positions",
}
_REMEDIES: Final = {
    "unshifted_targets": "Shift them by one: logits[:, :-1] against tokens[:, 1:]. Hugging Face "
    "models do this themselves when you pass labels.",
    "no_causal_mask": "Give the attention is_causal=True, or a mask that hides what comes later.",
}
_MAX_CALLS: Final = 64
"""Losses of a step that are kept apart."""

_LIMITS: Final = {
    "unshifted_targets": ("targets_are_inputs", "ahead_most"),
    "no_causal_mask": ("targets_are_next_inputs", "ahead_least"),
}


class TargetLeakParams(Params):
    """Parameters of `target_leak`."""

    same: float = Field(default=0.999, gt=0.5, le=1)
    """Share of targets that are the tokens themselves. Unit: share."""
    following: float = Field(default=0.9, gt=0.5, le=1)
    """Share of targets that are the next tokens. Unit: share."""
    ahead: float = Field(default=0.9, gt=0, le=1)
    """Share of positions that can see the next one. Unit: share."""
    for_looks: int = Field(default=2, ge=1)
    """Consecutive checks. Unit: looks."""


@dataclass(slots=True)
class _Call:
    """What was found of one of the losses of a step, for how many steps in a row."""

    branch: str = ""
    first_step: int = 0
    looks: int = 0


@dataclass(slots=True)
class _State:
    rank: int | None = None
    step: int = -1
    calls: list[_Call] = field(default_factory=list)
    """In the order in which a step calls them."""
    called: int = 0
    """How many of them `step` has called so far."""


class TargetLeak(Rule[TargetLeakParams, _State]):
    """One episode for each branch."""

    meta = RuleMeta(
        name="target_leak",
        version=2,
        family="data",
        meaning="A language model can see the tokens that it must predict.",
        severity="warning",
        available="maybe",
        inputs=(event(LossInputsSeen),),
        capture_hint="the targets of a cross-entropy of torch.nn.functional are compared with the "
        "inputs of an nn.Embedding in the first steps, unless the model is compiled",
        remedy="Let the model see only what comes before the token that it must predict.",
        does_not_see="Attention in kernels of other packages, models in which only some attentions "
        "lack the mask or which have recurrent layers, too, embeddings other than nn.Embedding, "
        "prefixes before the embedded tokens, compiled models, and changes after the first steps. "
        "A mask that multiplies the probabilities after the softmax does not count as a mask.",
        params=TargetLeakParams,
        branches={
            "unshifted_targets": "The targets are the tokens that were just read.",
            "no_causal_mask": "Attention can see the next token, which is the target.",
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
            self.state = state = _State(rank=inputs.rank)
        if inputs.step < state.step:
            return
        if inputs.step > state.step:
            # A place that the step before did not call is in a row with nothing.
            gone, state.calls = state.calls[state.called :], state.calls[: state.called]
            state.step, state.called = inputs.step, 0
            for before in {call.branch for call in gone} - {call.branch for call in state.calls}:
                yield Clear(inputs.step, about=before)
        call = self._call()
        if call is None or inputs.ahead_least is None or inputs.ahead_most is None:
            return
        branch = self._branch(inputs, inputs.ahead_least, inputs.ahead_most)
        if branch != call.branch:
            before, call.branch = call.branch, branch
            call.first_step, call.looks = inputs.step, 0
            if before and all(other.branch != before for other in state.calls):
                yield Clear(inputs.step, about=before)
        call.looks += 1
        if branch and call.looks >= self.params.for_looks:
            yield self._finding(call, inputs, inputs.ahead_least, inputs.ahead_most)

    def _call(self) -> _Call | None:
        """The next one of the step; None: it is beyond those that are kept."""
        state = self.state
        if state.called == _MAX_CALLS:
            return None
        if state.called == len(state.calls):
            state.calls.append(_Call())
        state.called += 1
        return state.calls[state.called - 1]

    def _branch(self, data: LossInputsSeen, least: float, most: float) -> str:
        params = self.params
        if (data.targets_are_inputs or 0.0) >= params.same and most <= 1 - params.same:
            return "unshifted_targets"
        if (data.targets_are_next_inputs or 0.0) >= params.following and least >= params.ahead:
            return "no_causal_mask"
        return ""

    def _finding(self, call: _Call, data: LossInputsSeen, least: float, most: float) -> Finding:
        params, branch = self.params, call.branch
        same, following = data.targets_are_inputs or 0.0, data.targets_are_next_inputs or 0.0
        shares = {
            "targets_are_inputs": (same, params.same),
            "targets_are_next_inputs": (following, params.following),
            "ahead_least": (least, params.ahead),
            "ahead_most": (most, 1 - params.same),
        }
        limits = _LIMITS[branch]
        ahead = "all" if least >= 1 else f"{math.floor(100 * least)} % or more of"
        return Finding(
            about=branch,
            branch=branch,
            subject=Subject(kind="loss", name=data.function),
            reason=_REASONS[branch].format(
                function=data.function, share=100 * same, ahead=ahead, tokens=data.tokens
            ),
            first_step=call.first_step,
            first_rank=data.rank,
            remedy=_REMEDIES[branch],
            facts=(
                fact("looks", call.looks, limit=params.for_looks),
                *(
                    fact(name, share, limit=limit if name in limits else None)
                    for name, (share, limit) in shares.items()
                ),
            ),
            explanation=f"a sample of {data.tokens:,} places of a batch whose next token is "
            f"another one, at step {data.step}",
        )
