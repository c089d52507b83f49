"""`tocsin catalog list` and `tocsin catalog show`: the built-in rules, and one of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

from rich.table import Table
from rich.text import Text

from tocsin.console.catalog.rule_text import (
    FAMILIES,
    about,
    by_family,
    comes_text,
    definition,
    preset_text,
    reads_text,
    repeat_text,
    rule_facts,
    stops,
)
from tocsin.console.configuration.field_texts import field_texts, in_yaml
from tocsin.console.views.issues import SEVERITY_STYLE
from tocsin.schemas.configuration.problems import did_you_mean
from tocsin.schemas.errors import ConfigurationError
from tocsin.stream_rules.catalogue import RuleCatalogue, UnknownRule
from tocsin.stream_rules.custom.loading import load_rule
from tocsin.stream_rules.engine.configured_rules import CUSTOM_GROUP
from tocsin.stream_rules.rule import AnyRule, Family

Shown = str | Text | Table

_WIDTH: Final = 18
"""Of the names of facts, characters."""


class UnknownFamily(ConfigurationError):
    """No family of rules has this name."""


def chosen(
    catalogue: RuleCatalogue, family: str | None
) -> list[tuple[Family, Sequence[type[AnyRule]]]]:
    """The families that are wanted, each with its rules.

    Raises:
        UnknownFamily: the catalogue has no such family.
    """
    if family is not None and family not in FAMILIES:
        raise UnknownFamily(f"there is no family {family!r}; there are {', '.join(FAMILIES)}")
    return [one for one in by_family(catalogue) if family in (None, one[0])]


def find(catalogue: RuleCatalogue, name: str, folder: Path | None = None) -> type[AnyRule]:
    """The rule of that name or alias, however it is capitalised; or, with `folder`, one of your own
    (`rules/mine.py:Mine` from there, or what a package offers), whose code is run for that.

    Raises:
        UnknownRule: there is none; the message says what was meant, or where to look.
        RuleNotLoaded: one of your own cannot be loaded.
    """
    if folder is not None and name not in catalogue and (":" in name or name in offered()):
        return load_rule(name, folder)
    known = (*catalogue.names(), *catalogue.aliases())
    same = [one for one in known if one.lower() == name.lower().replace("-", "_")]
    try:
        return catalogue.get(same[0] if same else name)
    except UnknownRule:
        meant = did_you_mean(name, known)
        hint = f"did you mean {meant}?" if meant else "all of them: tocsin catalog list"
        raise UnknownRule(f"there is no rule {name!r}; {hint}") from None


def offered() -> list[str]:
    """The names of the rules that installed packages offer."""
    return sorted({point.name for point in entry_points(group=CUSTOM_GROUP)})


def list_table(catalogue: RuleCatalogue, family: str | None = None) -> Table:
    """One line for each rule. Raises as `chosen` does."""
    table = Table(box=None)
    for name in ("rule", "family"):
        table.add_column(name, no_wrap=True)
    for name in ("severity", "stops", "also called"):
        table.add_column(name)
    table.add_column("what", overflow="fold")
    for of, rules in chosen(catalogue, family):
        for rule in rules:
            meta = rule.meta
            table.add_row(
                Text(meta.name + ("" if meta.by_default else " (off)")),
                Text(of),
                Text(meta.severity, style=SEVERITY_STYLE[meta.severity]),
                Text(stops(rule)),
                Text(meta.alias or "-"),
                Text(meta.meaning),
            )
    return table


def list_notes(catalogue: RuleCatalogue, family: str | None = None) -> str:
    """What stands below the table."""
    rules = [rule for _, members in chosen(catalogue, family) for rule in members]
    off = sum(not rule.meta.by_default for rule in rules)
    count = f"{len(rules)} rule{'s' * (len(rules) != 1)}"
    if off:
        count += f", {off} of which (off) run only where the configuration names them"
    notes = [f"{count}; more of one: tocsin catalog show RULE"]
    if family is None and (own := offered()):
        notes.append(f"installed packages offer more: {', '.join(own)}")
    return "\n".join(notes)


def list_facts(catalogue: RuleCatalogue, family: str | None = None) -> dict[str, object]:
    """The list of rules as JSON values: `version` and `rules`. Raises as `chosen` does."""
    rules = [rule_facts(rule) for _, members in chosen(catalogue, family) for rule in members]
    found: dict[str, object] = json.loads(_json({"version": 1, "rules": rules}))
    return found


def list_json(catalogue: RuleCatalogue, family: str | None = None) -> str:
    """The same as text."""
    return _json(list_facts(catalogue, family))


def show_json(rule: type[AnyRule]) -> str:
    """One rule for programs: one JSON object with `version` and `rule`."""
    return _json({"version": 1, "rule": rule_facts(rule)})


def show(rule: type[AnyRule]) -> Iterator[Shown]:
    """One rule for people: blocks to be printed with an empty line between them."""
    meta = rule.meta
    yield Text.assemble((meta.name, "bold"), f"  {meta.meaning} {about(rule)}")
    if text := definition(rule):
        yield Text(text)
    yield _facts(rule)
    if fields := field_texts(meta.params):
        table = Table(box=None)
        for name in ("parameter", "default"):
            table.add_column(name, no_wrap=True)
        for name in ("unit", "type", "meaning"):
            table.add_column(name, overflow="fold")
        for field in fields:
            kind = field.kind.replace("`", "")
            cells = (field.key, field.default or "-", field.unit or "-", kind, field.meaning)
            table.add_row(*map(Text, cells))
        yield table
    yield Text(f"in the configuration: {_example(rule)}")


def _facts(rule: type[AnyRule]) -> Table:
    meta = rule.meta
    stop = stops(rule) + (f", because {meta.stops_because}" if meta.stops_because else "")
    default = "" if meta.by_default else "no: the configuration must say what it watches"
    rows = [
        ("family", FAMILIES[meta.family]),
        ("severity", meta.severity),
        ("stops the run", stop),
        ("runs by default", default),
        ("also called", f"{meta.alias}, in SageMaker Debugger" if meta.alias else ""),
        *((f"branch {name}", text) for name, text in meta.branches.items()),
        ("reads", reads_text(rule).replace("`", "")),
        ("when it is there", comes_text(rule) if meta.inputs else ""),
        ("to capture it", meta.capture_hint),
        ("repeats", repeat_text(rule)),
        ("what to try", meta.remedy),
        ("does not see", meta.does_not_see.replace("`", "")),
        *((f"preset {name}", preset_text(values)) for name, values in meta.presets.items()),
    ]
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(min_width=_WIDTH, style="dim")
    table.add_column(overflow="fold")
    for name, text in rows:
        if text:
            table.add_row(Text(name), Text(text))
    return table


def _example(rule: type[AnyRule]) -> str:
    """An entry of `rules` that says what holds anyway, for the first parameter."""
    meta = rule.meta
    field = next((field for field in field_texts(meta.params) if field.default), None)
    if field is None:
        return f"- {meta.name}: off"
    return f"- {{name: {meta.name}, params: {{{field.key}: {field.default}}}}}"


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, default=in_yaml)
