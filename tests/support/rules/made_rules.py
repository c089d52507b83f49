"""What rules that tests make up say of themselves: they mean nothing."""

from __future__ import annotations

from tocsin.stream_rules.rule import Input, Params, RuleMeta, scalar


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


def counting_rule(name: str, *inputs: Input) -> RuleMeta:
    """The metadata of a rule of version 1 without parameters that reports nothing."""
    return RuleMeta(
        name=name,
        version=1,
        family="numerical",
        meaning="",
        severity="info",
        inputs=inputs,
        remedy="",
        params=Params,
        does_not_see="",
    )
