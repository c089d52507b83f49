"""`docs/reference/configuration.md` and `docs/schemas/config.json`, made of the models.

`python tools/docs/config_page.py DOCS` writes both into the folder of the docs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from pydantic import BaseModel

from problem_codes import PROBLEM_CODES, WARNING_CODES
from tocsin.actions.receivers.registry import ReceiverKinds
from tocsin.actions.targets.registry import TargetKinds
from tocsin.console.configuration.editor_schema import as_text, editor_schema
from tocsin.console.configuration.field_texts import REQUIRED, FieldText, field_texts, summary_of
from tocsin.console.configuration.init import severity_text
from tocsin.schemas.configuration.file_schema import config_model
from tocsin.schemas.configuration.sections import RuleEntry, StopOptions
from tocsin.stream_rules.catalogue import RuleCatalogue, built_in
from tocsin.stream_rules.rule import AnyRule

_RECEIVERS: Final = [kind.config for kind in ReceiverKinds().built_in()]
_TARGETS: Final = [kind.config for kind in TargetKinds().built_in()]

COMMAND: Final = "python tools/docs/config_page.py docs"

_HEAD: Final = """\
# Configuration

You need none. This page lists every key of `tocsin.yaml`. `tocsin init` generates a file with the
most common settings in comments, `tocsin init --full` with all of them; `tocsin check` prints every
problem with line and column, or the settings in effect:

```console
$ tocsin init
$ tocsin check
$ tocsin check --json tocsin.yaml
$ tocsin schema > tocsin.schema.json   # for completion in an editor
```

The file is `--config FILE` (or a folder, see below), else what `TOCSIN_CONFIG` names, else
`tocsin.yaml` in the working folder. For each setting the flag comes first, then the environment
(`TOCSIN_BUS`, `TOCSIN_LABELS`), then the file, then the default. Relative paths start at the folder
of the file; `~` is the home folder. If it has a mistake, nothing starts, and the exit code is 2.

```yaml
version: 1
labels: {team: vision}
secrets:
  hook: {env: HOOK_KEY}
receivers:
  ml-hook: {type: webhook, url: "https://hooks.example.com/ml", sign: {key: {secret: hook}}}
rules:
  - nonfinite: [stop, ml-hook]          # a rule with its actions
  - loss_not_decreasing: off            # not at all
  - name: exploding-in-prod             # all keys: an instance of its own, beside the default one
    use: exploding_gradient
    match: {team: vision}
    params: {factor: 10.0}
    actions: [ml-hook]
```

## Several files

If `--config` or `TOCSIN_CONFIG` names a folder, all files in it that end in `.yaml` are one
configuration, except hidden ones and `*_test.yaml`. Each file starts with `version: 1`. tocsin puts
sections with names together, and joins lists in the order of the file names. It reports what two
files name alike with both places:

```text
conf/2.yaml:4:3: 'receivers.ml-hook' was given already in conf/1.yaml:7:3 [duplicate_key]
```

`routes` is a list in which the order counts: begin the names of the files with numbers. Relative
paths start at the folder. If others can write to the folder or to a file in it, tocsin prints a
warning, and does not load rules from files.

## Changes while tocsin runs

`tocsin rules`, `tocsin actions` and the helper of `tocsin run` read the configuration again when a
file has changed, within about five seconds, or at once after SIGHUP.

- At once: receivers, targets, secrets, `routes`, `silences`, `inhibit`, `time_windows`, `policy`,
  `public_url`, `page_url`, `prices`, and the actions of rules. A notice that was decided before is
  still sent. Inhibitions know the issues that come after the change.
- For new runs, and at the next start of a job: rules that are added, removed or switched off, and
  `params`, `preset`, `severity` and `match`. A job that is running keeps its rules until the worker
  restarts.
- When the worker restarts: `bus`, `store`, rules from files or packages, and rules that compare
  with another run. The worker prints a warning.
- At the next start of a job: `capture`, `labels`, `stop`.

A configuration with a problem changes nothing: the worker keeps the old one, prints the problems
once, and publishes `tocsin.configuration.refused`. `tocsin status` shows it until a configuration
is applied. The metric `tocsin_config_last_reload_successful` is 0 meanwhile. If the file of
a secret was missing, the configuration is tried again when that file comes. A file that others can
write to is not read again.

## How values are written

The file is YAML 1.2 without anchors, aliases, tags and merge keys; `no` is text, and two equal keys
are a mistake. A number with a unit is text:

| kind | written | units |
|---|---|---|
| duration | `250ms`, `30s`, `10m`, `4h`, `2d` | ms, s, m, h, d |
| percentage | `0.5%`, `10%` | % |
| size | `500MB`, `20GB` | B, kB, MB, GB, TB, each 1,000 of the one before |
| name | `ml-hook` | lower-case letters, digits, `-`, `_`, `.`; 64 characters at most |
| secret | `{secret: NAME}` | NAME is one of the section `secrets` |

Where no default is shown, the meaning describes the effect without the key.

## Top level

"""

_RULES: Final = """\
Each entry is a rule with its actions, a rule with `off`, or a mapping with these keys, of which
`name` or `use` is needed:

"""

_ACTIONS: Final = """\
An entry of `actions` is `stop`, the name of a receiver, or `{stop: {…}}` with options. The list
alone decides what is done. Without one, issues are lines on the run's terminal, and critical issues
of the rules that are marked below as stopping stop their run.

`stop` in the list of a rule that may stop by itself acts on the same issues as without a list: a
NaN in an evaluation score is a warning of `nonfinite` and stops nothing. `{stop: {at: warning}}`
stops at warnings, too. `stop` in the list of any other rule acts on each of its issues.
`tocsin check` shows the severity at which each rule stops a run.

### Options of `stop`

"""

_CODES: Final = """
## What `tocsin check` answers

One line for each problem, `file:line:column: message [code]`, the line itself with a caret, and
what to try. The exit code is 0, or 2 if there is any problem; warnings and notes leave it at 0.
Without FILE the configuration of this folder is meant, as `tocsin run` would use it: a secret or a
trusted key that is not on this machine is a problem. With FILE it is a note.

`--format github` prints the problems as annotations of a GitHub workflow, `--format sarif` as a log
for code scanning.

With `--json`, or `--format json`, it is one object: `version` (1) and `files`, each with `file`,
`ok`, `problems` and `warnings` (`file`, `line`, `column`, `code`, `message`, `hint`), `notes`,
and `holds`: what the file means, or null. The codes:

"""

_RULE_KEYS: Final = frozenset({"name", "use", "match", "preset", "params", "severity", "actions"})


def config_page(catalogue: RuleCatalogue | None = None) -> str:
    """The text of `docs/reference/configuration.md`. Pure."""
    fields = field_texts(config_model(_RECEIVERS, _TARGETS))
    out = [_HEAD, _table(fields)]
    for field in fields:
        if field.key == "rules":
            out += [f"\n## `rules`\n\n{field.meaning}\n\n", _RULES, _table(_rule_fields())]
            out += ["\n", _ACTIONS, _table(field_texts(StopOptions))]
        elif field.parts:
            out += [f"\n## `{field.key}`\n"]
            parts = (text for part in field.parts for text in _part(part, _way(field), field.key))
            # What all kinds of receivers, or of targets, have is shown once.
            out += dict.fromkeys(parts)
    out += ["\n## Parameters of the rules\n\n"]
    out += ["The values under `params`, rule by rule.\n"]
    for rule in catalogue or built_in():
        out += _rule(rule)
    return "".join(out) + _codes()


def write_docs(folder: Path) -> None:
    """Write both files into the folder of the docs."""
    for name in ("reference", "schemas"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "reference" / "configuration.md").write_text(config_page(), encoding="utf-8")
    schema = as_text(editor_schema(built_in(), _RECEIVERS, _TARGETS))
    (folder / "schemas" / "config.json").write_text(schema, encoding="utf-8")


def _part(model: type[BaseModel], way: str, above: str = "") -> Iterator[str]:
    """A model and those inside it, each with its keys and the way to them, below a heading."""
    fields = field_texts(model)
    kind = next((field.kind for field in fields if field.key == "type"), "")
    title = f"`{way}`" + (f" of the type {kind}" if kind else "")
    heading = f"\n### {title}\n" if way != above else ""
    yield f"{heading}\n{summary_of(model)}\n\n{_table(fields)}"
    for field in fields:
        for part in field.parts:
            yield from _part(part, f"{way}.{_way(field)}")


def _way(field: FieldText) -> str:
    if field.kind.startswith("mapping (name:"):
        return f"{field.key}.NAME"
    return f"{field.key}[]" if field.kind.startswith("list") else field.key


def _rule_fields() -> list[FieldText]:
    """The keys that an entry has in the file: the model holds how it was written, too."""
    fields = [field for field in field_texts(RuleEntry) if field.key in _RULE_KEYS]
    return [replace(field, default=field.default.replace(REQUIRED, "")) for field in fields]


def _rule(rule: type[AnyRule]) -> Iterator[str]:
    meta = rule.meta
    yield f"\n### `{meta.name}`\n\n{meta.meaning} {severity_text(rule)}\n"
    fields = field_texts(meta.params)
    yield f"\n{_table(fields)}" if fields else "\nIt has no parameters.\n"


def _codes() -> str:
    """What `check` may answer."""
    kinds = (("problem", PROBLEM_CODES), ("warning", WARNING_CODES))
    rows = [
        f"| `{code}` | {kind} | {_cell(meaning)} |\n"
        for kind, codes in kinds
        for code, meaning in codes.items()
    ]
    return f"{_CODES}| code | | meaning |\n| --- | --- | --- |\n{''.join(rows)}"


def _table(fields: Iterable[FieldText]) -> str:
    rows = [["key", "type", "unit", "default", "example", "meaning"], ["---"] * 6]
    rows += [
        [
            f"`{field.key}`",
            field.kind,
            field.unit or "-",
            field.default if field.default == REQUIRED else _code(field.default),
            _code(field.example),
            field.meaning,
        ]
        for field in sorted(fields, key=lambda field: field.default != REQUIRED)
    ]
    return "".join("| " + " | ".join(map(_cell, row)) + " |\n" for row in rows)


def _code(text: str) -> str:
    return f"`{text}`" if text else "-"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/docs/config_page.py DOCS")
    write_docs(Path(sys.argv[1]))
