"""`action_failed`: a notice or a stop was tried until its time was up, and nobody got it.

The action service says so, as an issue on the issues topic: one for each receiver and each
incarnation of a run, so that the other receivers tell people that this one does not deliver. It is
never about a notice of its own, lest two receivers that are both away tell each other for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

from tocsin.stream_rules.rule import Params, Rule, RuleMeta


class ActionFailedParams(Params):
    """It has no parameters."""


@dataclass(slots=True)
class _State:
    """It remembers nothing: what was delivered stands in the ledger."""


class ActionFailed(Rule[ActionFailedParams, _State]):
    """Told by the action service; switched off there, too, by switching it off here."""

    meta = RuleMeta(
        name="action_failed",
        version=1,
        family="about_rules",
        meaning="A notice or a stop could not be delivered until its time was up.",
        severity="warning",
        inputs=(),
        remedy="See why in `tocsin why` of the issue named here; check the receiver's address, its "
        "secret and the way to it. What expired lies among the dead letters.",
        does_not_see="A notice that was taken by the receiver and shown to nobody. One that was "
        "refused at once, which `tocsin why` shows as rejected.",
        params=ActionFailedParams,
    )
    state_type = _State
