"""`tocsin check`: all that is wrong with a configuration, or what holds with it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from tocsin.console.setting import section_registry
from tocsin.emitter.plans import CollectionPlan, Schedule
from tocsin.emitter.settings import capture_settings
from tocsin.schemas.config import Config, check_config, config_path, read_config
from tocsin.schemas.config_hidden import hide_lines
from tocsin.schemas.config_problems import Finding, Loc, Problem, split_lines
from tocsin.schemas.config_sections import RuleEntry
from tocsin.schemas.config_settings import SecretUnavailable, resolve_secrets, resolve_settings
from tocsin.schemas.config_values import format_percent
from tocsin.schemas.yaml_loader import load
from tocsin.stream_rules.catalogue import built_in
from tocsin.stream_rules.custom.checking import load_apart
from tocsin.stream_rules.custom.loading import Loaded
from tocsin.stream_rules.instances import RuleSpec, rule_specs

NO_FILE: Final = "defaults"
"""What the configuration is called where there is no file."""

_AUTO: Final = "auto"


@dataclass(frozen=True, slots=True)
class Told:
    """What is done about the issues of one rule instance.

    Attributes:
        match: labels a run must have, each with its patterns.
        actions: `stop` and receivers, in the file's order.
    """

    rule: str
    match: Mapping[str, Sequence[str]]
    actions: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holds:
    """What a configuration without problems means, flags left aside.

    Attributes:
        bus_origin: who decided the bus: environment, file or default.
        secrets: name → where its value comes from.
        told: the instances with an action list of their own.
        stopping: instances without one whose critical issues stop their run.
        budget: what capture may cost, as a percentage of the step time.
        captured: the collections, each with its schedule while training, or its modes, in words.
    """

    bus: str
    bus_origin: str
    labels: Mapping[str, str]
    secrets: Mapping[str, str]
    rules_on: Sequence[str]
    rules_off: Sequence[str]
    receivers: Mapping[str, str]
    told: Sequence[Told]
    stopping: Sequence[str]
    budget: str
    captured: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One configuration that was looked at.

    Attributes:
        problems: nothing starts with them.
        warnings: it works, though hardly as meant.
        notes: what is not as it must be on the machine where it will be used.
        holds: None when there are problems.
    """

    source: str
    text: str
    problems: Sequence[Problem]
    warnings: Sequence[Problem] = ()
    notes: Sequence[str] = ()
    holds: Holds | None = None


def check_files(files: Sequence[Path], environ: Mapping[str, str], folder: Path) -> list[Checked]:
    """Check each file; without any, the one that holds in this folder. Reads files: may block.

    Raises:
        ConfigurationError: a file cannot be read, or a variable of the environment is wrong.
    """
    found = list(files) or [path for path in [config_path(None, environ, folder=folder)] if path]
    if not found:
        config = Config()
        return [Checked(source=NO_FILE, text="", problems=(), holds=holds(config, environ))]
    return [check_file(path, environ, folder) for path in found]


def check_file(path: Path, environ: Mapping[str, str], folder: Path) -> Checked:
    """Check one file. Raises as `check_files` does."""
    text = read_config(folder / path)
    customs = Loaded()

    def load(entries: Sequence[RuleEntry]) -> Iterable[Finding]:
        nonlocal customs
        customs = load_apart(entries, folder=(folder / path).parent)
        return customs.findings

    config, problems = check_config(text, str(path), section_registry(load))
    if config is None:
        return Checked(source=str(path), text=text, problems=problems)
    return Checked(
        source=str(path),
        text=text,
        problems=(),
        warnings=_warnings(config, text, str(path), customs.specs),
        notes=_missing_secrets(config, environ, (folder / path).parent),
        holds=holds(config, environ, customs=customs.specs),
    )


def holds(
    config: Config, environ: Mapping[str, str], *, customs: Mapping[str, RuleSpec] | None = None
) -> Holds:
    """What a configuration means with this environment, with the custom rules loaded. Pure.

    Raises:
        ConfigurationError: `TOCSIN_BUS` or `TOCSIN_LABELS` is wrong.
    """
    settings = resolve_settings(config, environ)
    specs = rule_specs(config.rules, defaults=config.defaults.rules, customs=customs)
    entries = {entry.name: entry for entry in config.rules if entry.actions is not None}
    on = [spec.name for spec in specs]
    capture = capture_settings(config.capture.model_dump_json())
    return Holds(
        bus=settings.bus.url,
        bus_origin=settings.bus_origin,
        labels=settings.labels,
        secrets={
            name: f"file {source.file}" if source.file else f"variable {source.env}"
            for name, source in config.secrets.items()
        },
        rules_on=on,
        rules_off=[name for name in built_in().names() if name not in on],
        receivers={name: receiver.type for name, receiver in config.receivers.items()},
        told=[_told(entries[name]) for name in on if name in entries],
        stopping=[spec.name for spec in specs if spec.name not in entries and _stops(spec)],
        budget=format_percent(capture.budget),
        captured={name: _schedules(capture.plans[name]) for name in capture.collections},
    )


def as_text(checked: Checked) -> str:
    """For people: each problem with its line and a caret, or a summary."""
    lines = split_lines(checked.text)
    out = [_with_code(problem).render(lines) for problem in checked.problems]
    out += [_with_code(warning, "warning: ").render(lines) for warning in checked.warnings]
    out += [f"{checked.source}: note: {note}" for note in checked.notes]
    count = len(checked.problems)
    if count:
        out.append(f"{checked.source}: {count:,} problem{'s' if count > 1 else ''}")
    if checked.holds is not None:
        good = f"{checked.source}: no problems"
        out.append("no file: the defaults hold" if checked.source == NO_FILE else good)
        out += [f"  {line}" for line in _summary(checked.holds)]
    return "\n".join(out)


def as_json(all_checked: Iterable[Checked]) -> str:
    """For programs: one JSON object with `version` and `files`. No line of a file is in it."""
    files = [
        {
            "file": checked.source,
            "ok": not checked.problems,
            "problems": [_problem(problem) for problem in checked.problems],
            "warnings": [_problem(warning) for warning in checked.warnings],
            "notes": list(checked.notes),
            "holds": None if checked.holds is None else asdict(checked.holds),
        }
        for checked in all_checked
    ]
    return json.dumps({"version": 1, "files": files}, indent=2, ensure_ascii=False)


def _told(entry: RuleEntry) -> Told:
    actions = [action.receiver or action.kind for action in entry.actions or ()]
    return Told(entry.name, entry.match, actions)


def _stops(spec: RuleSpec) -> bool:
    return spec.rule.meta.stop_worthy and spec.severity in (None, "critical")


def _schedules(plan: CollectionPlan) -> str:
    """When a collection is summarised, in words; `auto` where that is left to the budget."""
    found = []
    for mode, schedule in plan.schedules.items():
        # That losses are captured in evaluations, too, is no news.
        if schedule is None or (schedule == Schedule() and mode != "train" and plan.of == "losses"):
            continue
        words = [] if mode == "train" else [f"in {mode}"]
        one, more = ("batch", "batches") if plan.counts_batches(mode) else ("step", "steps")
        if schedule.every is not None:
            each = schedule.every == 1
            words.append(f"each {one}" if each else f"every {schedule.every:,} {more}")
        if schedule.start:
            words.append(f"from {one} {schedule.start:,}")
        if schedule.end is not None:
            words.append(f"until {one} {schedule.end:,}")
        if schedule.steps:
            words.append(f"at {len(schedule.steps):,} {more if len(schedule.steps) > 1 else one}")
        found.append(" ".join(words) or _AUTO)
    return " and ".join(found)


def _summary(holds: Holds) -> Iterator[str]:
    def row(label: str, value: str) -> str:
        return f"{label:<11}{value}"

    yield row("bus", f"{holds.bus} ({_origin(holds.bus_origin, 'TOCSIN_BUS')})")
    if holds.labels:
        yield row("labels", ", ".join(f"{key}={value}" for key, value in holds.labels.items()))
    if holds.secrets:
        yield row("secrets", ", ".join(f"{name} ({at})" for name, at in holds.secrets.items()))
    counted = [("on", holds.rules_on), ("off", holds.rules_off)]
    rules = [f"{len(names)} {what}: {', '.join(names)}" for what, names in counted if names]
    yield row("rules", "; ".join(rules))
    captured = [
        name if when == _AUTO else f"{name} {when}" for name, when in holds.captured.items()
    ]
    yield row("capture", f"{holds.budget} of the step time: {', '.join(captured) or 'nothing'}")
    receivers = ", ".join(f"{name} ({kind})" for name, kind in holds.receivers.items())
    yield row("receivers", receivers or "none; `tocsin run --notify` adds one for a run")
    for told in holds.told:
        match = ", ".join(f"{key}={'|'.join(some)}" for key, some in told.match.items())
        where = f" (runs with {match})" if match else ""
        yield row("told", f"{told.rule}{where}: {', '.join(told.actions) or 'nothing'}")
    others = "all others" if holds.told else "all rules"
    if len(holds.told) < len(holds.rules_on):
        yield row("told", f"{others}: the terminal of the run")
    if holds.stopping:
        yield row("stops", f"critical issues of {', '.join(holds.stopping)} stop their run")


def _origin(origin: str, variable: str) -> str:
    return f"the variable {variable}" if origin == "environment" else f"the {origin}"


def _with_code(problem: Problem, before: str = "") -> Problem:
    return replace(problem, message=f"{before}{problem.message} [{problem.code}]")


def _problem(problem: Problem) -> Mapping[str, object]:
    shown = ("line", "column", "code", "message", "hint")
    return {key: getattr(problem, key) for key in shown}


def _missing_secrets(config: Config, environ: Mapping[str, str], folder: Path) -> Sequence[str]:
    """Secrets that are not on this machine: where the file is only checked, that is no mistake."""
    try:
        resolve_secrets(config, environ, folder=folder)
    except SecretUnavailable as error:
        return str(error).splitlines()
    return ()


def _warnings(
    config: Config, text: str, source: str, customs: Mapping[str, RuleSpec]
) -> Sequence[Problem]:
    document = load(text, source=source)

    def warning(loc: Loc, code: str, message: str, hint: str | None) -> Problem:
        line, column = document.position(loc, at="key")
        return Problem(source, line, column, code, message, hint)

    found = []
    named = {action.receiver for rule in config.rules for action in rule.actions or ()}
    for name in config.receivers:
        if name not in named:
            message = f"nothing is sent to the receiver {name!r}: no rule names it"
            hint = f"rules: [nonfinite: [stop, {name}]]"
            found.append(warning(("receivers", name), "unused_receiver", message, hint))
    if not rule_specs(config.rules, defaults=config.defaults.rules, customs=customs):
        message = "no rule is on: nothing is watched"
        found.append(warning(("defaults", "rules"), "no_rules", message, "rules: all"))
    return hide_lines(document, found)
