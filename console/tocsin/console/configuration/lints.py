"""What works in a configuration, though hardly as meant: the warnings of `tocsin check`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from tocsin.actions.receivers.registry import ReceiverKinds
from tocsin.actions.targets.registry import TargetKinds
from tocsin.emitter.plan.settings import capture_settings
from tocsin.schemas.configuration.file import Config
from tocsin.schemas.configuration.problems import Loc, PlacedProblem, Problem
from tocsin.schemas.configuration.redaction import hide_lines
from tocsin.schemas.configuration.sections import ActionEntry, StopOptions
from tocsin.schemas.configuration.sources import Sources
from tocsin.schemas.configuration.values import format_duration
from tocsin.stream_rules.engine.configured_rules import RuleSpec, rule_specs


def warnings_of(
    config: Config, sources: Sources, customs: Mapping[str, RuleSpec]
) -> Sequence[PlacedProblem]:
    """The warnings about a configuration without problems, with the custom rules loaded. Pure."""

    def warning(loc: Loc, code: str, message: str, hint: str | None) -> PlacedProblem:
        return sources.placed(Problem(loc, message, code, hint, at="key"))

    found = []
    named = {action.receiver for rule in config.rules for action in rule.actions or ()}
    named |= {name for route in config.routes for name, _ in route.named()}
    options = (action.options for rule in config.rules for action in rule.actions or ())
    named |= {one.approve.via for one in options if one is not None}
    for name in config.receivers:
        if name not in named:
            message = f"nothing is sent to the receiver {name!r}: no rule or route names it"
            hint = f"rules: [nonfinite: [stop, {name}]]"
            found.append(warning(("receivers", name), "unused_receiver", message, hint))
    specs = rule_specs(config.rules, defaults=config.defaults.rules, customs=customs)
    for action, rule, collections in _stops_without_input(config, specs):
        message = f"{rule!r} never stops a run: {' and '.join(collections)} are not captured"
        hint = f"capture: {{collections: {{{collections[0]}: {{every: 10}}}}}}"
        found.append(warning(action.loc, "stop_without_input", message, hint))
    for action, via in _questions(config):
        loc = (*action.loc, "stop", "approve", "via")
        message = f"{via!r} cannot show an approval request"
        hint = "a receiver of the type email or chat"
        found.append(warning(loc, "question_not_shown", message, hint))
    permitted = {name for entry in config.policy for name, _ in entry.named()}
    for name in config.targets:
        if name not in permitted:
            message = f"the target {name!r} ends no job: no entry of 'policy' names it"
            hint = f"policy: [{{match: {{team: vision}}, may_stop_on: [{name}]}}]"
            found.append(warning(("targets", name), "unused_target", message, hint))
    kinds = TargetKinds()
    for name, target in config.targets.items():
        found += map(sources.placed, kinds.kind_of(target).warnings(target, ("targets", name)))
    for stop, loc, name in _too_patient(config, permitted):
        given = format_duration(config.targets[name].grace)
        message = (
            f"a grace of {format_duration(stop.grace)}, but target {name!r} gives only {given}"
        )
        found.append(warning(loc, "grace_of_target", message, f"grace: {given}"))
    if not specs:
        message = "no rule is enabled: nothing is checked"
        found.append(warning(("defaults", "rules"), "no_rules", message, "rules: all"))
    return hide_lines(sources, found)


def _stops_without_input(
    config: Config, specs: Iterable[RuleSpec]
) -> Iterator[tuple[ActionEntry, str, Sequence[str]]]:
    """Stop actions of rules that read only collections which the configuration switches off."""
    captured = set(capture_settings(config.capture.model_dump_json()).collections)
    off = set(capture_settings(Config().capture.model_dump_json()).collections) - captured
    by_name = {spec.name: spec for spec in specs if not spec.custom}
    for entry in config.rules:
        spec = by_name.get(entry.name)
        inputs = [one for one in spec.rule.meta.inputs if not one.optional] if spec else []
        if not inputs or any(one.kind != "tensors" or one.pattern not in off for one in inputs):
            continue
        for action in entry.actions or ():
            if action.kind == "stop":
                yield action, entry.name, sorted({one.pattern for one in inputs})


def _questions(config: Config) -> Iterator[tuple[ActionEntry, str]]:
    """Stops that people are to approve, and receivers that do not show them the question."""
    kinds = ReceiverKinds()
    for entry in config.rules:
        for action in entry.actions or ():
            via = None if action.options is None else action.options.approve.via
            if via is not None:
                receiver = config.receivers[via]
                if not kinds.kind_of(receiver).shows_question(receiver):
                    yield action, via


def _too_patient(
    config: Config, permitted: Collection[str]
) -> Iterator[tuple[StopOptions, Loc, str]]:
    """Stops with a grace that a backend which may have to end the job does not give."""
    for entry in config.rules:
        for action in entry.actions or ():
            options = action.options
            if options is None or "grace" not in options.model_fields_set:
                continue
            for name in sorted(permitted):
                if config.targets[name].grace < options.grace:
                    yield options, (*action.loc, "stop", "grace"), name
