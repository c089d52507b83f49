"""`docs/rules.md`, made of the catalogue: each rule as its code describes it.

`python -m tocsin.console.rule_docs DOCS` writes it into the folder of the docs.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Final

from tocsin.console.model_fields import field_texts
from tocsin.schemas.config_values import format_duration
from tocsin.stream_rules.catalogue import Catalogue, built_in
from tocsin.stream_rules.rule import AnyRule, Family, Input

COMMAND: Final = "python -m tocsin.console.rule_docs docs"

FAMILIES: Final[dict[Family, str]] = {
    "numerical": "Numerical health",
    "progress": "Loss and progress",
    "data": "Data and outputs",
    "large_models": "Large models",
    "system": "The node and its devices",
    "trees": "Trees",
    "about_rules": "About the rules themselves",
}

_HEAD: Final = """\
# Rules

All of them run by default, each for every run that has what it reads. Their defaults are chosen so
that healthy trainings stay quiet: no rule says anything above `info` of 75 public GPT trainings
that all completed, nor of the small GPT and the ResNet that come with tocsin.

An issue fires once, is said again while it goes on, and is resolved when its condition is gone. A
critical issue of a rule that stops the run does so unless the configuration says otherwise. A rule
can be switched off, given other parameters, or run a second time under another name:

```yaml
version: 1
rules:
  - overtraining: off
  - {name: loss_spike, params: {k: 12.0}}
  - name: strict-spike
    use: loss_spike
    severity: critical
    params: {for_steps: 3}
```

Everywhere below, a summary is one row of statistics for each tensor, made every so many steps
(`capture.collections`); ranks are told apart, and of several that tell the same story the lowest is
read. The names of SageMaker Debugger's rules are accepted; what differs is said here.

"""

_KINDS: Final = {
    "scalar": "scalar",
    "tensors": "summaries of",
    "system": "samples of",
    "event": "event",
}


def rules_page(catalogue: Catalogue | None = None) -> str:
    """The text of `docs/rules.md`. Pure."""
    rules = list(catalogue or built_in())
    out = [_HEAD, "| rule | what | severity | stops the run |\n| --- | --- | --- | --- |\n"]
    by_family = [(f, [rule for rule in rules if rule.meta.family == f]) for f in FAMILIES]
    for _, members in by_family:
        out += [_row(rule) for rule in members]
    for family, members in by_family:
        if members:
            out.append(f"\n## {FAMILIES[family]}\n")
            out += [text for rule in members for text in _rule(rule)]
    return "".join(out)


def write_page(folder: Path) -> None:
    """Write the page into the folder of the docs."""
    (folder / "rules.md").write_text(rules_page(), encoding="utf-8")


def _row(rule: type[AnyRule]) -> str:
    meta = rule.meta
    link = f"[`{meta.name}`](#{meta.name})"
    return f"| {link} | {_cell(meta.meaning)} | {meta.severity} | {_stops(rule)} |\n"


def _stops(rule: type[AnyRule]) -> str:
    meta = rule.meta
    if not meta.stop_worthy:
        return "no"
    return "yes" if meta.severity == "critical" else "if critical"


def _rule(rule: type[AnyRule]) -> Iterator[str]:
    meta = rule.meta
    yield f"\n### {meta.name}\n\n{meta.meaning}"
    about = inspect.getdoc(rule) or ""
    yield f" {' '.join(about.split())}\n"
    definition = _definition(rule)
    if definition:
        yield f"\n{definition}\n"
    repeat = format_duration(timedelta(milliseconds=meta.repeat_ms))
    after = meta.resolve_after_steps
    gone = f"after {after} steps without it" if after else "as soon as it is gone"
    facts = {
        "severity": f"{meta.severity}; stops the run: {_stops(rule)}",
        "reads": "; ".join(_input(one) for one in meta.inputs),
        "to capture it": meta.capture_hint,
        "said again": f"every {repeat} while it goes on; resolved {gone}",
        "also called": f"`{meta.alias}`, in SageMaker Debugger" if meta.alias else "",
        "what to try": meta.remedy,
    }
    yield "\n| | |\n| --- | --- |\n"
    yield from (f"| {name} | {_cell(text)} |\n" for name, text in facts.items() if text)
    fields = field_texts(meta.params)
    if not fields:
        yield "\nIt has no parameters.\n"
        return
    yield "\n| parameter | type | unit | default | meaning |\n| --- | --- | --- | --- | --- |\n"
    for field in fields:
        default = f"`{field.default}`" if field.default else "-"
        cells = (f"`{field.key}`", field.kind, field.unit or "-", default, field.meaning)
        yield f"| {' | '.join(map(_cell, cells))} |\n"


def _definition(rule: type[AnyRule]) -> str:
    """What the module of a rule says of it, without the first line, which names it."""
    text = inspect.getdoc(sys.modules[rule.__module__]) or ""
    return text.partition("\n\n")[2].strip()


def _input(one: Input) -> str:
    text = f"{_KINDS[one.kind]} `{one.pattern}`"
    if one.kind == "scalar" or (one.kind == "tensors" and one.mode != "train"):
        text += " in any mode" if one.mode is None else f" of {one.mode}"
    return f"{text} (beside the others)" if one.beside else text


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tocsin.console.rule_docs DOCS")
    write_page(Path(sys.argv[1]))
