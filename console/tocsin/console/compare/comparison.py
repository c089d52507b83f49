"""The verdict on two runs: what differs first, by how much, and whether a condition holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from tocsin.console.charts import value_text
from tocsin.console.compare.batch_means import ALPHA, TEST
from tocsin.console.compare.differences import KINDS, Difference, differences
from tocsin.console.compare.expression import Condition, unknown_measure
from tocsin.console.compare.measures import Measured, measure, measure_names
from tocsin.console.report.numbers import RunNumbers, Source
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.text import number_text, plain_line, share_text

SHOWN: Final = (
    "step_time", "data_wait", "forward", "backward", "loss", "eval_loss", "gradient_norm", "memory",
    "goodput", "issues", "steps", "duration",
)  # fmt: skip
"""The measures of the verdict, where both runs have them."""

FLOOR: Final = 0.02
"""A smaller change than this share is not worth a sentence, however certain it is."""

_IN_WORDS: Final = {
    "configuration": "their configuration",
    "data": "their data",
    "initialisation": "their initial weights",
    "loss": "their losses",
    "gradients": "their gradients",
    "outcome": "their outcome",
}


class Undecided(ConfigurationError):
    """Conditions of --fail-if cannot be judged: a gate must not pass for want of numbers."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A condition, the measure that it is about, and whether it holds.

    Attributes:
        undecided: why that cannot be judged; empty: it can.
    """

    condition: Condition
    measured: Measured
    holds: bool
    undecided: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What `tocsin compare` says. `equal_losses`: at how many common steps both losses are equal,
    if they are at all of them; None otherwise."""

    first: str
    second: str
    verdict: str
    differences: Sequence[Difference]
    measures: Sequence[Measured]
    conditions: Sequence[Judged]

    @property
    def failed(self) -> bool:
        """Whether a condition of --fail-if holds."""
        return any(one.holds for one in self.conditions)

    def check_decided(self) -> None:
        """Raises Undecided: a condition of --fail-if cannot be judged."""
        lines = [
            f"--fail-if '{one.condition.text}' cannot be decided: {one.undecided}"
            for one in self.conditions
            if one.undecided
        ]
        if lines:
            raise Undecided("\n".join(lines))


def compare(first: Source, second: Source, conditions: Sequence[Condition] = ()) -> Comparison:
    """Compare two runs. Blocks while they are read.

    Raises:
        BadExpression: a condition is about a measure that the runs do not have.
    """
    a, b = RunNumbers(first), RunNumbers(second)
    judged = [_evaluate(a, b, condition) for condition in conditions]
    found = differences(a, b)
    shown = (measure(a, b, name) for name in SHOWN)
    measures = [one for one in shown if one is not None]
    return Comparison(
        first=first.run_id,
        second=second.run_id,
        verdict=_verdict(first.run_id, second.run_id, found, measures, judged),
        differences=found,
        measures=measures,
        conditions=judged,
    )


def change_text(measured: Measured) -> str:
    """`+12 % (+10 to +14 %)`, with its bounds where a test was made; `not decided: …`."""
    change = measured.change
    if change is None:
        return f"not decided: {measured.why}"
    amount = _amount(change.change, change.relative, measured.unit)
    if not measured.tested:
        return amount
    low, high = (_amount(one, change.relative, measured.unit) for one in (change.low, change.high))
    return f"{amount} ({low} to {high})"


def _evaluate(a: RunNumbers, b: RunNumbers, condition: Condition) -> Judged:
    """Whether the change is beyond that of the condition even at the cautious bound."""
    measured = measure(a, b, condition.measure)
    if measured is None:
        raise unknown_measure(condition, measure_names(a, b))
    change = measured.change
    if change is None:
        return Judged(condition, measured, holds=False, undecided=measured.why)
    low, high = change.low, change.high
    if condition.relative != change.relative:
        if condition.relative:
            why = (
                f"{measured.name} is not above zero in both runs, so it has no change in percent; "
                "give a difference, like +0.01"
            )
            return Judged(condition, measured, holds=False, undecided=why)
        # A difference was asked for: the same bounds, in the measure's unit.
        low, high = low * change.first, high * change.first
    holds = low > condition.change if condition.sign == ">" else high < condition.change
    return Judged(condition, measured, holds)


def _verdict(
    first: str,
    second: str,
    found: Sequence[Difference],
    measures: Sequence[Measured],
    judged: Sequence[Judged],
) -> str:
    sentences = []
    causes = [one for one in found if one.kind != "outcome"]
    if causes:
        earliest = min(causes, key=lambda one: KINDS.index(one.kind))
        of_kind = [one for one in causes if one.kind == earliest.kind]
        more = f" and {len(of_kind) - 1:,} more" if len(of_kind) > 1 else ""
        sentences.append(
            f"The runs differ first in {_IN_WORDS[earliest.kind]}: {earliest.text}{more}."
        )
        sentences += [
            f"{one.what[:1].upper()}{one.what[1:]} differs from step {one.step:,} on "
            f"({one.first}, then {one.second})."
            for one in causes
            if one.kind == "loss" and one.step is not None and one is not earliest
        ]
    else:
        sentences.append("No difference was found in configuration, data, losses and gradients.")
    changed = [one for one in measures if _worth_telling(one)]
    for one in changed[:4]:
        sentences.append(f"{_SENTENCE.get(one.name, one.name)}: {change_text(one)}.")
    times = next((one for one in measures if one.name == "step_time"), None)
    if times is not None and times not in changed:
        sentences.append(
            f"The step time does not differ by more than noise: {change_text(times)}."
            if times.change is not None
            else f"The step time was {change_text(times)}."
        )
    sentences += [_outcome(one) for one in found if one.kind == "outcome"]
    failures = _texts(one for one in judged if one.holds)
    undecided = _texts(one for one in judged if one.undecided)
    if failures:
        sentences.append(f"It fails: {failures}.")
    if undecided:
        sentences.append(f"It cannot be decided: {undecided}.")
    if judged and not failures and not undecided:
        sentences.append("No condition of --fail-if holds.")
    return " ".join(sentences)


def _texts(judged: Iterable[Judged]) -> str:
    return ", ".join(f"'{one.condition.text}'" for one in judged)


_ENDS: Final = {
    "completed": "completed", "failed": "failed", "stopped": "was stopped",
    "interrupted": "was interrupted", "running": "is running", "lost": "was lost", "ended": "ended",
}  # fmt: skip
_SENTENCE: Final = {
    "step_time": "The time of a step changed",
    "loss": "The loss of the last steps changed",
    "eval_loss": "The loss of the last evaluation changed",
    "gradient_norm": "The norm of the gradients changed",
    "memory": "The highest memory of the job changed",
    "data_wait": "The wait for data changed",
    "forward": "The forward pass changed",
    "backward": "The backward pass changed",
}


def _worth_telling(measured: Measured) -> bool:
    change = measured.change
    if change is None or measured.name not in _SENTENCE or not change.certain:
        return False
    size = change.change if change.relative else change.change / (abs(change.first) or 1.0)
    return abs(size) >= FLOOR


def _outcome(one: Difference) -> str:
    if one.what == "outcome":
        ends = (one.first, one.second)
        first, second = (_ENDS.get(end, "is not known to have ended") for end in ends)
        return f"The first run {first}, the second {second}."
    rule = plain_line(one.what)
    if not one.first:
        return f"Only the second run has an issue of {rule} ({one.second})."
    if not one.second:
        return f"Only the first run has an issue of {rule} ({one.first})."
    return ""


def _amount(change: float, relative: bool, unit: str | None) -> str:
    sign = "+" if change >= 0 else "-"
    if relative:
        return f"{sign}{_percent(abs(100 * change))} %"
    return f"{sign}{value_text(abs(change), unit)}"


def _percent(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else share_text(value)


def method_line(measures: Sequence[Measured]) -> str:
    """Which test was made, at which level, of how many values."""
    tested = [one for one in measures if one.tested and one.change is not None]
    if not tested:
        return ""
    level = number_text(100 * (1 - ALPHA))
    return (
        f"{TEST}; bounds are one-sided, each of {level} % confidence: two runs of equal speed fail "
        f"a condition in at most {share_text(100 * ALPHA)} % of the cases."
    )
