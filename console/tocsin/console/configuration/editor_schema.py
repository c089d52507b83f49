"""The JSON Schema of the configuration, with the parameters of each rule: for editors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

from pydantic import TypeAdapter

from tocsin.schemas.configuration.file_schema import config_json_schema
from tocsin.schemas.configuration.receivers import ReceiverConfig
from tocsin.schemas.configuration.sections import CUSTOM_USE
from tocsin.schemas.configuration.targets import TargetConfig
from tocsin.schemas.configuration.values import format_duration, format_percent
from tocsin.stream_rules.catalogue import RuleCatalogue
from tocsin.stream_rules.rule import AnyRule

_REFERENCE: Final = "#/$defs/{model}"

Node = dict[str, Any]


def editor_schema(
    catalogue: RuleCatalogue,
    receivers: Sequence[type[ReceiverConfig]],
    targets: Sequence[type[TargetConfig]],
) -> Mapping[str, object]:
    """The schema of a file (draft 2020-12) with these rules, kinds of receivers and of targets."""
    schema: Node = dict(config_json_schema(receivers, targets))
    schema["title"] = "tocsin.yaml"
    schema["description"] = "The configuration of tocsin, an alarm bell for training."
    for node in _nodes(schema):
        _in_the_form_of_the_file(node)
    schema["properties"] = {
        key: node if key == "version" else _or_empty(node)
        for key, node in schema["properties"].items()
    }
    defs: Node = schema["$defs"]
    rules = list(catalogue)
    for rule in rules:
        defs |= _params_schema(rule)
    short_form, long_form = defs["RuleEntry"]["anyOf"]
    # Completion in the short form, with what each rule is about.
    short_form["properties"] = {
        name: {"description": rule.meta.meaning, **short_form["additionalProperties"]}
        for rule in rules
        for name in _names(rule)
    }
    names = list(short_form["properties"])
    short_form["propertyNames"] = {"enum": names}
    properties: Node = long_form["properties"]
    del properties["use"]["pattern"]
    # A rule of one's own is a class in a file; what installed packages offer is not known here.
    custom = {"type": "string", "pattern": f"^{CUSTOM_USE.pattern}$"}
    properties["use"] = {**properties["use"], "anyOf": [{"enum": names}, custom]}
    # What the file names itself has no capitals; without `use` it is a rule that is named.
    own = {"properties": {"name": {"pattern": properties["name"].pop("pattern")}}}
    own_or_rule = {"properties": {"name": {"anyOf": [own["properties"]["name"], {"enum": names}]}}}
    named = {"if": {"required": ["use"]}, "then": own, "else": own_or_rule}
    long_form["allOf"] = [named, *(_when(rule) for rule in rules)]
    return schema


def as_text(schema: Mapping[str, object]) -> str:
    """What `tocsin schema` prints and `docs/schemas/config.json` holds."""
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _params_schema(rule: type[AnyRule]) -> Node:
    """The model of a rule's parameters and what it refers to, by name."""
    model = rule.meta.params
    schema: Node = model.model_json_schema(ref_template=_REFERENCE)
    inner: Node = schema.pop("$defs", {})
    for node in _nodes(schema):
        _in_the_form_of_the_file(node)
    return {**inner, model.__name__: schema}


def _when(rule: type[AnyRule]) -> Node:
    """If an entry is of this rule, by `use` or, without it, by `name`: its parameters."""
    named = {"enum": _names(rule)}
    by_name = {"properties": {"name": named}, "required": ["name"], "not": {"required": ["use"]}}
    return {
        "if": {"anyOf": [{"properties": {"use": named}, "required": ["use"]}, by_name]},
        "then": {
            "properties": {"params": {"$ref": _REFERENCE.format(model=rule.meta.params.__name__)}}
        },
    }


def _names(rule: type[AnyRule]) -> list[str]:
    """What the file may call it."""
    return [rule.meta.name, *([rule.meta.alias] if rule.meta.alias else [])]


def _or_empty(node: Node) -> Node:
    """A section may be there with nothing in it."""
    kept: Node = {key: node[key] for key in ("description", "default", "examples") if key in node}
    return {**kept, "anyOf": [node, {"type": "null"}]}


def _in_the_form_of_the_file(node: Node) -> None:
    """Defaults as they are written, `24h` and `0.5%`; pydantic says `P1D` and 0.005."""
    default, pattern = node.get("default"), node.get("pattern", "")
    if isinstance(default, str) and default.startswith("P") and "(ms|s|m|h|d)" in pattern:
        node["default"] = format_duration(TypeAdapter(timedelta).validate_python(default))
    if isinstance(default, float) and isinstance(pattern, str) and pattern.endswith("%$"):
        node["default"] = format_percent(default)


def _nodes(value: object) -> Iterator[Node]:
    if isinstance(value, dict):
        yield value
        for item in value.values():
            yield from _nodes(item)
    elif isinstance(value, list):
        for item in value:
            yield from _nodes(item)
