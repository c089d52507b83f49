"""The rules on large models that come with tocsin. A new one is a line here."""

from __future__ import annotations

from typing import Final

from tocsin.stream_rules.rule import AnyRule
from tocsin.stream_rules.rules.large_models.attention_logit_growth import AttentionLogitGrowth
from tocsin.stream_rules.rules.large_models.embedding_norm_growth import EmbeddingNormGrowth
from tocsin.stream_rules.rules.large_models.logit_drift import LogitDrift
from tocsin.stream_rules.rules.large_models.moe_imbalance import MoeImbalance

RULES: Final[tuple[type[AnyRule], ...]] = (
    AttentionLogitGrowth,
    LogitDrift,
    MoeImbalance,
    EmbeddingNormGrowth,
)
