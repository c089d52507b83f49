"""The words of `nonfinite`: subject, reason and evidence of a decided origin."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from tocsin.schemas.records.events import clip
from tocsin.schemas.records.frames import StepFrame
from tocsin.schemas.records.issues import Fact, Subject, SubjectKind
from tocsin.stream_rules.outcomes import Finding, fact
from tocsin.stream_rules.reading.rank_series import RankSeries
from tocsin.stream_rules.rules.numerical.nonfinite_origin.evidence import (
    GRADIENTS,
    LOCAL,
    BadTensors,
    Pending,
    RankEvidence,
)
from tocsin.stream_rules.rules.numerical.nonfinite_origin.forward_pass import Origin

BRANCHES: Final[Mapping[str, str]] = {
    "input": "A tensor of the input batch, before any computation.",
    "activation": "The output of a module: the first bad one in forward order.",
    "loss": "The loss itself, or all gradients at once.",
    "gradient": "A gradient, while the loss was finite: the first bad one in backward order.",
    "weight": "A weight, before it was used in a computation.",
    "optimizer_state": "The optimizer's state of a parameter; everything before it was finite.",
    "tensor": "A tensor that `tensors` names.",
    "evaluation_loss": "The loss of an evaluation. A warning.",
    "skipped": "The loss of a batch that the loop, or a loss scaler, skipped. A warning.",
    "scalar": "A scalar that the training logs itself. A warning.",
}
"""Where it began."""

_SHOWN: Final = 32
_FACT: Final = 100
"""The longest name of a fact; that of a logged scalar may be longer."""


def origin_finding(
    pending: Pending, rank_series: RankSeries, began: Origin | None = None
) -> Finding:
    """What the evidence of a bad step shows of its origin.

    `began` is the origin in the forward pass of that rank, where it is known.
    """
    rank, evidence = pending.origin()
    subject, tensors, why = _subject(evidence)
    branch = _branch(subject)
    update = written = None
    if subject.kind != "loss":
        began = None  # a finite loss: what went into it was well
    if began is not None:
        branch, subject = began.branch, _subject_of(began)
        update = _update_before(pending, rank_series) if branch == "weight" else None
        if update is None:
            why = f"{_forward(began, pending.step)} {why}"
        else:
            why = f"{_written(began, update, pending.step)} {why}"
            # What an optimizer keeps of gradients was bad, too: the update has brought it.
            written = update if began.row.state else None
    ranks = sum(other.bad for other in pending.ranks.values())
    named = tensors.names if tensors is not None else []
    own = began is None and subject.kind == "tensor"
    if own:
        named = named[1:]
    bad = tensors.bad if tensors is not None else evidence.bad_gradients
    further = 0 if subject.kind == "scalar" else max(0, bad - own)
    where = f" of rank {rank}" if pending.several_ranks else ""
    what = {
        "loss": f"the loss{where} is {_word(evidence.loss)}",
        "tensor": f"{subject.collection}/{subject.name}{where} has {_amount(tensors)}",
    }.get(subject.kind, f"{bad} gradients{where} are not finite")
    if began is not None:
        what = f"{_has(began, pending.step, where)}, and the loss is {_word(evidence.loss)}"
    elif subject.kind == "loss" and evidence.loss is None:
        what = f"all {bad} gradients{where} became non-finite at once, so it started in the loss"
    reason = f"{what} at step {pending.step}"
    if written is not None:
        reason += f": the update of {_steps(written, pending.step)} wrote it"
    if further:
        reason += f"; {further} {'more ' if own else ''}tensors followed"
    if ranks > 1:
        why += f" {ranks - 1} more ranks had non-finite values in the same step."
    return Finding(
        subject=subject,
        branch=branch,
        reason=reason,
        first_step=pending.step if written is None else written,
        first_rank=rank,
        onset_ms=pending.opened_ms,
        remedy=None if update is None else _remedy(update, pending.step),
        facts=(*_bad_row(began), *_facts(evidence, tensors, ranks)),
        series=rank_series.series(f"loss of rank {rank_series.rank}")
        if rank_series.steps
        else None,
        followed=further,
        also=tuple(named[:_SHOWN]),
        explanation=why,
    )


def scalar_finding(
    about: str, frame: StepFrame, name: str, step: int, value: float, evaluation: bool
) -> Finding:
    """A non-finite evaluation loss or named scalar: a warning."""
    shown = "evaluation loss" if evaluation else name.removeprefix("log.")
    return Finding(
        about=about,
        branch="evaluation_loss" if evaluation else "scalar",
        subject=Subject(kind="loss" if evaluation else "scalar", name=shown),
        reason=f"{shown} is {_word(value)} at step {step}",
        first_step=step,
        first_rank=frame.origin.rank,
        severity="warning",
        stop_worthy=False,
        facts=(fact(clip(shown, _FACT), value),),
    )


def skipped_finding(frame: StepFrame, step: int, began: Origin | None) -> Finding:
    """A batch whose loss is not finite, and with which no step was made: a warning."""
    rank = frame.origin.rank
    where = f" of rank {rank}" if frame.origin.world_size > 1 else ""
    what = f"the loss{where} was not finite" if began is None else _has(began, step, where)
    why = "The batch was not used for a step, so the weights are unchanged. After five consecutive "
    why += "such batches the rule stops the run, because a step may never follow."
    return Finding(
        about="nonfinite_skipped",
        branch="skipped",
        subject=Subject(kind="loss", name="loss") if began is None else _subject_of(began),
        reason=f"{what} before step {step}, and the training skipped that batch",
        first_step=step,
        first_rank=rank,
        severity="warning",
        stop_worthy=False,
        facts=_bad_row(began),
        explanation=why,
    )


def _subject(evidence: RankEvidence) -> tuple[Subject, BadTensors | None, str]:
    loss = Subject(kind="loss", name="loss")
    local, reduced = evidence.tensors(LOCAL), evidence.tensors(GRADIENTS)
    gradients = local or reduced
    if evidence.loss is not None:
        return loss, gradients, "The loss itself was non-finite, before any gradient."
    if gradients is not None:
        rows = max(found.rows for found in (local, reduced) if found is not None)
        when = "its own gradients, before the reduce," if local is not None else "the gradients"
        if gradients.bad >= rows > 1 and evidence.clipped and local is None:
            why = "The loss was finite. Which gradient was bad first is not known: they were"
            why += " clipped together, which makes all of them bad."
            return Subject(kind="scalar", name="gradients"), gradients, why
        if gradients.bad >= rows > 1:
            why = f"All of {when} were non-finite at once: the whole backward pass was."
            return loss, gradients, why
        why = f"The first of {when} in backward order that is non-finite; the loss was finite."
        subject = Subject(kind="tensor", name=gradients.names[0], collection=GRADIENTS)
        if local is None and "@" in subject.name:
            why += " The rank is the one that holds this part of it; the batch that caused it is"
            why += " not known."
        return subject, gradients, why
    if evidence.bad_gradients:
        why = "Which gradients is not known: their summaries did not arrive in time."
        return Subject(kind="scalar", name="gradients"), None, why
    collection = min(name for name in evidence.collections if evidence.tensors(name))
    if evidence.tensors("weights") is not None:
        collection = "weights"
    found = evidence.collections[collection]
    why = "Loss and gradients of the step were finite."
    return Subject(kind="tensor", name=found.names[0], collection=collection), found, why


def _branch(subject: Subject) -> str:
    if subject.kind == "loss":
        return "loss"
    if subject.collection in (None, GRADIENTS):
        return "gradient"
    known = {"weights": "weight", "optimizer_state": "optimizer_state"}
    return known.get(subject.collection, "tensor")


def _subject_of(began: Origin) -> Subject:
    kind: SubjectKind = "layer" if began.branch == "activation" else "tensor"
    return Subject(kind=kind, name=began.row.name, collection=began.row.collection)


def _has(began: Origin, step: int, where: str) -> str:
    """What is bad: the beginning of the reason."""
    row = began.row
    has = "has NaN" if row.nans else "has infinite values"
    if began.branch == "input":
        shown = row.name if " of " in row.name else f"input {row.name}"
        return f"{shown}{where} {has}"
    if began.branch == "weight":
        return f"{row.collection}/{row.name}{where} {has}"
    at = "" if began.step == step else f" (seen at step {began.step})"
    return f"the output of {row.name}{where} {has}{at}"


def _forward(began: Origin, step: int) -> str:
    """How the forward pass shows where it began."""
    if began.branch == "input":
        return "It came with a batch."
    if began.branch == "weight":
        return "It was bad before this step's forward pass: an update or the program changed it."
    when = "" if began.step == step else f" when it was last captured, at step {began.step}"
    why = f"It is the first module in forward order that was bad{when}."
    if began.is_first:
        why += " No earlier module was captured: its input or its weights may be bad, too."
    return why


def _update_before(pending: Pending, rank_series: RankSeries) -> int | None:
    """The last step before the bad one whose loss is known to be finite: the weights were, too, so
    that what is bad in them has come with or after its update. None: there is none.
    """
    before = [
        step
        for step, loss in zip(rank_series.steps, rank_series.values, strict=True)
        if step < pending.step and math.isfinite(loss)
    ]
    return max(before, default=None)


def _steps(update: int, step: int) -> str:
    """The steps whose updates may have written a weight that is bad in that step."""
    return f"step {update}" if update == step - 1 else f"one of the steps {update} to {step - 1}"


def _written(began: Origin, update: int, step: int) -> str:
    """How a weight that was finite in step `update` can be bad in this step."""
    steps = _steps(update, step)
    why = f"It was bad before the forward pass of step {step}, and the loss of step {update} was"
    if began.row.state:
        why += " finite. What the optimizer keeps of its gradients is bad, too: most probably the"
        why += f" gradient of {steps} was not finite:"
    else:
        why += (
            f" finite: the update of {steps} or the program changed it. If it was the update, the"
        )
        why += " gradient was not finite:"
    return f"{why} that of a square root, a norm or a division at 0 is not, while the loss is."


def _remedy(update: int, step: int) -> str:
    steps = _steps(update, step)
    return (
        f"Go back to a checkpoint from before the update of {steps}, and check the batch of that "
        "step, not the one after it: square roots, norms, divisions and logarithms at 0, whose "
        "gradient is not finite (add a small number inside of them), and the learning rate."
    )


def _bad_row(began: Origin | None) -> tuple[Fact, ...]:
    if began is None:
        return ()
    row = began.row
    return (
        fact("nans_at_origin", row.nans),
        fact("infs_at_origin", row.infs),
    )


def _facts(evidence: RankEvidence, tensors: BadTensors | None, ranks: int) -> tuple[Fact, ...]:
    facts = []
    if evidence.loss is not None:
        facts.append(fact("loss", evidence.loss))
    if tensors is not None:
        facts += [
            fact("nans", tensors.nans),
            fact("infs", tensors.infs),
            fact("bad_tensors", tensors.bad),
            fact("tensors", tensors.rows),
        ]
    elif evidence.bad_gradients:
        facts.append(fact("bad_tensors", evidence.bad_gradients))
    facts.append(fact("bad_ranks", ranks))
    return tuple(facts)


def _word(value: float | None) -> str:
    if value is None:
        return "not finite"
    return "NaN" if math.isnan(value) else "infinite" if value > 0 else "minus infinite"


def _amount(tensors: BadTensors | None) -> str:
    return "NaN" if tensors is not None and tensors.nans else "infinite values"
