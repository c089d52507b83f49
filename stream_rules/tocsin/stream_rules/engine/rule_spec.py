"""How to make an instance of a rule. Apart from the catalogue, which not every process has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tocsin.schemas.configuration.routing.matches import labels_fit
from tocsin.schemas.records.issues import Severity
from tocsin.stream_rules.rule import AnyRule, InstanceFacts, Params

CUSTOM_GROUP: Final = "tocsin.rules"
"""The entry point group in which packages offer rules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleSpec:
    """How to make a rule instance for a run.

    Attributes:
        listed: whether the configuration names it; one that runs by default is not missed when
            a run has no input for it.
        watched: all instances beside it.
        custom: whether it is the user's own, which runs in its own process (`custom`); `rule`
            then may be a class that only stands for it.
    """

    name: str
    rule: type[AnyRule]
    params: Params
    severity: Severity | None = None
    match: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    listed: bool = False
    instances: tuple[InstanceFacts, ...] = ()
    custom: bool = False

    def build(self) -> AnyRule:
        """A fresh instance."""
        rule = self.rule(self.name, self.params)
        rule.other_instances(self.instances)
        return rule

    def fits(self, labels: Mapping[str, str]) -> bool:
        """Whether a run with these labels is watched by it."""
        return not self.match or labels_fit(self.match, labels)
