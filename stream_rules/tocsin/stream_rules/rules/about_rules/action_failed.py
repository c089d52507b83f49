"""`action_failed`: a notification or a stop expired before it could be delivered.

The action service publishes it as an issue on the issues topic: one for each receiver and each
incarnation of a run, so that the other receivers report the failed one. It never reports its own
notifications; otherwise two unreachable receivers would report each other for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

from tocsin.stream_rules.rule import Params, Rule, RuleMeta


class ActionFailedParams(Params):
    """The rule has no parameters."""


@dataclass(slots=True)
class _State:
    """It remembers nothing: what was delivered stands in the ledger."""


class ActionFailed(Rule[ActionFailedParams, _State]):
    """The action service publishes it; switching it off here also switches it off there."""

    meta = RuleMeta(
        name="action_failed",
        version=1,
        family="about_rules",
        meaning="A notification or a stop could not be delivered before it expired.",
        severity="warning",
        inputs=(),
        remedy="Run `tocsin why` on the issue named here. Check the receiver's address, secret and "
        "network path. Expired deliveries are in the dead-letter topic.",
        does_not_see="A notification that the receiver accepted but showed to nobody, and one that "
        "was refused at once, which `tocsin why` shows as rejected.",
        params=ActionFailedParams,
    )
    state_type = _State
