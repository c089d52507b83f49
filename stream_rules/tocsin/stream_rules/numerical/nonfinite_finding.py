"""The words of `nonfinite`: subject, reason and evidence of a decided origin."""

from __future__ import annotations

import math
from typing import Final

from tocsin.schemas.issues import Evidence, Fact, Subject
from tocsin.schemas.telemetry import StepFrame
from tocsin.stream_rules.lead import Lead
from tocsin.stream_rules.numerical.nonfinite_evidence import (
    GRADIENTS,
    LOCAL,
    BadTensors,
    Pending,
    RankEvidence,
)
from tocsin.stream_rules.rule import Finding

_SHOWN: Final = 32


def origin_finding(pending: Pending, lead: Lead) -> Finding:
    """What the evidence of a bad step says of its origin."""
    rank, evidence = pending.origin()
    subject, tensors, why = _subject(evidence)
    ranks = sum(other.bad for other in pending.ranks.values())
    named = tensors.names if tensors is not None else []
    if subject.kind == "tensor":
        named = named[1:]
    bad = tensors.bad if tensors is not None else evidence.bad_gradients
    further = max(0, bad - (subject.kind == "tensor"))
    where = f" of rank {rank}" if pending.several_ranks else ""
    what = {
        "loss": f"the loss{where} is {_word(evidence.loss)}",
        "tensor": f"{subject.collection}/{subject.name}{where} has {_amount(tensors)}",
    }.get(subject.kind, f"{bad} gradients{where} are not finite")
    if subject.kind == "loss" and evidence.loss is None:
        what = f"all {bad} gradients{where} became non-finite at once, so it began in the loss"
    reason = f"{what} at step {pending.step}"
    if further:
        reason += f"; {further} {'more ' if subject.kind == 'tensor' else ''}tensors followed"
    if ranks > 1:
        why += f" {ranks - 1} more ranks had non-finite values in the same step."
    return Finding(
        subject=subject,
        reason=reason,
        first_step=pending.step,
        first_rank=rank,
        onset_ms=pending.opened_ms,
        evidence=Evidence(
            facts=_facts(evidence, tensors, ranks),
            series=lead.series(f"loss of rank {lead.rank}") if lead.steps else None,
            followed=further,
            also=tuple(named[:_SHOWN]),
            explanation=why,
        ),
    )


def scalar_finding(
    about: str, frame: StepFrame, name: str, step: int, value: float, evaluation: bool
) -> Finding:
    """A non-finite evaluation loss or named scalar: a warning."""
    shown = "evaluation loss" if evaluation else name.removeprefix("log.")
    return Finding(
        about=about,
        subject=Subject(kind="loss" if evaluation else "scalar", name=shown),
        reason=f"{shown} is {_word(value)} at step {step}",
        first_step=step,
        first_rank=frame.speaker.rank,
        severity="warning",
        stop_worthy=False,
        evidence=Evidence(facts=(Fact(name=shown, value=value),)),
    )


def _subject(evidence: RankEvidence) -> tuple[Subject, BadTensors | None, str]:
    loss = Subject(kind="loss", name="loss")
    local, reduced = evidence.tensors(LOCAL), evidence.tensors(GRADIENTS)
    gradients = local or reduced
    if evidence.loss is not None:
        return loss, gradients, "The loss was non-finite itself, before any gradient."
    if gradients is not None:
        rows = max(found.rows for found in (local, reduced) if found is not None)
        when = "its own gradients, before the reduce," if local is not None else "the gradients"
        if gradients.bad >= rows > 1:
            why = f"All of {when} were non-finite at once: the whole backward pass was."
            return loss, gradients, why
        why = f"The first of {when} in backward order that is non-finite; the loss was finite."
        subject = Subject(kind="tensor", name=gradients.names[0], collection=GRADIENTS)
        if local is None and "@" in subject.name:
            why += " The rank is the one that holds this part of it; whose batch it came from is"
            why += " not seen."
        return subject, gradients, why
    if evidence.bad_gradients:
        why = "Which gradients, is not known: their summaries did not come in time."
        return Subject(kind="scalar", name="gradients"), None, why
    collection = min(name for name in evidence.collections if evidence.tensors(name))
    if evidence.tensors("weights") is not None:
        collection = "weights"
    found = evidence.collections[collection]
    why = "Loss and gradients of the step were finite."
    return Subject(kind="tensor", name=found.names[0], collection=collection), found, why


def _facts(evidence: RankEvidence, tensors: BadTensors | None, ranks: int) -> tuple[Fact, ...]:
    facts = []
    if evidence.loss is not None:
        facts.append(Fact(name="loss", value=evidence.loss))
    if tensors is not None:
        facts += [
            Fact(name="nans", value=float(tensors.nans)),
            Fact(name="infs", value=float(tensors.infs)),
            Fact(name="bad_tensors", value=float(tensors.bad)),
            Fact(name="tensors", value=float(tensors.rows)),
        ]
    elif evidence.bad_gradients:
        facts.append(Fact(name="bad_tensors", value=float(evidence.bad_gradients)))
    facts.append(Fact(name="bad_ranks", value=float(ranks)))
    return tuple(facts)


def _word(value: float | None) -> str:
    if value is None:
        return "not finite"
    return "NaN" if math.isnan(value) else "infinite" if value > 0 else "minus infinite"


def _amount(tensors: BadTensors | None) -> str:
    return "NaN" if tensors is not None and tensors.nans else "infinite values"
