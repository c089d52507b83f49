"""The JSON Schema of the configuration file, for editors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Union

from pydantic import Field, create_model

from tocsin.schemas.configuration.file import Config
from tocsin.schemas.configuration.receivers import ReceiverConfig
from tocsin.schemas.configuration.routing.matches import MATCH_SCHEMA
from tocsin.schemas.configuration.sections import Section, StopOptions
from tocsin.schemas.configuration.targets import TargetConfig
from tocsin.schemas.configuration.values import NAME_PATTERN


def config_model(
    receivers: Sequence[type[ReceiverConfig]], targets: Sequence[type[TargetConfig]]
) -> type[Config]:
    """`Config` with the models of these kinds of receivers and of targets."""
    one: dict[str, Any] = {
        "receivers": _one_of(receivers, ReceiverConfig),
        "targets": _one_of(targets, TargetConfig),
    }
    by_name: Any = Mapping
    fields: Any = {
        name: (by_name[str, model], Field(default_factory=dict)) for name, model in one.items()
    }
    return create_model("Config", __base__=Config, **fields)


def _one_of(models: Sequence[type[Section]], base: type[Section]) -> Any:
    if len(models) > 1:
        return Annotated[Union[tuple(models)], Field(discriminator="type")]  # noqa: UP007
    return next(iter(models), base)


def config_json_schema(
    receivers: Sequence[type[ReceiverConfig]], targets: Sequence[type[TargetConfig]]
) -> dict[str, object]:
    """The JSON Schema of the file, for editors (draft 2020-12), with these kinds of receivers and
    of targets."""
    schema = config_model(receivers, targets).model_json_schema()
    defs = schema["$defs"]
    defs["StopOptions"] = StopOptions.model_json_schema()
    del defs["ActionEntry"]
    rule = defs["RuleEntry"]
    given = rule["properties"]
    long_form = {
        "type": "object",
        "properties": {
            "name": given["name"] | {"pattern": NAME_PATTERN},
            "use": given["use"] | {"pattern": NAME_PATTERN},
            "match": {"description": given["match"]["description"], **MATCH_SCHEMA},
            "preset": {"description": given["preset"]["description"], "type": "string"},
            "params": {"description": given["params"]["description"], "type": "object"},
            "severity": {
                "description": given["severity"]["description"],
                "enum": ["info", "warning", "critical"],
            },
            "actions": {"$ref": "#/$defs/Actions"},
        },
        "anyOf": [{"required": ["name"]}, {"required": ["use"]}],
        "additionalProperties": False,
    }
    short_form = {
        "type": "object",
        "minProperties": 1,
        "maxProperties": 1,
        "propertyNames": {
            "pattern": NAME_PATTERN,
            "not": {"enum": list(long_form["properties"])},  # type: ignore[call-overload]
        },
        "additionalProperties": {"anyOf": [{"const": "off"}, {"$ref": "#/$defs/Actions"}]},
    }
    defs["RuleEntry"] = {"description": rule["description"], "anyOf": [short_form, long_form]}
    defs["Actions"] = {
        "type": "array",
        "items": {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "object",
                    "properties": {"stop": {"$ref": "#/$defs/StopOptions"}},
                    "required": ["stop"],
                    "additionalProperties": False,
                },
            ]
        },
    }
    bus = schema["properties"]["bus"]
    reference = bus.pop("$ref")
    schema["properties"]["bus"] = {**bus, "anyOf": [{"type": "string"}, {"$ref": reference}]}
    store = schema["properties"]["store"]
    reference = store.pop("$ref")
    schema["properties"]["store"] = {**store, "anyOf": [{"type": "string"}, {"$ref": reference}]}
    schema["required"] = ["version"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
