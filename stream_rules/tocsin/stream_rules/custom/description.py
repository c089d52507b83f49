"""What a worker knows of a custom rule that it has not loaded itself: its `RuleMeta` as plain data,
and a class that stands for it and does nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from pydantic import JsonValue, TypeAdapter

from tocsin.schemas.configuration.sections import RuleEntry
from tocsin.stream_rules.engine.rule_spec import RuleSpec
from tocsin.stream_rules.rule import AnyRule, Input, Params, Rule, RuleMeta

# A parameter model cannot be handed over; presets are of use only where it is.
_LEFT_OUT: Final = frozenset({"params", "presets", "inputs"})
_INPUTS: Final = TypeAdapter(tuple[Input, ...])


@dataclass(slots=True)
class _Nothing:
    """The state of a rule that does nothing."""


def description(meta: RuleMeta) -> dict[str, JsonValue]:
    """The metadata of a rule, as plain data."""
    fields: dict[str, JsonValue] = {
        field.name: _plain(getattr(meta, field.name))
        for field in dataclasses.fields(meta)
        if field.name not in _LEFT_OUT
    }
    inputs: list[JsonValue] = _INPUTS.dump_python(meta.inputs, mode="json")
    return {**fields, "inputs": inputs}


def stand_ins(
    entries: Iterable[RuleEntry], described: Mapping[str, JsonValue]
) -> dict[str, RuleSpec]:
    """The specs of those entries whose rules were described, with classes that find nothing."""
    return {
        entry.name: RuleSpec(
            name=entry.name,
            rule=_stand_in(meta),
            params=Params(),
            severity=entry.severity,
            match=entry.match,
            listed=True,
            custom=True,
        )
        for entry in entries
        if isinstance(meta := described.get(entry.name), dict)
    }


def _stand_in(described: Mapping[str, JsonValue]) -> type[AnyRule]:
    """A class with that description, whose instances never find anything."""
    fields = {name: value for name, value in described.items() if name not in _LEFT_OUT}
    inputs = _INPUTS.validate_python(described["inputs"])

    class StandIn(Rule[Params, _Nothing]):
        """Stands for a rule in another process."""

        meta = RuleMeta(inputs=inputs, params=Params, **fields)  # type: ignore[arg-type]
        state_type = _Nothing

    return StandIn


def _plain(value: object) -> JsonValue:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value if isinstance(value, str | int | float | bool) else None
