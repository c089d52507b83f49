"""From the plain data of a configuration file to its sections, noting everything that is wrong.

What is wrong in one entry hides nothing in another: a broken part is left out, the rest is read on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, TypeVar

from pydantic import ValidationError

from tocsin.schemas.configuration.kinds import KindModels
from tocsin.schemas.configuration.problems import Loc, Problem, did_you_mean, quoted
from tocsin.schemas.configuration.receivers import ReceiverConfig, UnreadReceiver
from tocsin.schemas.configuration.routing.time_windows import TimeWindow
from tocsin.schemas.configuration.sections import (
    CUSTOM_USE,
    ActionEntry,
    Entry,
    RuleEntry,
    SecretSource,
    Section,
    StopOptions,
)
from tocsin.schemas.configuration.targets import TargetConfig, UnreadTarget
from tocsin.schemas.configuration.validation import (
    expected,
    keys_of,
    parse_model,
    problems_of_model,
    unknown_key,
)
from tocsin.schemas.configuration.values import parse_name
from tocsin.schemas.configuration.yaml_document import Plain, kind_of
from tocsin.schemas.errors import ConfigurationError

T = TypeVar("T")
EntryT = TypeVar("EntryT", bound=Entry)
SectionT = TypeVar("SectionT", bound=Section)

ACTION_WORDS: Final = ("stop", "by_route")
_RESERVED: Final = frozenset({*ACTION_WORDS, "off", "notify"})
_RULE_KEYS: Final = ("name", "use", "match", "preset", "params", "severity", "actions")
_A_RECEIVER: Final = "{type: email, to: […]}"
_A_TARGET: Final = "{type: slurm}"
_LABEL_KEY: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]{0,62}")
_MAX_LABEL_VALUE: Final = 256


def parse_labels(raw: Plain, problems: list[Problem]) -> dict[str, str]:
    """The section `labels`."""
    return dict(_items(raw, ("labels",), problems, _parse_label, name=parse_label_key))


def parse_label_key(key: object) -> str:
    """The key of a label.

    Raises:
        ValueError: it is not one; the message says what was expected.
    """
    if not isinstance(key, str) or not _LABEL_KEY.fullmatch(key):
        raise ValueError(
            "expected a label's key: letters, digits, '_', '.', '/', '-', beginning with a letter"
        )
    return key


def parse_label_value(value: object) -> str:
    """The value of a label.

    Raises:
        ValueError: it is not one; the message says what was expected.
    """
    if not isinstance(value, str) or len(value) > _MAX_LABEL_VALUE or not value.isprintable():
        raise ValueError(f"expected text in one line, at most {_MAX_LABEL_VALUE} characters")
    return value


def parse_secrets(raw: Plain, problems: list[Problem]) -> dict[str, SecretSource]:
    """The section `secrets`."""

    def one(item: Plain, loc: Loc, problems: list[Problem]) -> SecretSource | None:
        return parse_model(SecretSource, item, loc, problems)

    return dict(_items(raw, ("secrets",), problems, one, name=parse_name))


def parse_receivers(
    raw: Plain, problems: list[Problem], models: KindModels[ReceiverConfig] | None
) -> dict[str, ReceiverConfig]:
    """The section `receivers`; without `models` only what all kinds have."""

    def one(item: Plain, loc: Loc, problems: list[Problem]) -> ReceiverConfig | None:
        if models is None:
            return _parse_unread(UnreadReceiver, item, loc, problems, _A_RECEIVER)
        return _parse_kind(item, loc, problems, models, _A_RECEIVER, _receiver_not_loaded)

    return dict(_items(raw, ("receivers",), problems, one, name=_receiver_name))


def parse_targets(
    raw: Plain, problems: list[Problem], models: KindModels[TargetConfig] | None
) -> dict[str, TargetConfig]:
    """The section `targets`; without `models` only what all kinds have."""

    def one(item: Plain, loc: Loc, problems: list[Problem]) -> TargetConfig | None:
        if models is None:
            return _parse_unread(UnreadTarget, item, loc, problems, _A_TARGET)
        return _parse_kind(item, loc, problems, models, _A_TARGET, _target_not_loaded)

    return dict(_items(raw, ("targets",), problems, one, name=parse_name))


def parse_time_windows(raw: Plain, problems: list[Problem]) -> dict[str, TimeWindow]:
    """The section `time_windows`."""

    def one(item: Plain, loc: Loc, problems: list[Problem]) -> TimeWindow | None:
        return parse_model(TimeWindow, item, loc, problems)

    return dict(_items(raw, ("time_windows",), problems, one, name=parse_name))


def parse_entries(
    model: type[EntryT], raw: Plain, section: str, problems: list[Problem]
) -> tuple[EntryT, ...]:
    """A section that is a list of entries of one model."""
    if not isinstance(raw, list):
        if raw is not None:
            hint = "begin each entry with '- '"
            problems.append(expected("a list", raw, (section,), hint=hint))
        return ()
    found = (_parse_entry(model, item, (section, i), problems) for i, item in enumerate(raw))
    return tuple(entry for entry in found if entry is not None)


def _parse_entry(
    model: type[EntryT], raw: Plain, loc: Loc, problems: list[Problem]
) -> EntryT | None:
    if not isinstance(raw, dict):
        problems.append(expected(f"a mapping with {', '.join(keys_of(model))}", raw, loc))
        return None
    given: dict[str, Any] = dict(raw)
    for key in model.MATCHES:
        if given.get(key) is not None:
            given[key] = parse_match(raw[key], (*loc, key), problems)
    entry = parse_model(model, given, loc, problems)
    if entry is not None:
        entry.placed(loc, raw)
    return entry


def parse_rules(raw: Plain, problems: list[Problem]) -> tuple[RuleEntry, ...]:
    """The section `rules`."""
    if not isinstance(raw, list):
        if raw is not None:
            problems.append(expected("a list", raw, ("rules",), hint="begin each rule with '- '"))
        return ()
    entries: dict[str, RuleEntry] = {}
    for index, item in enumerate(raw):
        entry = _parse_rule(item, ("rules", index), problems)
        if entry is None:
            continue
        if entry.name in entries:
            message = f"the rule {entry.name!r} is already listed"
            hint = f"{{name: another-name, use: {entry.use}, …}} for a second instance"
            problems.append(
                Problem(
                    entry.at("use"),
                    message,
                    "duplicate_rule",
                    hint,
                    at="key",
                    earlier=entries[entry.name].at("use"),
                )
            )
        else:
            entries[entry.name] = entry
    return tuple(entries.values())


# -- rules and actions


def _parse_rule(raw: Plain, loc: Loc, problems: list[Problem]) -> RuleEntry | None:
    if isinstance(raw, str):
        hint = f"{raw}: [stop]" if raw.isidentifier() else None
        problems.append(expected("a rule with its actions, or a mapping", raw, loc, hint=hint))
        return None
    if not isinstance(raw, dict) or not raw:
        problems.append(expected("a rule like 'nonfinite: [stop]', or a mapping", raw, loc))
        return None
    if len(raw) == 1 and not set(_RULE_KEYS) & set(raw):
        ((use, value),) = raw.items()
        return _parse_short_rule(use, value, loc, problems)
    return _parse_long_rule(raw, loc, problems)


def _parse_short_rule(use: str, raw: Plain, loc: Loc, problems: list[Problem]) -> RuleEntry | None:
    here = (*loc, use)
    if not _named(use, here, problems, at="key", rule=True):
        return None
    if raw == "off":
        return RuleEntry(name=use, use=use, off=True, loc=loc, short=True)
    if not isinstance(raw, list):
        hint = f"{use}: [{raw}]" if isinstance(raw, str) else f"{use}: off"
        if isinstance(raw, dict):
            # The long form was meant: `- RULE:` with its keys below it.
            hint = f"- {{name: {use}, {', '.join(f'{key}: …' for key in raw)}}}"
        problems.append(expected("a list of actions, or off", raw, here, hint=hint))
        return None
    actions = _parse_actions(raw, here, problems)
    return RuleEntry(name=use, use=use, actions=actions, loc=loc, short=True)


def _parse_long_rule(raw: dict[str, Plain], loc: Loc, problems: list[Problem]) -> RuleEntry | None:
    for key in raw:
        if key not in _RULE_KEYS:
            problems.append(unknown_key(key, (*loc, key), _RULE_KEYS))
    names: dict[str, str] = {}
    for key in ("name", "use"):
        value = raw.get(key)
        # Without `use`, the name is that of the rule itself.
        rule = key == "use" or "use" not in raw
        if value is None:
            continue
        if key == "use" and _in_a_file(value, (*loc, key), problems):
            if names.get("name"):
                names[key] = str(value)
            elif raw.get("name") is None:
                message = "a rule in a file needs a name"
                problems.append(Problem((*loc, key), message, "missing_key", "name: my-rule"))
                return None
        elif key == "use" and _is_path(value):
            return None
        elif _named(value, (*loc, key), problems, rule=rule):
            names[key] = str(value)
    if not names:
        if not {"name", "use"} & set(raw):
            hint = "name: nonfinite"
            problems.append(Problem(loc, "expected 'name' or 'use'", "missing_key", hint))
        return None
    actions: tuple[ActionEntry, ...] | None = None
    if isinstance(listed := raw.get("actions"), list):
        actions = _parse_actions(listed, (*loc, "actions"), problems)
    elif "actions" in raw:
        problems.append(expected("a list of actions", listed, (*loc, "actions")))
    fields: dict[str, Any] = {
        "name": names.get("name", names.get("use")),
        "use": names.get("use", names.get("name")),
        "match": parse_match(raw.get("match"), (*loc, "match"), problems),
        "actions": actions,
    }
    fields |= {
        key: raw[key] for key in ("preset", "params", "severity") if raw.get(key) is not None
    }
    # A wrong severity or params is noted at its place; the rest is read as if it were absent.
    try:
        return RuleEntry(**fields, loc=loc)
    except ValidationError as err:
        problems.extend(problems_of_model(err, RuleEntry, loc))
        wrong = {error["loc"][0] for error in err.errors(include_url=False)}
        return RuleEntry(**{key: fields[key] for key in fields if key not in wrong}, loc=loc)


def _is_path(raw: Plain) -> bool:
    return isinstance(raw, str) and (raw.endswith(".py") or ".py:" in raw or "/" in raw)


def _in_a_file(raw: Plain, loc: Loc, problems: list[Problem]) -> bool:
    """Whether `use` names a class in a file; what looks so and does not is noted."""
    if not _is_path(raw):
        return False
    if CUSTOM_USE.fullmatch(str(raw)):
        return True
    path = str(raw).partition(":")[0]
    message = "expected the name of a rule, or FILE.py:CLASS for a custom rule"
    hint = f"{path}:MyRule" if path.endswith(".py") else "rules/my_rule.py:MyRule"
    problems.append(Problem(loc, message, "name", hint))
    return False


def parse_match(raw: Plain, loc: Loc, problems: list[Problem]) -> dict[str, tuple[str, ...]]:
    """A match of labels: each with a pattern or a list of patterns."""

    def one(item: Plain, loc: Loc, problems: list[Problem]) -> tuple[str, ...] | None:
        patterns = item if isinstance(item, list) else [item]
        if patterns and all(isinstance(pattern, str) for pattern in patterns):
            return tuple(str(pattern) for pattern in patterns)
        problems.append(expected("text, or a list of texts", item, loc, hint="quotes around it"))
        return None

    return dict(_items(raw, loc, problems, one, name=parse_label_key))


def _parse_actions(raw: list[Plain], loc: Loc, problems: list[Problem]) -> tuple[ActionEntry, ...]:
    entries = [_parse_action(item, (*loc, i), problems) for i, item in enumerate(raw)]
    return tuple(entry for entry in entries if entry is not None)


def _parse_action(raw: Plain, loc: Loc, problems: list[Problem]) -> ActionEntry | None:
    if isinstance(raw, str):
        if raw == "stop":
            return ActionEntry(kind="stop", options=StopOptions(), loc=loc)
        if raw == "by_route":
            return ActionEntry(kind="by_route", loc=loc)
        return ActionEntry(kind="receiver", receiver=raw, loc=loc)
    if not isinstance(raw, dict) or len(raw) != 1:
        what = "an action: stop, a receiver's name, or a mapping like {stop: {grace: 30s}}"
        problems.append(expected(what, raw, loc))
        return None
    ((key, value),) = raw.items()
    if key == "stop":
        options = parse_model(StopOptions, {} if value is None else value, (*loc, key), problems)
        return ActionEntry(kind="stop", options=options, loc=loc) if options else None
    hint = "by_route, or a receiver's name" if key == "notify" else did_you_mean(key, ["stop"])
    message = f"unknown action {quoted(key)}: only 'stop' takes options"
    problems.append(Problem((*loc, key), message, "unknown_key", hint, at="key"))
    return None


# -- entries of kinds, labels, names


def _parse_unread(
    model: type[SectionT], raw: Plain, loc: Loc, problems: list[Problem], like: str
) -> SectionT | None:
    if isinstance(raw, dict):
        return parse_model(model, raw, loc, problems)
    problems.append(expected(f"a mapping like {like}", raw, loc))
    return None


def _parse_kind(
    raw: Plain,
    loc: Loc,
    problems: list[Problem],
    models: KindModels[SectionT],
    like: str,
    not_loaded: Callable[[Loc, str], Problem],
) -> SectionT | None:
    """An entry whose model is that of the kind which its `type` names."""
    here = (*loc, "type")
    if not isinstance(raw, dict):
        problems.append(expected(f"a mapping like {like}", raw, loc))
        return None
    if "type" not in raw:
        message, known = "the key 'type' is missing", ", ".join(models.names())
        problems.append(Problem(loc, message, "missing_key", f"one of {known}"))
        return None
    kind = raw["type"]
    try:
        model = models.model(kind) if isinstance(kind, str) else None
    except ConfigurationError as err:
        problems.append(not_loaded(here, str(err)))
        return None
    if model is None:
        names = models.names()
        what = f"expected one of {', '.join(names)}, got {kind_of(kind)}"
        hint = did_you_mean(kind, names) if isinstance(kind, str) else None
        problems.append(Problem(here, what, hint=hint))
        return None
    return parse_model(model, raw, loc, problems)


def _receiver_not_loaded(loc: Loc, why: str) -> Problem:
    return Problem(loc, why, "receiver_not_loaded")


def _target_not_loaded(loc: Loc, why: str) -> Problem:
    return Problem(loc, why, "target_not_loaded")


def _parse_label(raw: Plain, loc: Loc, problems: list[Problem]) -> str | None:
    if not isinstance(raw, str):
        hint = None if isinstance(raw, list | dict) else "quotes around it"
        problems.append(expected("text", raw, loc, hint=hint))
        return None
    try:
        return parse_label_value(raw)
    except ValueError as err:
        problems.append(Problem(loc, str(err)))
        return None


def _receiver_name(name: object) -> str:
    if name in _RESERVED:
        raise ValueError(f"{name!r} is a reserved word: give the receiver another name")
    return parse_name(name)


def _named(
    raw: Plain,
    loc: Loc,
    problems: list[Problem],
    at: Literal["key", "value"] = "value",
    *,
    rule: bool = False,
) -> bool:
    try:
        # The alias of a rule has capitals (ExplodingTensor); what a file names itself has none.
        parse_name(raw.lower() if rule and isinstance(raw, str) else raw)
    except ValueError as err:
        problems.append(Problem(loc, str(err), at=at))
        return False
    return True


def _items(
    raw: Plain,
    loc: Loc,
    problems: list[Problem],
    parse: Callable[[Plain, Loc, list[Problem]], T | None],
    *,
    name: Callable[[object], str],
) -> Iterator[tuple[str, T]]:
    """The good entries of a mapping of names; an empty section counts as an empty mapping."""
    if not isinstance(raw, dict):
        if raw is not None:
            problems.append(expected("a mapping", raw, loc))
        return
    for key, item in raw.items():
        try:
            name(key)
        except ValueError as err:
            problems.append(Problem((*loc, key), str(err), "name", at="key"))
        value = parse(item, (*loc, key), problems)
        if value is not None:
            yield key, value
