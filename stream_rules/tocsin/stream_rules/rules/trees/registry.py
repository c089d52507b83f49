"""The rules on trees that come with tocsin. A new one is a line here."""

from __future__ import annotations

from typing import Final

from tocsin.stream_rules.rule import AnyRule
from tocsin.stream_rules.rules.trees.feature_importance_overweight import (
    FeatureImportanceOverweight,
)
from tocsin.stream_rules.rules.trees.tree_depth import TreeDepth

RULES: Final[tuple[type[AnyRule], ...]] = (TreeDepth, FeatureImportanceOverweight)
