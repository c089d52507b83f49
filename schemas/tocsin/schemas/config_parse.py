"""From the plain data of a configuration file to its sections, noting everything that is wrong.

What is wrong in one entry hides nothing in another: a broken part is left out, the rest is read on.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tocsin.schemas.config_problems import Finding, Loc, did_you_mean
from tocsin.schemas.config_receivers import (
    LATER_OF_RECEIVERS,
    LATER_RECEIVERS,
    RECEIVERS,
    AnyReceiver,
)
from tocsin.schemas.config_sections import (
    LATER,
    LATER_VALUES,
    ActionEntry,
    RuleEntry,
    SecretSource,
    StopOptions,
)
from tocsin.schemas.config_values import parse_name
from tocsin.schemas.yaml_loader import Plain, kind_of

ModelT = TypeVar("ModelT", bound=BaseModel)
T = TypeVar("T")

ACTION_WORDS: Final = ("stop", "by_route")
_RESERVED: Final = frozenset({*ACTION_WORDS, "off", "notify"})
_RULE_KEYS: Final = ("name", "use", "match", "params", "severity", "actions")
_LABEL_KEY: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]{0,62}")
_MAX_LABEL_VALUE: Final = 256

# Below these keys a value may be a secret that was written out by mistake: never repeat it.
_SECRET_KEYS: Final = frozenset({"url", "headers", "key", "previous_key", "password"})

_EXPECTED: Final = {
    "string_type": "text",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "model_type": "a mapping",
    "dict_type": "a mapping",
    "mapping_type": "a mapping",
    "list_type": "a list",
    "tuple_type": "a list",
}


def not_supported_yet(loc: Loc, what: str, *, at: Literal["key", "value"] = "key") -> Finding:
    """A finding for something that a later release will read."""
    return Finding(loc, f"{what} is not supported yet", "not_supported_yet", "remove it", at=at)


def findings_of(err: ValidationError, model: type[BaseModel], loc: Loc) -> Iterator[Finding]:
    """What pydantic found in the data at `loc`, in the words of the file."""
    errors = err.errors(include_url=False)
    findings = [_finding(error, model, loc) for error in errors]
    # A key with a typing error is also missing under its right name: one of the two is enough.
    meant = {(*f.loc[len(loc) : -1], f.hint) for f in findings if f.code == "unknown_key"}
    for error, finding in zip(errors, findings, strict=True):
        if error["type"] != "missing" or error["loc"] not in meant:
            yield finding


def parse_model(
    model: type[ModelT], raw: Plain, loc: Loc, findings: list[Finding]
) -> ModelT | None:
    """The section or part at `loc` as its model; None, with findings, when it is wrong."""
    try:
        return model.model_validate(raw)
    except ValidationError as err:
        findings.extend(findings_of(err, model, loc))
        return None


def parse_labels(raw: Plain, findings: list[Finding]) -> dict[str, str]:
    """The section `labels`."""
    return dict(_items(raw, ("labels",), findings, _parse_label, name=parse_label_key))


def parse_label_key(key: object) -> str:
    """The key of a label.

    Raises:
        ValueError: it is none; the message says what was expected.
    """
    if not isinstance(key, str) or not _LABEL_KEY.fullmatch(key):
        raise ValueError(
            "expected a label's key: letters, digits, '_', '.', '/', '-', beginning with a letter"
        )
    return key


def parse_label_value(value: object) -> str:
    """The value of a label.

    Raises:
        ValueError: it is none; the message says what was expected.
    """
    if not isinstance(value, str) or len(value) > _MAX_LABEL_VALUE or not value.isprintable():
        raise ValueError(f"expected text in one line, at most {_MAX_LABEL_VALUE} characters")
    return value


def parse_secrets(raw: Plain, findings: list[Finding]) -> dict[str, SecretSource]:
    """The section `secrets`."""

    def one(item: Plain, loc: Loc, findings: list[Finding]) -> SecretSource | None:
        return parse_model(SecretSource, item, loc, findings)

    return dict(_items(raw, ("secrets",), findings, one, name=parse_name))


def parse_receivers(raw: Plain, findings: list[Finding]) -> dict[str, AnyReceiver]:
    """The section `receivers`."""
    return dict(_items(raw, ("receivers",), findings, _parse_receiver, name=_receiver_name))


def parse_rules(raw: Plain, findings: list[Finding]) -> tuple[RuleEntry, ...]:
    """The section `rules`."""
    if not isinstance(raw, list):
        if raw is not None:
            findings.append(_expected("a list", raw, ("rules",), hint="begin each rule with '- '"))
        return ()
    entries: dict[str, RuleEntry] = {}
    for index, item in enumerate(raw):
        entry = _parse_rule(item, ("rules", index), findings)
        if entry is None:
            continue
        if entry.name in entries:
            message = f"the rule {entry.name!r} is listed already"
            hint = f"{{name: another-name, use: {entry.use}, …}} for a second instance"
            findings.append(Finding(entry.at("use"), message, "duplicate_rule", hint, at="key"))
        else:
            entries[entry.name] = entry
    return tuple(entries.values())


# -- rules and actions


def _parse_rule(raw: Plain, loc: Loc, findings: list[Finding]) -> RuleEntry | None:
    if isinstance(raw, str):
        hint = f"{raw}: [stop]" if raw.isidentifier() else None
        findings.append(_expected("a rule with its actions, or a mapping", raw, loc, hint=hint))
        return None
    if not isinstance(raw, dict) or not raw:
        findings.append(_expected("a rule like 'nonfinite: [stop]', or a mapping", raw, loc))
        return None
    long_keys = {*_RULE_KEYS, *LATER[RuleEntry]}
    if len(raw) == 1 and not long_keys & set(raw):
        ((use, value),) = raw.items()
        return _parse_short_rule(use, value, loc, findings)
    return _parse_long_rule(raw, loc, findings)


def _parse_short_rule(use: str, raw: Plain, loc: Loc, findings: list[Finding]) -> RuleEntry | None:
    here = (*loc, use)
    if not _named(use, here, findings, at="key", rule=True):
        return None
    if raw == "off":
        return RuleEntry(name=use, use=use, off=True, loc=loc, short=True)
    if not isinstance(raw, list):
        hint = f"{use}: [{raw}]" if isinstance(raw, str) else f"{use}: off"
        findings.append(_expected("a list of actions, or off", raw, here, hint=hint))
        return None
    actions = _parse_actions(raw, here, findings)
    return RuleEntry(name=use, use=use, actions=actions, loc=loc, short=True)


def _parse_long_rule(raw: dict[str, Plain], loc: Loc, findings: list[Finding]) -> RuleEntry | None:
    for key in raw:
        if key in LATER[RuleEntry]:
            findings.append(not_supported_yet((*loc, key), f"{key!r} of a rule"))
        elif key not in _RULE_KEYS:
            findings.append(_unknown_key(key, (*loc, key), _RULE_KEYS))
    names: dict[str, str] = {}
    for key in ("name", "use"):
        value = raw.get(key)
        # Without `use`, the name is that of the rule itself.
        rule = key == "use" or "use" not in raw
        if value is not None and _named(value, (*loc, key), findings, rule=rule):
            names[key] = str(value)
    if not names:
        if not {"name", "use"} & set(raw):
            hint = "name: nonfinite"
            findings.append(Finding(loc, "expected 'name' or 'use'", "missing_key", hint))
        return None
    actions: tuple[ActionEntry, ...] | None = None
    if isinstance(listed := raw.get("actions"), list):
        actions = _parse_actions(listed, (*loc, "actions"), findings)
    elif "actions" in raw:
        findings.append(_expected("a list of actions", listed, (*loc, "actions")))
    fields: dict[str, Any] = {
        "name": names.get("name", names.get("use")),
        "use": names.get("use", names.get("name")),
        "match": _parse_match(raw.get("match"), (*loc, "match"), findings),
        "actions": actions,
    }
    fields |= {key: raw[key] for key in ("params", "severity") if raw.get(key) is not None}
    # A wrong severity or params is noted at its place; the rest is read as if it were absent.
    try:
        return RuleEntry(**fields, loc=loc)
    except ValidationError as err:
        findings.extend(findings_of(err, RuleEntry, loc))
        return RuleEntry(**{**fields, "params": {}, "severity": None}, loc=loc)


def _parse_match(raw: Plain, loc: Loc, findings: list[Finding]) -> dict[str, tuple[str, ...]]:
    def one(item: Plain, loc: Loc, findings: list[Finding]) -> tuple[str, ...] | None:
        patterns = item if isinstance(item, list) else [item]
        if patterns and all(isinstance(pattern, str) for pattern in patterns):
            return tuple(str(pattern) for pattern in patterns)
        findings.append(_expected("text, or a list of texts", item, loc, hint="quotes around it"))
        return None

    return dict(_items(raw, loc, findings, one, name=parse_label_key))


def _parse_actions(raw: list[Plain], loc: Loc, findings: list[Finding]) -> tuple[ActionEntry, ...]:
    entries = [_parse_action(item, (*loc, i), findings) for i, item in enumerate(raw)]
    return tuple(entry for entry in entries if entry is not None)


def _parse_action(raw: Plain, loc: Loc, findings: list[Finding]) -> ActionEntry | None:
    if isinstance(raw, str):
        if raw == "stop":
            return ActionEntry(kind="stop", options=StopOptions(), loc=loc)
        if raw == "by_route":
            findings.append(not_supported_yet(loc, "the action 'by_route'", at="value"))
            return ActionEntry(kind="by_route", loc=loc)
        return ActionEntry(kind="receiver", receiver=raw, loc=loc)
    if not isinstance(raw, dict) or len(raw) != 1:
        what = "an action: stop, a receiver's name, or a mapping like {stop: {grace: 30s}}"
        findings.append(_expected(what, raw, loc))
        return None
    ((key, value),) = raw.items()
    if key == "stop":
        options = parse_model(StopOptions, {} if value is None else value, (*loc, key), findings)
        return ActionEntry(kind="stop", options=options, loc=loc) if options else None
    if key == "notify":
        findings.append(not_supported_yet((*loc, key), "the action 'notify'"))
        return None
    hint = key if key in _RESERVED else did_you_mean(key, ["stop"])
    message = f"unknown action {key!r}: only 'stop' takes options"
    findings.append(Finding((*loc, key), message, "unknown_key", hint, at="key"))
    return None


# -- receivers, labels, names


def _parse_receiver(raw: Plain, loc: Loc, findings: list[Finding]) -> AnyReceiver | None:
    here = (*loc, "type")
    if not isinstance(raw, dict):
        findings.append(_expected("a mapping like {type: email, to: […]}", raw, loc))
        return None
    if "type" not in raw:
        message = "the key 'type' is missing"
        findings.append(Finding(loc, message, "missing_key", f"one of {', '.join(RECEIVERS)}"))
        return None
    kind = raw["type"]
    if isinstance(kind, str) and kind in LATER_RECEIVERS:
        findings.append(not_supported_yet(here, f"the receiver type {kind!r}", at="value"))
        return None
    model = RECEIVERS.get(kind) if isinstance(kind, str) else None
    if model is None:
        what = f"expected one of {', '.join(RECEIVERS)}, got {kind_of(kind)}"
        hint = did_you_mean(kind, RECEIVERS) if isinstance(kind, str) else None
        findings.append(Finding(here, what, hint=hint))
        return None
    return parse_model(model, raw, loc, findings)


def _parse_label(raw: Plain, loc: Loc, findings: list[Finding]) -> str | None:
    if not isinstance(raw, str):
        hint = None if isinstance(raw, list | dict) else "quotes around it"
        findings.append(_expected("text", raw, loc, hint=hint))
        return None
    try:
        return parse_label_value(raw)
    except ValueError as err:
        findings.append(Finding(loc, str(err)))
        return None


def _receiver_name(name: object) -> str:
    if name in _RESERVED:
        raise ValueError(f"{name!r} is a word of the configuration: give the receiver another name")
    return parse_name(name)


def _named(
    raw: Plain,
    loc: Loc,
    findings: list[Finding],
    at: Literal["key", "value"] = "value",
    *,
    rule: bool = False,
) -> bool:
    try:
        # The alias of a rule has capitals (ExplodingTensor); what a file names itself has none.
        parse_name(raw.lower() if rule and isinstance(raw, str) else raw)
    except ValueError as err:
        findings.append(Finding(loc, str(err), at=at))
        return False
    return True


def _items(
    raw: Plain,
    loc: Loc,
    findings: list[Finding],
    parse: Callable[[Plain, Loc, list[Finding]], T | None],
    *,
    name: Callable[[object], str],
) -> Iterator[tuple[str, T]]:
    """The good entries of a mapping of names; an empty section counts as an empty mapping."""
    if not isinstance(raw, dict):
        if raw is not None:
            findings.append(_expected("a mapping", raw, loc))
        return
    for key, item in raw.items():
        try:
            name(key)
        except ValueError as err:
            findings.append(Finding((*loc, key), str(err), "name", at="key"))
        value = parse(item, (*loc, key), findings)
        if value is not None:
            yield key, value


# -- findings in words


def _expected(what: str, raw: Plain, loc: Loc, *, hint: str | None = None) -> Finding:
    return Finding(loc, f"expected {what}, got {kind_of(raw)}", hint=hint, hide_value=_hidden(loc))


def _unknown_key(key: str, loc: Loc, known: tuple[str, ...]) -> Finding:
    hint = did_you_mean(key, known)
    return Finding(loc, f"unknown key {key[:60]!r}", "unknown_key", hint, at="key")


def _hidden(loc: Loc) -> bool:
    if loc[:1] == ("bus",):
        return "password" in loc
    return loc[:1] == ("secrets",) or any(part in _SECRET_KEYS for part in loc[1:])


def _finding(error: ErrorDetails, model: type[BaseModel], top: Loc) -> Finding:
    inner = error["loc"]
    at: Literal["key", "value"] = "value"
    if inner and inner[-1] == "[key]":
        inner, at = inner[:-1], "key"
    loc = (*top, *inner)
    owner = _owner(model, inner[:-1])
    key = str(inner[-1]) if inner else ""
    raw = error["input"]
    hide = _hidden(loc) or (isinstance(raw, str) and "@" in raw)
    match error["type"]:
        case "extra_forbidden":
            if key in LATER.get(owner, ()) or key in LATER_OF_RECEIVERS.get(owner, ()):
                return not_supported_yet(loc, repr(key))
            return _unknown_key(key, loc, tuple(owner.model_fields))
        case "missing":
            message = f"the key {key!r} is missing"
            examples = owner.model_fields[key].examples
            hint = f"{key}: {_in_yaml(examples[0])}" if examples else None
            return Finding((*top, *inner[:-1]), message, "missing_key", hint)
        case "literal_error":
            if isinstance(raw, str) and raw in LATER_VALUES.get((owner, key), ()):
                return not_supported_yet(loc, f"{key}: {raw}", at="value")
            words = error["ctx"]["expected"].replace("'", "")
            known = [word.strip() for word in re.split(r",| or ", words)]
            hint = did_you_mean(raw, known, list_up_to=0) if isinstance(raw, str) else None
            got = repr(raw[:60]) if isinstance(raw, str) and not hide else kind_of(raw)
            return Finding(loc, f"expected {words}, got {got}", hint=hint, hide_value=hide)
        case "value_error":
            return Finding(loc, str(error["ctx"]["error"]), at=at, hide_value=hide)
        case kind if kind in _EXPECTED:
            return _expected(_EXPECTED[kind], raw, loc)
    message = error["msg"].replace("Input should be", "expected a value").replace("String", "text")
    return Finding(loc, message, at=at, hide_value=hide)


def _owner(model: type[BaseModel], loc: Loc) -> type[BaseModel]:
    """The model that the value at `loc` inside `model` belongs to."""
    for part in loc:
        field = model.model_fields.get(str(part))
        model = _model_in(field.annotation) or model if field else model
    return model


def _model_in(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType) or get_origin(annotation) is not None:
        return next(filter(None, map(_model_in, get_args(annotation))), None)
    return None


def _in_yaml(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {_in_yaml(v)}" for k, v in value.items()) + "}"
    return str(value)
