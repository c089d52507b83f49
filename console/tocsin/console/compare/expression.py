"""What `--fail-if` says: `step_time > +5%`. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.text import number_text, plain_line

Comparison = Literal[">", "<"]

_PARTS: Final = re.compile(
    r"\s*(?P<measure>[A-Za-z_][\w./:-]*)?\s*(?P<sign>[<>=!]+)?\s*(?P<change>[+-][^\s%]*\s*%?)?\s*"
)
_ANY_NAME: Final = re.compile(
    r"\s*(?P<measure>.*\S)(?:(?<=[^<>=!])|(?=\s))\s*"
    r"(?P<sign>[<>])\s*(?P<change>[+-][\d.][^\s%]*\s*%?)\s*"
)
"""The whole of an expression whose measure is a name that somebody logs by: `log.acc@1`. All before
the last sign is the name."""

_EXAMPLE: Final = "for example 'step_time > +5%', 'throughput < -3%', 'eval_loss > +0.01'"


@dataclass(frozen=True, slots=True)
class Condition:
    """A change from the first run to the second that is a failure.

    Attributes:
        change: a share of the first run's value (0.05) if `relative`, else in the measure's unit.
    """

    text: str
    measure: str
    sign: Comparison
    change: float
    relative: bool

    @property
    def change_text(self) -> str:
        """`+5 %`, `-0.01`."""
        sign = "+" if self.change >= 0 else ""
        if self.relative:
            return f"{sign}{number_text(100 * self.change)} %"
        return f"{sign}{number_text(self.change)}"


class BadExpression(ConfigurationError):
    """An expression of --fail-if cannot be read; the message points at the place."""

    def __init__(self, text: str, column: int, expected: str) -> None:
        place = f": {expected}"
        if text.isprintable():
            place = f"\n  {text}\n  {' ' * column}^ {expected}"
        super().__init__(f"--fail-if cannot be read{place}\n  {_EXAMPLE}")
        self.column = column


def parse(text: str) -> Condition:
    """The condition of an expression. Raises BadExpression."""
    found = _ANY_NAME.fullmatch(text) or _PARTS.match(text)
    assert found is not None  # all parts of the latter are optional
    if found["measure"] is None:
        column = len(text) - len(text.lstrip())
        raise BadExpression(text, column, "expected a measure, like step_time")
    if found["sign"] is None:
        raise BadExpression(text, _after(text, found.end("measure")), "expected > or <")
    if found["sign"] not in (">", "<"):
        raise BadExpression(text, found.start("sign"), "expected > or <")
    expected = "expected a change with its sign, like +5% or -0.01"
    if found["change"] is None:
        raise BadExpression(text, _after(text, found.end("sign")), expected)
    number = found["change"].replace(" ", "")
    relative = number.endswith("%")
    try:
        change = float(number.rstrip("%"))
    except ValueError:
        raise BadExpression(text, found.start("change"), expected) from None
    if not abs(change) < 1e12:
        raise BadExpression(text, found.start("change"), "expected a finite number")
    if found.end() != len(text):
        raise BadExpression(text, found.end(), "expected nothing more")
    sign: Comparison = ">" if found["sign"] == ">" else "<"
    return Condition(
        plain_line(text), found["measure"], sign, change / 100 if relative else change, relative
    )


def unknown_measure(condition: Condition, known: Sequence[str]) -> BadExpression:
    """The error for a measure that the runs do not have."""
    near = difflib.get_close_matches(condition.measure, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    listed = ", ".join(known[:20]) + (", …" if len(known) > 20 else "")
    return BadExpression(condition.text, 0, f"{hint}both runs have: {listed}")


def _after(text: str, end: int) -> int:
    """The place of the next word behind `end`, or the end of the text."""
    rest = text[end:]
    return end + len(rest) - len(rest.lstrip())
