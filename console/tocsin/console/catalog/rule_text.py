"""What a rule says of itself, in words: for the pages of the docs and for `tocsin catalog`. Pure.

Everything is read off the rule's class, its `meta` and its module's docstring, so that none of its
readers can say anything else than the code.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Final

from tocsin.console.configuration.field_texts import field_texts, in_yaml
from tocsin.schemas.configuration.values import format_duration
from tocsin.stream_rules.catalogue import RuleCatalogue
from tocsin.stream_rules.rule import AnyRule, Family, Input

FAMILIES: Final[Mapping[Family, str]] = {
    "numerical": "Numerical health",
    "progress": "Loss and progress",
    "data": "Data and outputs",
    "large_models": "Large models",
    "system": "The node and its devices",
    "trees": "Trees",
    "about_rules": "About the rules themselves",
}
"""Their titles, in the order of the docs."""

_KINDS: Final = {
    "scalar": "scalar",
    "tensors": "summaries of",
    "system": "samples of",
    "event": "event",
}
_AVAILABLE: Final = {
    "always": "from the first steps",
    "maybe": "from the first steps, or not at all",
    "later": "it may appear at any time, or never",
}


def by_family(catalogue: RuleCatalogue) -> Iterator[tuple[Family, Sequence[type[AnyRule]]]]:
    """The rules of each family that has any, in the order of the docs."""
    rules = list(catalogue)
    for family in FAMILIES:
        members = [rule for rule in rules if rule.meta.family == family]
        if members:
            yield family, members


def about(rule: type[AnyRule]) -> str:
    """What the class says of itself, in one line."""
    return " ".join((inspect.getdoc(rule) or "").split())


def definition(rule: type[AnyRule]) -> str:
    """What its module says: formula and source, without the first line, which names it."""
    text = inspect.getdoc(sys.modules[rule.__module__]) or ""
    return text.partition("\n\n")[2].strip()


def stops(rule: type[AnyRule]) -> str:
    """Whether its issues may stop a run by default: `no`, `yes`, `if critical`."""
    meta = rule.meta
    if not meta.stop_worthy:
        return "no"
    return "yes" if meta.severity == "critical" else "if critical"


def reads_text(rule: type[AnyRule]) -> str:
    """The inputs of a rule: which records, of which names, in which mode; alike ones together."""
    first = "; ".join(_together(one for one in rule.meta.inputs if not one.optional))
    optional = "; ".join(_together(one for one in rule.meta.inputs if one.optional))
    return f"{first}; in addition, {optional}" if optional else first


def _together(inputs: Iterable[Input]) -> Iterator[str]:
    groups: dict[tuple[str, str], list[str]] = {}
    for one in inputs:
        groups.setdefault((one.kind, _mode(one)), []).append(f"`{one.pattern}`")
    for (kind, mode), patterns in groups.items():
        word = _KINDS[kind] + ("s" if kind in ("scalar", "event") and len(patterns) > 1 else "")
        yield f"{word} {', '.join(patterns)}{mode}"


def _mode(one: Input) -> str:
    """In which mode, where that must be named."""
    if one.mode is None:
        return " in any mode" if one.kind in ("scalar", "tensors") else ""
    return f" of {one.mode}" if one.kind == "scalar" or one.mode != "train" else ""


def comes_text(rule: type[AnyRule]) -> str:
    """When the input of a run comes."""
    return _AVAILABLE[rule.meta.available]


def repeat_text(rule: type[AnyRule]) -> str:
    """How often an issue repeats, and when it resolves."""
    meta = rule.meta
    repeat = format_duration(timedelta(milliseconds=meta.repeat_ms))
    after = meta.resolve_after_steps
    gone = f"after {after} clean steps" if after else "as soon as the condition is false"
    return f"every {repeat} while active; resolves {gone}"


def preset_text(values: Mapping[str, object]) -> str:
    """The parameters of a preset, in one line of YAML."""
    return in_yaml(values)


def rule_facts(rule: type[AnyRule]) -> dict[str, object]:
    """All of it as JSON values, for programs."""
    meta = rule.meta
    return {
        "name": meta.name,
        "version": meta.version,
        "family": meta.family,
        "alias": meta.alias,
        "meaning": meta.meaning,
        "about": about(rule),
        "definition": definition(rule),
        "severity": meta.severity,
        "stop_worthy": meta.stop_worthy,
        "stops_because": meta.stops_because,
        "by_default": meta.by_default,
        "branches": dict(meta.branches),
        "inputs": [
            {"kind": one.kind, "pattern": one.pattern, "mode": one.mode, "beside": one.optional}
            for one in meta.inputs
        ],
        "comes": meta.available,
        "capture_hint": meta.capture_hint,
        "parameters": [
            {
                "name": field.key,
                "type": field.kind.replace("`", ""),
                "unit": field.unit,
                "default": field.default,
                "meaning": field.meaning,
            }
            for field in field_texts(meta.params)
        ],
        "presets": {name: dict(values) for name, values in meta.presets.items()},
        "remedy": meta.remedy,
        "does_not_see": meta.does_not_see,
        "repeat_s": meta.repeat_ms / 1000,
        "resolve_after_steps": meta.resolve_after_steps,
    }
