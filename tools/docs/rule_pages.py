"""`docs/rules/`, made of the catalogue: an index, and each rule on a page of its own.

`python tools/docs/rule_pages.py DOCS` writes them into the folder of the docs, with the pictures
of the examples that are there (`tools/rule-examples` records those).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from rule_examples import FOLDER, Example, picture, read_example
from tocsin.console.catalog.rule_text import (
    FAMILIES,
    about,
    by_family,
    comes_text,
    definition,
    reads_text,
    repeat_text,
    stops,
)
from tocsin.console.configuration.field_texts import field_texts, in_yaml
from tocsin.schemas.text import number_text, unit_suffix
from tocsin.stream_rules.catalogue import RuleCatalogue, built_in
from tocsin.stream_rules.engine.causal_order import CAUSAL_ORDER
from tocsin.stream_rules.rule import AnyRule

COMMAND: Final = "python tools/docs/rule_pages.py docs"

_HEAD: Final = """\
# Rules

These rules run by default, each for every run that has its input; a few run only if the
configuration names what to watch. The defaults keep healthy trainings quiet.

An issue fires, repeats while it is active, and resolves when its condition is false. If the
condition recurs soon, the same issue fires again. You can switch a rule off, change its parameters,
start from a preset, or run it a second time under another name:

```yaml
version: 1
rules:
  - overtraining: off
  - {name: loss_spike, params: {k: 12.0}}
  - {name: VanishingGradient, preset: sagemaker}
  - name: strict-spike
    use: loss_spike
    severity: critical
    params: {for_steps: 3}
```

Everywhere below, a summary is one row of statistics for each tensor, computed at intervals of
several steps (`capture.collections`). Each rank has its own rows; if several ranks report the same
series, the rules read the lowest one. The names of SageMaker Debugger's rules are accepted, and its
presets have the conditions that it documents: [from SageMaker
Debugger](../how-to/from-sagemaker.md). You can write your own rule as a Python class: [custom
rules](../how-to/custom-rules.md).

```console
$ tocsin catalog list --family numerical
$ tocsin catalog show vanishing_gradient
$ tocsin catalog new my_rule   # a template for your own rule
```
"""

_STOPS_HEAD: Final = """
## Which rules may stop a run

By default, critical issues of these rules stop their run. All other issues are only reported: you
decide what to do about a spike that recovers, a plateau or an idle GPU.

| rule | severity | why it may stop |
| --- | --- | --- |
"""

_TOCTREE: Final = """
```{toctree}
:hidden:

"""


def write_pages(docs: Path, catalogue: RuleCatalogue | None = None) -> None:
    """Write index, pages and pictures into the folder of the docs, and remove those of rules that
    are gone."""
    known = catalogue or built_in()
    folder = docs / "rules"
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    files = pages(folder, known)
    for path in [*folder.glob("*.md"), *(folder / FOLDER).glob("*.svg")]:
        if path.relative_to(folder).as_posix() not in files:
            path.unlink()
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def pages(folder: Path, catalogue: RuleCatalogue) -> Mapping[str, str]:
    """Each file below `docs/rules`, with its text; the examples are read from `folder`."""
    files = {"index.md": index_page(catalogue)}
    for rule in catalogue:
        name = rule.meta.name
        example = read_example(folder, name)
        files[f"{name}.md"] = rule_page(rule, example, catalogue)
        drawn = picture(example) if example is not None else None
        if drawn is not None:
            files[f"{FOLDER}/{name}.svg"] = drawn
    return files


def index_page(catalogue: RuleCatalogue) -> str:
    """All rules in tables, family by family. Pure."""
    families = list(by_family(catalogue))
    out = [_HEAD]
    for family, rules in families:
        out.append(f"\n## {FAMILIES[family]}\n\n")
        out.append("| rule | what | severity | stops the run | also called |\n")
        out.append("| --- | --- | --- | --- | --- |\n")
        out += [_row(rule) for rule in rules]
    if any(not rule.meta.by_default for rule in catalogue):
        out.append("\nRules that are *named only* do not run until the configuration lists them.\n")
    out.append(_STOPS_HEAD)
    out += [_stop_row(rule) for rule in catalogue if rule.meta.stop_worthy]
    quiet = [rule.meta.name for rule in catalogue if not rule.meta.stop_worthy]
    out.append(f"\nThe other {len(quiet)} never do so by default.\n")
    names = [rule.meta.name for _, rules in families for rule in rules]
    return "".join([*out, _TOCTREE, *(f"{name}\n" for name in names), "```\n"])


def rule_page(
    rule: type[AnyRule], example: Example | None = None, catalogue: RuleCatalogue | None = None
) -> str:
    """All about one rule; `catalogue` has those that can be linked to. Pure."""
    meta = rule.meta
    out = [f"# {meta.name}\n\n{meta.meaning}"]
    if text := about(rule):
        out.append(f" {text}")
    out.append("\n\n")
    out += _facts(rule)
    if text := definition(rule):
        out.append(f"\n## When it fires\n\n{text}\n")
    if meta.branches:
        out.append("\nThe field `branch` of an issue names the condition:\n\n")
        out += [f"- `{name}`: {text}\n" for name, text in meta.branches.items()]
    if example is not None:
        out += _example(example)
    out.append(f"\n## What to try\n\n{meta.remedy}\n")
    if meta.does_not_see:
        out.append(f"\n## What it does not see\n\n{meta.does_not_see}\n")
    out += _parameters(rule)
    out += _presets(rule)
    out += _story(meta.name, catalogue or built_in())
    return "".join(out)


def _row(rule: type[AnyRule]) -> str:
    meta = rule.meta
    name = f"[`{meta.name}`]({meta.name}.md)" + ("" if meta.by_default else ", *named only*")
    cells = (name, meta.meaning, meta.severity, stops(rule), f"`{meta.alias}`" * bool(meta.alias))
    return f"| {' | '.join(_cell(cell) or '-' for cell in cells)} |\n"


def _stop_row(rule: type[AnyRule]) -> str:
    meta = rule.meta
    grave = meta.severity if meta.severity == "critical" else f"{meta.severity}, then critical"
    return (
        f"| [`{meta.name}`]({meta.name}.md) | {grave} | {_cell(_sentence(meta.stops_because))} |\n"
    )


def _facts(rule: type[AnyRule]) -> Iterator[str]:
    meta = rule.meta
    stop = stops(rule)
    because = f", because {meta.stops_because}" if meta.stops_because else ""
    facts = {
        "severity": meta.severity,
        "stops the run": f"{stop}{because}",
        "runs by default": "yes"
        if meta.by_default
        else "no: the configuration must name what to watch",
        "reads": reads_text(rule),
        "when available": comes_text(rule) if meta.inputs else "",
        "capture": meta.capture_hint,
        "repeats": repeat_text(rule),
        "also called": f"`{meta.alias}`, in SageMaker Debugger" if meta.alias else "",
        "version": str(meta.version),
    }
    yield "| | |\n| --- | --- |\n"
    yield from (f"| {name} | {_cell(text)} |\n" for name, text in facts.items() if text)


def _example(example: Example) -> Iterator[str]:
    yield f"\n## An example\n\n{_sentence(example.run)}\n\n"
    yield f"> **{example.severity}**: {_prose(example.reason)}\n"
    if example.drawable:
        name = example.evidence.series.name if example.evidence.series is not None else ""
        yield f"\n![{_prose(name)}]({FOLDER}/{example.rule}.svg)\n"
    facts = example.evidence.facts
    if facts:
        yield "\n| evidence | value | limit |\n| --- | --- | --- |\n"
        for fact in facts[:8]:
            unit = unit_suffix(fact.unit)
            text = fact.value if isinstance(fact.value, str) else number_text(fact.value)
            value = text if isinstance(fact.value, str) else f"{text}{unit}"
            limit = "-" if fact.limit is None else f"{number_text(fact.limit)}{unit}"
            yield f"| {_cell(_prose(fact.name))} | {_cell(_prose(value))} | {limit} |\n"


def _parameters(rule: type[AnyRule]) -> Iterator[str]:
    fields = field_texts(rule.meta.params)
    yield "\n## Parameters\n"
    if not fields:
        yield "\nNone.\n"
        return
    yield "\n| parameter | type | unit | default | meaning |\n| --- | --- | --- | --- | --- |\n"
    for field in fields:
        default = f"`{field.default}`" if field.default else "-"
        cells = (f"`{field.key}`", field.kind, field.unit or "-", default, field.meaning)
        yield f"| {' | '.join(map(_cell, cells))} |\n"


def _presets(rule: type[AnyRule]) -> Iterator[str]:
    meta = rule.meta
    for preset, values in meta.presets.items():
        other = f", which calls it `{meta.alias}`" if meta.alias and preset == "sagemaker" else ""
        whose = "What SageMaker Debugger documents" if preset == "sagemaker" else "Other values"
        yield f"\n## Preset `{preset}`\n\n{whose}{other}; `params` override it:\n\n"
        yield f"```yaml\nversion: 1\nrules:\n  - {{name: {meta.name}, preset: {preset}}}\n```\n\n"
        yield "| parameter | here |\n| --- | --- |\n"
        yield from (f"| `{key}` | {_cell(_value(value))} |\n" for key, value in values.items())


def _story(name: str, known: RuleCatalogue) -> Iterator[str]:
    """What brings its issues about, and what they bring about."""
    causes: dict[str, list[str]] = {}
    effects: list[str] = []
    for link in CAUSAL_ORDER:
        if link.cause.partition("/")[0] == name:
            effects += (*link.effects, *link.lasting)
        elif any(effect.partition("/")[0] == name for effect in (*link.effects, *link.lasting)):
            causes.setdefault(link.how, []).append(link.cause)
    if not causes and not effects:
        return
    yield "\n## Causes and consequences\n"
    if causes:
        yield "\nIts issue is a consequence of one of these, if that came first:\n\n"
        for how, names in causes.items():
            yield f"- {', '.join(_links(names, known))}: {how}.\n"
    if effects:
        others = [effect for effect in dict.fromkeys(effects) if effect.partition("/")[0] != name]
        yield f"\nPossible consequences: {', '.join(_links(others, known))}.\n"


def _links(conditions: Iterable[str], known: RuleCatalogue) -> Iterator[str]:
    """Rules, or RULE/BRANCH, each with a link to its page."""
    for condition in conditions:
        name = condition.partition("/")[0]
        yield f"[`{condition}`]({name}.md)" if name in known else f"`{condition}`"


def _value(value: object) -> str:
    return f"`{in_yaml(value)}`"


def _sentence(text: str) -> str:
    text = text.strip()
    if not text:
        return ""
    return text[0].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def _prose(text: str) -> str:
    """Names and reasons of an issue, with nothing in them taken for markup."""
    for char in "\\*_<[`":
        text = text.replace(char, f"\\{char}")
    return text


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _main(words: Iterable[str]) -> None:
    match list(words):
        case [docs]:
            write_pages(Path(docs))
        case _:
            sys.exit("usage: python tools/docs/rule_pages.py DOCS")


if __name__ == "__main__":
    _main(sys.argv[1:])
