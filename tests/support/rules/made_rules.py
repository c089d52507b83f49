"""What a rule that a test makes up says of itself: one that reads the loss and means nothing."""

from __future__ import annotations

from tocsin.stream_rules.rule import Params, RuleMeta, scalar


def loss_rule(name: str, params: type[Params], *, history_steps: int) -> RuleMeta:
    """The metadata of a rule of version 1 that reads the loss."""
    return RuleMeta(
        name=name,
        version=1,
        family="about_rules",
        meaning="For tests.",
        severity="warning",
        inputs=(scalar("loss"),),
        remedy="None.",
        params=params,
        history_steps=history_steps,
    )
