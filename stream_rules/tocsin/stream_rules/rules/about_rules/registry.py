"""The rules about rules that come with tocsin. A new one is a line here."""

from __future__ import annotations

from typing import Final

from tocsin.stream_rules.rule import AnyRule
from tocsin.stream_rules.rules.about_rules.action_failed import ActionFailed
from tocsin.stream_rules.rules.about_rules.cold_start import ColdStart
from tocsin.stream_rules.rules.about_rules.rule_failed import RuleFailed
from tocsin.stream_rules.rules.about_rules.rule_has_no_input import RuleHasNoInput
from tocsin.stream_rules.rules.about_rules.telemetry_gap import TelemetryGap

RULES: Final[tuple[type[AnyRule], ...]] = (
    RuleHasNoInput,
    RuleFailed,
    TelemetryGap,
    ColdStart,
    ActionFailed,
)
