"""`tocsin convert sagemaker`: rule configurations of SageMaker Debugger as a tocsin.yaml. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pydantic import ValidationError

from tocsin.console.sagemaker.actions import STOP, Receivers, actions_of
from tocsin.console.sagemaker.capture import capture_of
from tocsin.console.sagemaker.reading import Notes, Placed, find, read_json, renamed
from tocsin.console.sagemaker.tables import (
    BY_NAME,
    OF_THE_SERVICE,
    REPORTED,
    OldParameter,
    OldRule,
)
from tocsin.console.sagemaker.values import Unconvertible, convert_value
from tocsin.console.sagemaker.yaml_text import Entry, as_yaml
from tocsin.schemas.configuration.problems import PlacedProblem, did_you_mean
from tocsin.schemas.configuration.validation import problems_of_model
from tocsin.schemas.configuration.yaml_document import Plain
from tocsin.stream_rules.catalogue import RuleCatalogue, UnknownRule, built_in
from tocsin.stream_rules.rule import AnyRule

PRESET: Final = "sagemaker"
_CUSTOM_IMAGE: Final = "rule-evaluator"
_NOT_IN_NAMES: Final = re.compile(r"[^a-z0-9._-]+")
_LONGEST_NAME: Final = 64


@dataclass(frozen=True, slots=True)
class Converted:
    """What a file became.

    Attributes:
        text: of the tocsin.yaml; `tocsin check` accepts it.
        warnings: what of the file it does not have, each with its place there.
    """

    text: str
    warnings: Sequence[PlacedProblem]


@dataclass(slots=True)
class _Work:
    catalogue: RuleCatalogue
    notes: Notes
    receivers: Receivers = field(default_factory=Receivers)
    entries: list[Entry] = field(default_factory=list)


def convert(
    text: str, source: str, *, only: bool = False, catalogue: RuleCatalogue | None = None
) -> Converted:
    """Convert the text of a JSON file.

    Args:
        source: its name, for messages.
        only: whether rules that the file does not have are switched off.

    Raises:
        ConfigProblems: it is no JSON, or has no rule configurations; with line and column.
    """
    document = read_json(text, source)
    found = find(document, text)
    work = _Work(catalogue or built_in(), Notes(document))
    for rule in found.rules:
        _rule(rule, work)
    before = len(work.notes.found)
    capture = capture_of(found, work.notes)
    out = as_yaml(
        work.entries,
        work.receivers.known,
        capture,
        source=source,
        only=only,
        left_out=[note.message for note in work.notes.found[before:]],
    )
    places = sorted(work.notes.found, key=lambda note: (note.line, note.column))
    return Converted(out, places)


def _rule(placed: Placed, work: _Work) -> None:
    parameters = placed.inner("RuleParameters")
    label = placed.text("RuleConfigurationName") or ""
    name = parameters.text("rule_to_invoke") or label
    old = BY_NAME.get(name)
    custom = "source_s3_uri" in parameters.data or _CUSTOM_IMAGE in (
        placed.text("RuleEvaluatorImage") or ""
    )
    at = f"line {work.notes.line(placed.loc)}"
    if custom or old is None:
        what = "a rule of your own" if custom else "no rule of SageMaker Debugger"
        near = None if custom else did_you_mean(name, BY_NAME, list_up_to=0)
        hint = f"{near}" if near else "tocsin catalog new NAME, for a rule in Python"
        work.notes.add(placed.loc, f"{name[:60] or 'it'} is {what}: left out", hint)
        work.entries.append(Entry(comment=(f"{name[:60]} ({at}): {what}, left out",)))
    elif old.name == "ProfilerReport":
        _report(placed, work)
    elif old.instead:
        work.notes.add(placed.loc, f"{old.name} is left out: {old.instead}")
        work.entries.append(Entry(comment=(f"{old.name} ({at}): left out, {old.instead}",)))
    else:
        _counterpart(old, placed, label, work)


def _report(placed: Placed, work: _Work) -> None:
    """Its rules run by default; an entry about one of them is for that one."""
    own: dict[str, dict[str, Plain]] = {}
    before = len(work.notes.found)
    parameters = placed.inner("RuleParameters")
    for key, value in parameters.data.items():
        rule, _, parameter = key.partition("_")
        if rule in REPORTED and parameter:
            own.setdefault(rule, {})[parameter] = value
        elif key not in OF_THE_SERVICE and key != "opt_out_telemetry":
            message = f"{key[:60]} belongs to no rule of the report"
            work.notes.add((*parameters.loc, key), message)
    at = f"line {work.notes.line(placed.loc)}"
    instead = "there are no reports; its rules run by default"
    left_out = [f"  not converted: {note.message}" for note in work.notes.found[before:]]
    work.entries.append(Entry(comment=(f"ProfilerReport ({at}): {instead}", *left_out)))
    for rule, values in own.items():
        made = renamed(placed, RuleParameters={**values})
        _counterpart(BY_NAME[rule], made, f"{rule}-of-the-report", work, prefix=f"{rule}_")


def _counterpart(
    old: OldRule, placed: Placed, label: str, work: _Work, *, prefix: str = ""
) -> None:
    try:
        rule = work.catalogue.get(old.name)
    except UnknownRule:
        work.notes.add(placed.loc, f"{old.name} has no counterpart yet: left out")
        work.entries.append(Entry(comment=(f"{old.name}: no counterpart, left out",)))
        return
    comment = [f"{old.name}, from line {work.notes.line(placed.loc)}"]
    before = len(work.notes.found)
    params = dict(_params(old, placed, work.notes, prefix))
    preset = PRESET if PRESET in rule.meta.presets else None
    params = _valid(rule, preset, params, placed, work.notes, prefix)
    runs = [one.new for one in old.parameters if one.kind == "run"]
    if missing := ", ".join(name for name in runs if name not in params):
        # Without its run the rule would fire at the first step, and stop what is healthy.
        work.notes.add(placed.loc, f"{old.name} is left out: add it with {missing}, a run's id")
        comment += [f"  not converted: {note.message}" for note in work.notes.found[before:]]
        work.entries.append(Entry(comment=tuple(comment)))
        return
    actions = actions_of(placed, work.receivers, work.notes)
    if _stops(placed) and STOP not in actions:
        actions = [STOP, *actions]
    comment += [f"  not converted: {note.message}" for note in work.notes.found[before:]]
    if rule.meta.stop_worthy and STOP not in actions:
        comment.append("  without `actions`, its critical issues would stop the run")
    work.entries.append(
        Entry(
            comment=tuple(comment),
            name=_name(rule, label, work.entries),
            use=rule.meta.name,
            preset=preset,
            params=params,
            # A rule that stops by default gets a list of actions without a stop.
            actions=tuple(actions) if actions or rule.meta.stop_worthy else None,
        )
    )


def _params(
    old: OldRule, placed: Placed, notes: Notes, prefix: str
) -> Iterator[tuple[str, object]]:
    """Its parameters as ours; two that become one are put together."""
    known = {parameter.name: parameter for parameter in old.parameters}
    parameters = placed.inner("RuleParameters")
    lists: dict[str, list[object]] = {}
    for key, value in parameters.data.items():
        if key in OF_THE_SERVICE:
            continue
        loc = (*parameters.loc, prefix + key)
        parameter = known.get(key)
        if parameter is None:
            hint = did_you_mean(key, known)
            notes.add(loc, f"{old.name} has no parameter {key[:60]!r}", hint)
        elif not parameter.new:
            if not _is_default(parameter, value) and key != "stop_training_on_fire":
                notes.add(loc, f"{key}: {parameter.note}")
        else:
            try:
                ours = convert_value(value, parameter.kind)
            except Unconvertible as error:
                notes.add(loc, f"{key}: {error}")
                continue
            if parameter.kind == "regex":
                notes.add(loc, f"{key} became {', '.join(map(str, _items(ours)))}: see if it fits")
            if isinstance(ours, list):
                ours = lists[parameter.new] = [*lists.get(parameter.new, []), *ours]
            yield parameter.new, ours


def _items(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else [value]


def _is_default(parameter: OldParameter, value: Plain) -> bool:
    text = str(value).strip()
    if text == parameter.default:
        return True
    try:
        return float(text) == float(parameter.default)
    except ValueError:
        return text.lower() == parameter.default.lower()


def _valid(
    rule: type[AnyRule],
    preset: str | None,
    params: dict[str, object],
    placed: Placed,
    notes: Notes,
    prefix: str,
) -> dict[str, object]:
    """Those parameters that the rule takes."""
    base: Mapping[str, object] = rule.meta.presets[preset] if preset else {}
    model = rule.meta.params
    while True:
        try:
            model.model_validate({**base, **params})
        except ValidationError as error:
            wrong = [one for one in problems_of_model(error, model, ()) if one.loc]
            messages = {str(one.loc[0]): one.message for one in wrong if str(one.loc[0]) in params}
            for key in messages or params:
                loc = (*placed.inner("RuleParameters").loc, prefix + key)
                notes.add(loc, f"{key}: {messages.get(key, 'does not go with the others')}")
            params = {
                key: value for key, value in params.items() if key not in (messages or params)
            }
            if messages or params:
                continue
        return params


def _stops(placed: Placed) -> bool:
    """Whether the rule has the option to stop that is older than actions."""
    value = placed.inner("RuleParameters").data.get("stop_training_on_fire")
    return str(value).strip().lower() in ("true", "1")


def _name(rule: type[AnyRule], label: str, entries: Sequence[Entry]) -> str:
    """The rule's own name for the first entry of it, else one made of the configuration's name."""
    taken = {entry.name for entry in entries}
    own = rule.meta.name
    if own not in taken:
        return own
    base = _NOT_IN_NAMES.sub("-", label.lower()).strip("-._")[: _LONGEST_NAME - 4] or own
    name, count = base, 2
    while name in taken or name in built_in().names():
        name, count = f"{base}-{count}", count + 1
    return name
