"""Instances that begin in the middle of a run, without their memory of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tocsin.stream_rules.engine.episodes import Reported
from tocsin.stream_rules.engine.instance import Instance
from tocsin.stream_rules.engine.rule_spec import RuleSpec
from tocsin.stream_rules.outcomes import Moment, Outcome
from tocsin.stream_rules.rule import AnyRule
from tocsin.stream_rules.rules.about_rules.cold_start import ColdStart


@dataclass(slots=True)
class ColdInstances:
    """Which have just begun so, and why; to be reported with the next record."""

    why: dict[str, str] = field(default_factory=dict)
    history: int = 0
    lost: bool = False
    """Whether there was a memory, which is gone."""

    def add(self, instance: Instance, why: str, *, lost: bool) -> None:
        """One of them; a rule that judges by the moment alone is none."""
        if instance.start_cold():
            self.why[instance.spec.name] = why
            self.history = max(self.history, instance.spec.rule.meta.history_steps)
            self.lost |= lost

    def report(
        self, instances: Sequence[Instance], at: Moment, *, fails_as: RuleSpec | None
    ) -> list[Reported]:
        """The issue about it, once; none if `cold_start` is switched off, or the run over."""
        why, lost, history = self.why, self.lost, self.history
        self.why, self.lost, self.history = {}, False, 0
        if not why or at.run.ended:
            return []

        def call(rule: AnyRule) -> Iterable[Outcome]:
            assert isinstance(rule, ColdStart)
            return rule.lost(why, history, grave=lost, at=at)

        return [
            reported
            for instance in instances
            if instance.spec.rule is ColdStart
            for reported in instance.call(call, at, fails_as=fails_as, input_seen=False)
        ]
