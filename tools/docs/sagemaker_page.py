"""`docs/how-to/from-sagemaker.md`, made of the tables that the converter reads.

`python tools/docs/sagemaker_page.py DOCS` writes it into the folder of the docs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tocsin.console.configuration.field_texts import in_yaml
from tocsin.console.sagemaker.tables import (
    ACTIONS,
    BY_NAME,
    NEVER_FIRED,
    RULES,
    TRIALS,
    OldParameter,
    OldRule,
)
from tocsin.console.sagemaker.values import COLLECTIONS, convert_value
from tocsin.stream_rules.catalogue import RuleCatalogue, UnknownRule, built_in
from tocsin.stream_rules.rule import AnyRule

COMMAND: Final = "python tools/docs/sagemaker_page.py docs"

_HEAD: Final = """\
# From SageMaker Debugger

tocsin has counterparts of its rules and accepts their names: `- VanishingGradient: [stop]` is an
entry of `rules` like any other. Each has two sets of parameters. tocsin's defaults keep healthy
trainings quiet; the preset `sagemaker` has the conditions and defaults that SageMaker Debugger
documents, under which healthy trainings can fire, too:

```yaml
version: 1
rules:
  - {name: VanishingGradient, preset: sagemaker, params: {threshold: 1e-8}, actions: [stop]}
```

Rule configurations in its JSON become a `tocsin.yaml` with

```console
$ tocsin convert sagemaker job.json --out tocsin.yaml
$ tocsin check tocsin.yaml
```

The file is a request of CreateTrainingJob, the response of DescribeTrainingJob, a list of
`DebugRuleConfigurations` or `ProfilerRuleConfigurations`, or one of these. What cannot be converted
is printed to stderr with its line, and becomes a comment in the file. Rules that the file does not
name run as well, at tocsin's defaults, unless you pass `--only`.

## Rules

| SageMaker Debugger | here | |
| --- | --- | --- |
"""

_PARAMETERS: Final = """
## Parameters

Theirs are texts; here they are numbers, durations and lists. Where a parameter has no counterpart,
a value other than its default is reported and omitted.

| rule | parameter | documented default | here | |
| --- | --- | --- | --- | --- |
"""

_ACTIONS: Final = """
## Actions

They are in `action_json` of the rule's parameters, or in `Actions`. A rule may have any number.
tocsin sends one message for each issue, with step, rank, tensor, value and remedy. It retries a
message that fails, and records the outcome.

| SageMaker Debugger | here |
| --- | --- |
"""

_KEYS: Final = """
## The rest of a request

| key | here |
| --- | --- |
| `RuleConfigurationName` | the name of the entry, from the second one of a rule on |
| `RuleEvaluatorImage` | its region becomes that of `sms` receivers; there are no containers |
| `InstanceType`, `VolumeSizeInGB` | all rules of a run share one process |
| `S3OutputPath`, `LocalPath` | `store.url`: Parquet files in a folder or a bucket |
| `CollectionConfigurations` | `capture.collections`, as below |
| `HookParameters` | settings of a collection: `capture.collections` |
| `ProfilingIntervalInMilliseconds` | `capture.system.interval` |
| rules of your own (`source_s3_uri`) | a class in Python: [custom rules](custom-rules.md) |

Of a collection, `save_interval` becomes `every`, `start_step` `start`, `end_step` `end` and
`save_steps` `steps`, with the prefix `eval.` or `predict.` below `modes`. Without them tocsin
captures as often as its budget allows, mostly more often than every 500 steps. Losses are read at
every step, so their intervals are omitted. Statistics are computed where the tensors are;
`reductions` and `save_shape` have no counterpart; for `save_raw_tensor`, add `save: full` with
`steps` ([past runs](store.md#save-whole-tensors)).

| collection | here |
| --- | --- |
"""

_NEVER: Final = """
## Profiler rules that do not fire with their defaults

Four of its profiler rules cannot work with their own defaults. With the preset `sagemaker` they
fire here under the conditions that their documentation describes.

| rule | why it does not |
| --- | --- |
"""

_TRIALS: Final = """
## Trials

A trial of its Python library is a run here: [past runs](store.md). Values are numpy arrays.

| SageMaker Debugger | here |
| --- | --- |
"""

_TAIL: Final = """
## What else is different

- A rule does not end when it first fires: its issue stays active, repeats, and resolves.
- An issue has a severity. Without `actions`, a critical one of a few rules stops its run ([which,
  and why](../rules/index.md#which-rules-may-stop-a-run)); with `actions`, that list alone decides.
  For such a rule without StopTraining, the converter writes an empty list.
- A rule without input does not end in an error: `rule_has_no_input` reports what is missing and how
  to capture it.
- The statuses are `waiting_for_input`, `in_progress`, `no_issues_found`, `issues_found`, `error`
  and `stopped`.
- Statistics of all runs are in the [store](store.md); whole tensors only where you ask for them.
- A step is a step of the optimizer, not a call of the model's forward.
"""


def page(catalogue: RuleCatalogue | None = None) -> str:
    """The text of `docs/how-to/from-sagemaker.md`. Pure."""
    known = catalogue or built_in()
    out = [_HEAD]
    out += [_rule_row(old, _counterpart(old, known)) for old in RULES]
    out.append(_PARAMETERS)
    for old in RULES:
        out += _parameter_rows(old)
    out.append(_ACTIONS)
    out += [f"| `{name}` | {_cell(text)} |\n" for name, text in ACTIONS.items()]
    out.append(_KEYS)
    out += [f"| `{name}` | `{ours}` |\n" for name, ours in COLLECTIONS.items()]
    out.append(_NEVER)
    for name, why in NEVER_FIRED.items():
        out.append(f"| {_link(name, known)} | {_cell(why)} |\n")
    out.append(_TRIALS)
    out += [f"| `{name}` | {_cell(text)} |\n" for name, text in TRIALS.items()]
    out.append(_TAIL)
    return "".join(out)


def write_page(docs: Path) -> None:
    """Write it into the folder of the docs."""
    (docs / "how-to").mkdir(parents=True, exist_ok=True)
    (docs / "how-to" / "from-sagemaker.md").write_text(page(), encoding="utf-8")


def _counterpart(old: OldRule, catalogue: RuleCatalogue) -> type[AnyRule] | None:
    try:
        return catalogue.get(old.name)
    except UnknownRule:
        return None


def _rule_row(old: OldRule, rule: type[AnyRule] | None) -> str:
    if rule is None:
        return f"| `{old.name}` | - | {_cell(old.instead)} |\n"
    name = rule.meta.name
    on = "" if rule.meta.by_default else "It runs only where the configuration names it."
    text = " ".join(filter(None, (rule.meta.meaning, old.note, on)))
    return f"| `{old.name}` | [`{name}`](../rules/{name}.md) | {_cell(text)} |\n"


def _parameter_rows(old: OldRule) -> Iterator[str]:
    for parameter in old.parameters:
        default = f"`{parameter.default}`" if parameter.default else "-"
        cells = (f"`{old.name}`", f"`{parameter.name}`", default, _here(parameter), parameter.note)
        yield f"| {' | '.join(_cell(cell) or '-' for cell in cells)} |\n"


def _here(parameter: OldParameter) -> str:
    if not parameter.new:
        return "-"
    if not parameter.default:
        return f"`{parameter.new}`"
    value = in_yaml(convert_value(parameter.default, parameter.kind))
    return f"`{parameter.new}: {value}`"


def _link(name: str, catalogue: RuleCatalogue) -> str:
    rule = _counterpart(BY_NAME[name], catalogue)
    return f"`{name}`" if rule is None else f"[`{name}`](../rules/{rule.meta.name}.md)"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/docs/sagemaker_page.py DOCS")
    write_page(Path(sys.argv[1]))
