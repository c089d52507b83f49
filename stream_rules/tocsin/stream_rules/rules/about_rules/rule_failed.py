"""`rule_failed`: a rule raised an exception. The engine publishes the issue; this is its catalogue
entry."""

from __future__ import annotations

from dataclasses import dataclass

from tocsin.stream_rules.rule import Params, Rule, RuleMeta


class RuleFailedParams(Params):
    """The rule has no parameters."""


@dataclass(slots=True)
class _State:
    """It remembers nothing: the quarantine is in the failed rule's own snapshot."""


class RuleFailed(Rule[RuleFailedParams, _State]):
    """Switching it off silences the issue; a rule that fails is quarantined anyway."""

    meta = RuleMeta(
        name="rule_failed",
        version=1,
        family="about_rules",
        meaning="Another rule raised an exception; it is switched off for this run, the others "
        "continue.",
        severity="warning",
        inputs=(),
        remedy="This is a defect of the rule, not of the training: report it with the error and "
        "the rule's parameters. A new incarnation of the run tries the rule again.",
        params=RuleFailedParams,
        does_not_see="A rule that finds the wrong thing, or nothing, without an exception.",
    )
    state_type = _State
