"""Rules on large models: attention, output logits, experts, embeddings."""

from __future__ import annotations

from typing import Final

from tocsin.stream_rules.rule import AnyRule

RULES: Final[tuple[type[AnyRule], ...]] = ()
