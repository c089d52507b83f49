"""From the configuration's rules to the instances that a run gets."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from typing import Literal

from pydantic import ValidationError

from tocsin.schemas.configuration.file import Config, SectionValidator
from tocsin.schemas.configuration.problems import Problem, did_you_mean
from tocsin.schemas.configuration.sections import CUSTOM_USE, RuleEntry
from tocsin.schemas.configuration.validation import problems_of_model
from tocsin.schemas.errors import ConfigurationError
from tocsin.stream_rules.catalogue import RuleCatalogue, UnknownRule, built_in
from tocsin.stream_rules.engine.rule_spec import CUSTOM_GROUP as CUSTOM_GROUP
from tocsin.stream_rules.engine.rule_spec import RuleSpec as RuleSpec
from tocsin.stream_rules.rule import AnyRule, InstanceFacts


def rule_specs(
    entries: Sequence[RuleEntry] = (),
    *,
    defaults: Literal["all", "none"] = "all",
    catalogue: RuleCatalogue | None = None,
    customs: Mapping[str, RuleSpec] | None = None,
) -> tuple[RuleSpec, ...]:
    """The instances of a configuration: the listed ones, then the others at their defaults.

    An entry with a name of its own stands beside the default instance of its rule.

    Args:
        customs: the instances of the entries that name custom rules, by name, as they were loaded
            (`custom.loading`). Without it, such entries are left out.

    Raises:
        ConfigurationError: an entry names no rule, or its parameters are wrong (`rule_problems`
            says the same with places).
    """
    catalogue = catalogue or built_in()
    problems = list(_problems(entries, catalogue))
    if problems:
        raise ConfigurationError("; ".join(problem.message for problem in problems))
    specs: dict[str, RuleSpec] = {}
    off: set[str] = set()
    custom = _CustomRules(catalogue)
    for entry in entries:
        if entry in custom:
            if customs and entry.name in customs:
                specs[entry.name] = customs[entry.name]
            continue
        rule = catalogue.get(entry.use)
        name = rule.meta.name if entry.name == entry.use else entry.name
        if entry.off:
            off.add(name)
            continue
        specs[name] = RuleSpec(
            name=name,
            rule=rule,
            params=rule.meta.params.model_validate(_parameters(rule, entry)),
            severity=entry.severity,
            match=entry.match,
            listed=True,
        )
    if defaults == "all":
        for rule in catalogue:
            name = rule.meta.name
            if rule.meta.by_default and name not in specs and name not in off:
                specs[name] = RuleSpec(name=name, rule=rule, params=rule.meta.params())
    return _beside(specs.values())


def specs_at_runtime(
    running: Sequence[RuleSpec],
    old: Config,
    new: Config,
    catalogue: RuleCatalogue | None = None,
) -> tuple[tuple[RuleSpec, ...], tuple[str, ...]]:
    """What a running worker makes of a new configuration: its instances, and which rules stay.

    Custom rules are loaded when a worker starts, and records of other runs are read from then on:
    such instances stay as they are, whatever the new configuration has. The names are of those for
    which it differs.

    Raises:
        ConfigurationError: as `rule_specs` does.
    """
    known = {spec.name: spec for spec in running}
    custom = {spec.name: spec for spec in running if spec.custom}
    before = {entry.name: entry for entry in custom_entries(old.rules, catalogue)}
    after = {entry.name: entry for entry in custom_entries(new.rules, catalogue)}
    later = {
        name for name in {**before, **after} if _meaning(before, name) != _meaning(after, name)
    }
    specs = {
        spec.name: spec
        for spec in rule_specs(new.rules, defaults=new.defaults.rules, catalogue=catalogue)
    }
    for name, spec in list(specs.items()):
        earlier = known.get(name)
        if _others(spec) != (_others(earlier) if earlier else ()):
            later.add(name)
            del specs[name]
            if earlier is not None:
                specs[name] = earlier
    return _beside({**specs, **custom}.values()), tuple(sorted(later))


def _meaning(entries: Mapping[str, RuleEntry], name: str) -> object:
    """The part of an entry about its rule: its actions are not the rules' business."""
    entry = entries.get(name)
    return entry and entry.model_dump(exclude={"actions"})


def _others(spec: RuleSpec) -> Collection[str]:
    return () if spec.custom else tuple(spec.build().other_runs())


def with_own_names(config: Config, catalogue: RuleCatalogue | None = None) -> Config:
    """The configuration with each alias replaced by the rule's own name, as in issues."""
    known = catalogue or built_in()
    custom = _CustomRules(known)

    def renamed(entry: RuleEntry) -> RuleEntry:
        if entry in custom:
            return entry
        own = known.get(entry.use).meta.name
        name = own if entry.name == entry.use else entry.name
        return entry.model_copy(update={"name": name, "use": own})

    return config.model_copy(update={"rules": tuple(renamed(entry) for entry in config.rules)})


def custom_entries(
    entries: Iterable[RuleEntry], catalogue: RuleCatalogue | None = None
) -> tuple[RuleEntry, ...]:
    """The entries that name a custom rule, or one of a package."""
    custom = _CustomRules(catalogue or built_in())
    return tuple(entry for entry in entries if not entry.off and entry in custom)


def rule_problems(
    catalogue: RuleCatalogue | None = None,
    *,
    load: Callable[[Sequence[RuleEntry]], Iterable[Problem]] | None = None,
) -> SectionValidator:
    """The validator of the section `rules`, for `SectionRegistry.register("rules", …)`.

    `load` tries whether custom rules can be loaded, which runs them: it is for those who will.
    """
    known = catalogue or built_in()

    def validate(config: Config) -> Iterable[Problem]:
        yield from _problems(config.rules, known)
        yield from _unmatched_names(config, known)
        customs = custom_entries(config.rules, known)
        if load is not None and customs:
            yield from load(customs)

    return validate


def _problems(entries: Iterable[RuleEntry], catalogue: RuleCatalogue) -> Iterator[Problem]:
    seen: set[str] = set()
    names = frozenset((*catalogue.names(), *catalogue.aliases()))
    custom = _CustomRules(catalogue)
    for entry in entries:
        if entry in custom:
            if entry.name in seen or entry.name in names:
                message = f"there is a rule {entry.name!r} already: give this one another name"
                yield Problem(entry.at("use"), message, "duplicate_rule", at="key")
            seen.add(entry.name)
            continue
        try:
            rule = catalogue.get(entry.use)
        except UnknownRule:
            hint = did_you_mean(entry.use, names)
            at: Literal["key", "value"] = "key" if entry.short else "value"
            message = f"unknown rule {entry.use!r}"
            yield Problem(entry.at("use"), message, "unknown_rule", hint, at=at)
            continue
        # An alias and the rule's own name are one instance; the loader has seen equal names.
        name = rule.meta.name if entry.name == entry.use else entry.name
        if name in seen:
            message = f"the rule {name!r} is listed already"
            yield Problem(entry.at("use"), message, "duplicate_rule", at="key")
        elif name in names and catalogue.get(name).meta.name != rule.meta.name:
            # It would take the place of that rule, which would be off without a word.
            message = f"there is a rule {name!r} already, another one than {entry.use!r}"
            yield Problem(
                entry.at("use"), message, "duplicate_rule", "give this one another name", at="key"
            )
        seen.add(name)
        model = rule.meta.params
        presets = rule.meta.presets
        if entry.preset is not None and entry.preset not in presets:
            has = f"it has {', '.join(sorted(presets))}" if presets else "it has none: leave it out"
            message = f"the rule {name!r} has no preset {entry.preset!r}"
            yield Problem(entry.at("preset"), message, "unknown_preset", has)
            entry = entry.model_copy(update={"preset": None})
        try:
            model.model_validate(_parameters(rule, entry))
        except ValidationError as error:
            yield from problems_of_model(error, model, entry.at("params"))


def _unmatched_names(config: Config, catalogue: RuleCatalogue) -> Iterator[Problem]:
    """Names in the matches of routes, silences and inhibitions that no issue's rule can have."""
    # Issues have the rule's own name, where the file has an alias.
    own = {*catalogue.names(), *(entry.name for entry in config.rules)} - {*catalogue.aliases()}
    for entry in (*config.routes, *config.inhibit, *config.silences):
        for key in entry.MATCHES:
            for index, name in enumerate(getattr(entry, key).get("rule", ())):
                if name in own or set("*?[") & set(name):
                    continue
                hint = did_you_mean(name, own)
                if name in catalogue.aliases():
                    hint = catalogue.get(name).meta.name
                loc = (*entry.loc, key, "rule", index)
                yield Problem(loc, f"unknown rule {name!r}", "unknown_rule", hint)


class _CustomRules:
    """Tells which entries name a rule that does not come with tocsin, and that there may be.

    Of packages only the names are read that they offer, once: that looks at all that is installed.
    """

    def __init__(self, catalogue: RuleCatalogue) -> None:
        self._catalogue = catalogue

    def __contains__(self, entry: RuleEntry) -> bool:
        if CUSTOM_USE.fullmatch(entry.use):
            return True
        return entry.use not in self._catalogue and entry.use in self._offered

    @functools.cached_property
    def _offered(self) -> frozenset[str]:
        return frozenset(point.name for point in entry_points(group=CUSTOM_GROUP))


def _parameters(rule: type[AnyRule], entry: RuleEntry) -> dict[str, object]:
    """The parameters of the entry, over those of its preset."""
    preset = rule.meta.presets[entry.preset] if entry.preset is not None else {}
    return {**preset, **entry.params}


def _beside(specs: Iterable[RuleSpec]) -> tuple[RuleSpec, ...]:
    listed = tuple(specs)
    instances = tuple(
        InstanceFacts(
            name=spec.name,
            inputs=spec.rule.meta.inputs,
            capture_hint=spec.rule.meta.capture_hint,
            listed=spec.listed,
            available=spec.rule.meta.available,
            match=spec.match,
        )
        for spec in listed
    )
    return tuple(replace(spec, instances=instances) for spec in listed)
