"""`tocsin check`: all that is wrong with a configuration, or the settings in effect."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from tocsin.console.configuration.lints import warnings_of
from tocsin.console.context import section_registry
from tocsin.emitter.plan.collections import CollectionPlan, Schedule
from tocsin.emitter.plan.settings import capture_settings
from tocsin.emitter.stop.verification import STOP_KEYS
from tocsin.schemas.configuration.file import Config, check_sources, shared_config
from tocsin.schemas.configuration.problems import PlacedProblem, Problem, split_lines
from tocsin.schemas.configuration.routing.routes import RouteEntry
from tocsin.schemas.configuration.sections import ActionEntry, RuleEntry, StopMode
from tocsin.schemas.configuration.settings import missing_secrets, resolve_settings
from tocsin.schemas.configuration.sources import (
    Sources,
    config_path,
    folder_of,
    read_files,
    why_config_shared,
)
from tocsin.schemas.configuration.values import format_percent
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.issues import SEVERITIES, Severity
from tocsin.schemas.signing import TrustedKeys
from tocsin.stream_rules.catalogue import built_in
from tocsin.stream_rules.custom.host import load_apart
from tocsin.stream_rules.custom.loading import Loaded
from tocsin.stream_rules.engine.configured_rules import RuleSpec, rule_specs, with_own_names

NO_FILE: Final = "defaults"
"""What the configuration is called where there is no file."""

_TERMINAL: Final = "the terminal of the run"
_AUTO: Final = "auto"

_EFFECTS: Final[Mapping[StopMode, str]] = {
    "enforce": "stop their run",
    "ask": "stop their run when people approve (mode: ask)",
    "shadow": "are recorded, and stop nothing (mode: shadow)",
}
_SHORT: Final = 10
"""How many rules are named where nobody has asked for the names."""


@dataclass(frozen=True, slots=True)
class RuleActions:
    """What is done about the issues of one rule instance.

    Attributes:
        match: labels a run must have, each with its patterns.
        actions: `stop` and receivers, in the file's order.
        stops_at: the severity from which an issue stops its run; None if none does.
    """

    rule: str
    match: Mapping[str, Sequence[str]]
    actions: Sequence[str]
    stops_at: Severity | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveConfig:
    """What a configuration without problems means, flags left aside.

    Attributes:
        bus_origin: who decided the bus: environment, file or default.
        secrets: name → where its value comes from.
        rule_actions: the instances with an action list of their own.
        stopping: instances without one whose critical issues stop their run.
        mode: what becomes of stops without a mode of their own.
        before_update: whether a run leaves before an update that would write NaN.
        routes: whom each route notifies of what, in words.
        targets: name → kind.
        policy: which runs' jobs each entry lets targets end, in words.
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
    rule_actions: Sequence[RuleActions]
    stopping: Sequence[str]
    mode: StopMode
    before_update: bool
    routes: Sequence[str]
    targets: Mapping[str, str]
    policy: Sequence[str]
    budget: str
    captured: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One configuration that was looked at.

    Attributes:
        texts: its files by name.
        problems: nothing starts with them.
        warnings: it works, though hardly as meant.
        notes: what is not as it must be on the machine where it will be used.
        effective: None when there are problems.
    """

    source: str
    texts: Mapping[str, str]
    problems: Sequence[PlacedProblem]
    warnings: Sequence[PlacedProblem] = ()
    notes: Sequence[str] = ()
    effective: EffectiveConfig | None = None


def check_files(files: Sequence[Path], environ: Mapping[str, str], folder: Path) -> list[Checked]:
    """Check each file or folder; without any, the one in effect in this folder. May block.

    Raises:
        ConfigurationError: a file cannot be read, or a variable of the environment is wrong.
    """
    found = list(files) or [path for path in [config_path(None, environ, folder=folder)] if path]
    if not found:
        config = Config()
        return [
            Checked(
                source=NO_FILE, texts={}, problems=(), effective=effective_config(config, environ)
            )
        ]
    return [check_file(path, environ, folder, here=not files) for path in found]


def check_file(
    path: Path, environ: Mapping[str, str], folder: Path, *, here: bool = False
) -> Checked:
    """Check one file, or a folder of them. Raises as `check_files` does.

    `here` says that it is to be used here: secrets and keys that are not on this machine are
    problems then, else notes.
    """
    texts = read_files(path, folder=folder)
    sources = Sources.from_texts(texts)
    customs = Loaded()
    shared = why_config_shared(folder / path)
    base = folder_of(folder / path)

    def load(entries: Sequence[RuleEntry]) -> Iterable[Problem]:
        nonlocal customs
        if shared is not None:
            return ()
        customs = load_apart(entries, folder=base)
        return customs.problems

    registry = section_registry(load)
    if here:
        registry.register("secrets", lambda config: _missing_secrets(config, environ, base))
        registry.register("stop", lambda config: _missing_keys(config, environ, base))
    config, problems = check_sources(sources, registry, shared=shared)
    if config is None:
        return Checked(source=str(path), texts=texts, problems=problems)
    # As services do: what follows goes by the names of rules.
    config = with_own_names(config)
    notes = [] if shared is None else [shared_config(shared)]
    if not here:
        missing = [*_missing_secrets(config, environ, base), *_missing_keys(config, environ, base)]
        notes += [problem.message for problem in missing]
    return Checked(
        source=str(path),
        texts=texts,
        problems=(),
        warnings=warnings_of(config, sources, customs.specs),
        notes=notes,
        effective=effective_config(config, environ, customs=customs.specs),
    )


def effective_config(
    config: Config, environ: Mapping[str, str], *, customs: Mapping[str, RuleSpec] | None = None
) -> EffectiveConfig:
    """What a configuration means with this environment, with the custom rules loaded. Pure.

    Raises:
        ConfigurationError: `TOCSIN_BUS` or `TOCSIN_LABELS` is wrong.
    """
    settings = resolve_settings(config, environ)
    specs = rule_specs(config.rules, defaults=config.defaults.rules, customs=customs)
    entries = {entry.name: entry for entry in config.rules if entry.actions is not None}
    on = [spec.name for spec in specs]
    capture = capture_settings(config.capture.model_dump_json())
    return EffectiveConfig(
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
        rule_actions=[
            _rule_actions(entries[spec.name], spec) for spec in specs if spec.name in entries
        ],
        stopping=[spec.name for spec in specs if spec.name not in entries and _stops(spec)],
        mode=config.defaults.mode,
        before_update=config.stop.before_update,
        routes=[_route(route) for route in config.routes],
        targets={name: target.type for name, target in config.targets.items()},
        policy=[
            f"{_labels(entry.match) or 'every run'}: {', '.join(entry.may_stop_on)}"
            for entry in config.policy
        ],
        budget=format_percent(capture.budget),
        captured={name: _schedules(capture.plans[name]) for name in capture.collections},
    )


def as_text(checked: Checked, *, verbose: bool = False) -> str:
    """For people: each problem with its line and a caret, or a summary; verbose names all rules."""
    lines = {source: split_lines(text) for source, text in checked.texts.items()}
    out = [_with_code(one).render(lines.get(one.source, ())) for one in checked.problems]
    out += [
        _with_code(one, "warning: ").render(lines.get(one.source, ())) for one in checked.warnings
    ]
    out += [f"{checked.source}: note: {note}" for note in checked.notes]
    count = len(checked.problems)
    if count:
        out.append(f"{checked.source}: {count:,} problem{'s' if count > 1 else ''}")
    if checked.effective is not None:
        good = f"{checked.source}: no problems"
        if checked.notes:
            good += " in the file; whether it can be used here, the notes say"
        out.append("no file: the defaults apply" if checked.source == NO_FILE else good)
        out += [f"  {line}" for line in _summary(checked.effective, verbose=verbose)]
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
            "effective": None if checked.effective is None else asdict(checked.effective),
        }
        for checked in all_checked
    ]
    return json.dumps({"version": 1, "files": files}, indent=2, ensure_ascii=False)


def _rule_actions(entry: RuleEntry, spec: RuleSpec) -> RuleActions:
    actions = [action.receiver or action.kind for action in entry.actions or ()]
    stop = next((action for action in entry.actions or () if action.kind == "stop"), None)
    return RuleActions(entry.name, entry.match, actions, _stops_at(stop, spec) if stop else None)


def _route(route: RouteEntry) -> str:
    match = _labels(route.match)
    notified = "; ".join(
        f"{severity}: {', '.join(names) or 'nobody'}" for severity, names in route.notify.items()
    )
    also = " (and the next routes)" if route.also else ""
    return f"{route.name or match or 'all'}: {notified}{also}"


def _labels(match: Mapping[str, Sequence[str]]) -> str:
    return ", ".join(f"{key}={'|'.join(some)}" for key, some in match.items())


def _stops_at(stop: ActionEntry, spec: RuleSpec) -> Severity:
    if stop.options is not None and stop.options.at is not None:
        return stop.options.at
    # Of a rule that may stop by itself only what is worth it counts; those issues are critical.
    return spec.severity or ("critical" if spec.rule.meta.stop_worthy else SEVERITIES[0])


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


def _summary(effective: EffectiveConfig, *, verbose: bool) -> Iterator[str]:
    def row(label: str, value: str) -> str:
        return f"{label:<11}{value}"

    yield row("bus", f"{effective.bus} ({_origin(effective.bus_origin, 'TOCSIN_BUS')})")
    if effective.labels:
        yield row("labels", ", ".join(f"{key}={value}" for key, value in effective.labels.items()))
    if effective.secrets:
        yield row("secrets", ", ".join(f"{name} ({at})" for name, at in effective.secrets.items()))
    yield row("rules", "; ".join(_rules(effective, verbose=verbose)))
    captured = [
        name if when == _AUTO else f"{name} {when}" for name, when in effective.captured.items()
    ]
    yield row("capture", f"{effective.budget} of the step time: {', '.join(captured) or 'nothing'}")
    receivers = ", ".join(f"{name} ({kind})" for name, kind in effective.receivers.items())
    yield row("receivers", receivers or "none; `tocsin run --notify` adds one for a run")
    for each in effective.rule_actions:
        match = _labels(each.match)
        where = f" (runs with {match})" if match else ""
        actions = [
            f"stop at {each.stops_at}" if action == "stop" else action for action in each.actions
        ]
        yield row("actions", f"{each.rule}{where}: {', '.join(actions) or 'nothing'}")
    others = "all others" if effective.rule_actions else "all rules"
    if len(effective.rule_actions) < len(effective.rules_on):
        yield row("actions", f"{others}: {'by the routes' if effective.routes else _TERMINAL}")
    for route in effective.routes:
        yield row("route", route)
    if effective.targets:
        targets = ", ".join(f"{name} ({kind})" for name, kind in effective.targets.items())
        yield row("targets", targets)
        yield row("policy", "; ".join(effective.policy) or "no job is ended by them")
    if effective.stopping:
        names = ", ".join(effective.stopping)
        also = "also " if any(each.stops_at for each in effective.rule_actions) else ""
        yield row("stops", f"{also}critical issues of {names} {_EFFECTS[effective.mode]}")
    if effective.before_update:
        yield row("stops", "before an update that would write NaN or Inf (stop.before_update)")


def _rules(effective: EffectiveConfig, *, verbose: bool) -> Iterator[str]:
    """How many are on and off. A short list is named whole, of a longer one what differs from the
    defaults; verbose names all."""
    usual = {rule.meta.name for rule in built_in() if rule.meta.by_default}
    counted = {"on": effective.rules_on, "off": effective.rules_off}
    for what, names in counted.items():
        other = [name for name in names if (name in usual) == (what == "off")]
        named = names if verbose or len(names) <= _SHORT else other if len(other) <= _SHORT else ()
        if names:
            among = "among them " if len(named) < len(names) else ""
            yield f"{len(names)} {what}" + (f": {among}{', '.join(named)}" if named else "")


def _origin(origin: str, variable: str) -> str:
    return f"the variable {variable}" if origin == "environment" else f"the {origin}"


def _with_code(problem: PlacedProblem, before: str = "") -> PlacedProblem:
    return replace(problem, message=f"{before}{problem.message} [{problem.code}]")


def _problem(problem: PlacedProblem) -> Mapping[str, object]:
    shown = ("line", "column", "code", "message", "hint")
    return {"file": problem.source} | {key: getattr(problem, key) for key in shown}


def _missing_secrets(config: Config, environ: Mapping[str, str], folder: Path) -> Iterator[Problem]:
    """Secrets with which nothing would start on this machine."""
    for name, why in missing_secrets(config, environ, folder=folder).items():
        part = "file" if config.secrets[name].file else "env"
        # Who writes the secret itself in the place of a name should not see it again.
        yield Problem(
            ("secrets", name, part), f"secret {name!r}: {why}", "secret_missing", hide_value=True
        )


def _missing_keys(config: Config, environ: Mapping[str, str], folder: Path) -> Iterator[Problem]:
    """Paths of trusted keys without any: each stop would be refused on this machine."""
    if environ.get(STOP_KEYS):
        return
    for index, key in enumerate(config.stop.trusted_keys or ()):
        try:
            why = "" if TrustedKeys.read([folder / key]) else f"{key}: there is no public key"
        except ConfigurationError as error:
            why = str(error)
        if why:
            hint = "a file like keys/actions.pub, or a folder of such files"
            yield Problem(("stop", "trusted_keys", index), why, "no_trusted_key", hint)
