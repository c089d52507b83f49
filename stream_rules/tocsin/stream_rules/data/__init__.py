"""Rules on data and outputs: labels, predictions, inputs, tokens."""

from __future__ import annotations

from typing import Final

from tocsin.stream_rules.rule import AnyRule

RULES: Final[tuple[type[AnyRule], ...]] = ()
