"""The configuration file: read, checked as a whole, and put beside flags and environment.

`schemas` knows the outer shape. Each service registers a validator for its own section, so that
one pass over a file finds everything: YAML, shape, rule parameters, references.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final, Literal, TypeVar

from pydantic import Field

from tocsin.schemas.configuration.capture import CaptureConfig, parse_capture
from tocsin.schemas.configuration.entries import (
    parse_entries,
    parse_labels,
    parse_receivers,
    parse_rules,
    parse_secrets,
    parse_targets,
    parse_time_windows,
)
from tocsin.schemas.configuration.heartbeat import HeartbeatConfig
from tocsin.schemas.configuration.kinds import KindModels
from tocsin.schemas.configuration.policy import LimitsConfig, PolicyEntry
from tocsin.schemas.configuration.problems import (
    ConfigProblems,
    PlacedProblem,
    Problem,
    did_you_mean,
    quoted,
)
from tocsin.schemas.configuration.public_url import PublicUrl, read_public_url
from tocsin.schemas.configuration.receivers import ReceiverConfig
from tocsin.schemas.configuration.redaction import hide_lines
from tocsin.schemas.configuration.references import NamedParts, named_twice
from tocsin.schemas.configuration.routing.inhibitions import InhibitEntry, inhibit_problems
from tocsin.schemas.configuration.routing.routes import RouteEntry, route_problems
from tocsin.schemas.configuration.routing.silences import SilenceEntry, silence_problems
from tocsin.schemas.configuration.routing.time_windows import TimeWindow
from tocsin.schemas.configuration.sections import (
    CUSTOM_USE,
    BusConfig,
    DefaultsConfig,
    PricesConfig,
    RuleEntry,
    SecretSource,
    Section,
    StopTrust,
)
from tocsin.schemas.configuration.sources import (
    CONFIG_VARIABLE,
    DEFAULT_FILE,
    Sources,
    config_path,
    folder_of,
    read_files,
    why_config_shared,
)
from tocsin.schemas.configuration.store import StoreConfig, store_section
from tocsin.schemas.configuration.targets import TargetConfig
from tocsin.schemas.configuration.validation import parse_model
from tocsin.schemas.configuration.yaml_document import MAX_PROBLEMS, Plain, kind_of
from tocsin.schemas.errors import ConfigurationError, TocsinError
from tocsin.schemas.process.private_folders import others_own

MAX_SECTION_PROBLEMS: Final = 1_000
"""What services find in a file, at most: a hint on each of 10,000 rules takes seconds."""

SectionName = Literal[
    "bus",
    "labels",
    "secrets",
    "capture",
    "defaults",
    "receivers",
    "targets",
    "time_windows",
    "rules",
    "routes",
    "inhibit",
    "silences",
    "stop",
    "store",
]
SectionT = TypeVar("SectionT", bound=Section)


class Config(Section):
    """A whole configuration. `Config()` is what holds without a file."""

    version: Literal[1] = Field(default=1, examples=[1])
    """Version of the file's format."""
    bus: BusConfig = Field(default_factory=BusConfig, examples=["embedded:.tocsin/bus.db"])
    """The bus: its URL, or a mapping."""
    labels: Mapping[str, str] = Field(default_factory=dict, examples=[{"env": "prod"}])
    """Labels of each run; `TOCSIN_LABELS` and `--label` add to them."""
    secrets: Mapping[str, SecretSource] = Field(
        default_factory=dict, examples=[{"hook": {"env": "HOOK_KEY"}}]
    )
    """Secrets by name; elsewhere `{secret: NAME}` refers to them."""
    capture: CaptureConfig = Field(default_factory=CaptureConfig)
    """What the training process records."""
    defaults: DefaultsConfig = Field(default_factory=DefaultsConfig)
    """Defaults for rules without their own settings."""
    receivers: Mapping[str, ReceiverConfig] = Field(default_factory=dict)
    """Receivers of issues, by name."""
    targets: Mapping[str, TargetConfig] = Field(default_factory=dict)
    """Backends that can end a job, by name; `policy` lists which runs each may stop."""
    time_windows: Mapping[str, TimeWindow] = Field(default_factory=dict)
    """Hours of the week by name, for routes and receivers."""
    rules: tuple[RuleEntry, ...] = ()
    """Rules with their actions; rules that are not listed follow `defaults.rules`."""
    routes: tuple[RouteEntry, ...] = ()
    """Who is notified of the issues of rules without an action list, or with `by_route` in it."""
    inhibit: tuple[InhibitEntry, ...] = ()
    """Issues that explain others, which then notify nobody."""
    silences: tuple[SilenceEntry, ...] = ()
    """Known issues: nobody is notified of them for some time."""
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    """How much tocsin may stop by itself."""
    public_url: PublicUrl | None = Field(default=None, examples=["https://tocsin.example.com"])
    """Where people reach `tocsin actions --http`: messages then have a link for answers."""
    page_url: PublicUrl | None = Field(default=None, examples=["https://runs.example.com"])
    """Where people reach the live page (`tocsin serve`): messages link the page of their issue."""
    policy: tuple[PolicyEntry, ...] = ()
    """Which backends may end the jobs of which runs. Absent: none."""
    prices: PricesConfig = Field(default_factory=PricesConfig)
    """What devices cost, for estimates of what stops save."""
    heartbeat: HeartbeatConfig | None = None
    """Where workers and runs report that they still work. Absent: nowhere."""
    stop: StopTrust = Field(default_factory=StopTrust)
    """Public keys whose stop commands a training obeys."""
    store: StoreConfig = Field(default_factory=StoreConfig, examples=["off", "s3://ml-runs/tocsin"])
    """Parquet files of runs: `off`, a URL, or a mapping."""


SectionValidator = Callable[[Config], Iterable[Problem]]
"""Checks one section of a configuration. Called once per check, with all that could be read (broken
entries are left out and noted already); gives problems, raises nothing, does no I/O."""


class DuplicateSection(TocsinError):
    """Two validators were registered for one section of the configuration."""


class SectionRegistry:
    """Who checks which section. Built by whoever puts the services together.

    Args:
        receivers: the models of the kinds of receivers; without them, as in a training process,
            only what all kinds have is read of each receiver.
        targets: likewise, of stop targets.
    """

    def __init__(
        self,
        receivers: KindModels[ReceiverConfig] | None = None,
        targets: KindModels[TargetConfig] | None = None,
    ) -> None:
        self.receivers = receivers
        self.targets = targets
        self._validators: dict[SectionName, SectionValidator] = {}

    def register(self, name: SectionName, validator: SectionValidator) -> None:
        """Let `validator` check the section `name`.

        Raises:
            DuplicateSection: somebody does already.
        """
        if name in self._validators:
            raise DuplicateSection(f"the section {name!r} has a validator already")
        self._validators[name] = validator

    def problems(self, config: Config) -> Iterator[Problem]:
        """What all validators find."""
        for validator in self._validators.values():
            yield from validator(config)


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration and where it came from.

    Attributes:
        path: the file or folder, or None for the defaults.
        folder: where its relative paths start.
        shared: why others can write to the file, if they can.
    """

    config: Config
    path: Path | None
    folder: Path
    shared: str | None = None

    def locate(self, path: Path) -> Path:
        """A path of the file as it is meant."""
        return self.folder / path


def load_config(
    path: Path | None,
    env: Mapping[str, str],
    *,
    registry: SectionRegistry | None = None,
    folder: Path | None = None,
) -> LoadedConfig:
    """The configuration: `path`, else `TOCSIN_CONFIG`, else `./tocsin.yaml`, else defaults.

    Args:
        path: the value of `--config`, a file or a folder of them.
        env: the environment.
        registry: who checks which section; without it only the outer shape is checked.
        folder: the working folder.

    Raises:
        ConfigProblems: the file has problems; all of them are in the error.
        ConfigurationError: the file is not there or cannot be read; or nobody named it, it is
            another user's, and it names secrets, receivers, or whose stops are obeyed.
    """
    folder = folder or Path.cwd()
    implicit = path is None and not env.get(CONFIG_VARIABLE)
    path = config_path(path, env, folder=folder)
    if path is None:
        return LoadedConfig(Config(), None, folder)
    texts = read_files(path, folder=folder)
    shared = why_config_shared(folder / path)
    config, problems = check_sources(Sources.from_texts(texts), registry, shared=shared)
    if config is None:
        raise ConfigProblems(problems, texts)
    if implicit and shared is not None and others_own(folder / path):
        _refuse_foreign(config, shared)
    return LoadedConfig(config, folder / path, folder_of(folder / path), shared)


def shared_config(why: str) -> str:
    """The warning about a file that others can write to; `why` as in `LoadedConfig.shared`."""
    return (
        f"{why}: they can change where your runs' messages go and what stops the runs; "
        "run `chmod go-w` on it"
    )


def _refuse_foreign(config: Config, shared: str) -> None:
    named = [
        *(["secrets"] if any(s.file is not None for s in config.secrets.values()) else []),
        *(["receivers"] if config.receivers else []),
        *(["targets"] if config.targets else []),
        *(["heartbeat"] if config.heartbeat else []),
        *(["public_url"] if config.public_url else []),
        *(["store.url"] if config.store.url else []),
        *(["capture.full_tensors.url"] if config.capture.full_tensors.url else []),
        *(["page_url"] if config.page_url else []),
        *(["stop.trusted_keys"] if config.stop.trusted_keys else []),
    ]
    if named:
        raise ConfigurationError(
            f"{shared}, and the file sets {' and '.join(named)}: it is not used just because it "
            f"is in the working folder; if you trust it, use `--config {DEFAULT_FILE}`, or set "
            f"{CONFIG_VARIABLE}"
        )


def check_config(
    text: str, source: str, registry: SectionRegistry | None = None, *, shared: str | None = None
) -> tuple[Config | None, list[PlacedProblem]]:
    """Check the configuration in one text, as `check_sources` does."""
    return check_sources(Sources.from_texts({source: text}), registry, shared=shared)


def check_sources(
    sources: Sources, registry: SectionRegistry | None = None, *, shared: str | None = None
) -> tuple[Config | None, list[PlacedProblem]]:
    """Check a configuration as a whole, in one pass.

    `shared` is why others can write to the file, if they can: no code that it names is run then.

    Returns:
        The configuration, or None when there are problems; and all problems, sorted by place.
    """
    if not sources.complete:
        return None, hide_lines(sources, sources.problems)
    problems: list[Problem] = []
    config = _parse(sources.data, problems, registry or SectionRegistry())
    parts = NamedParts(sources.data)
    problems.extend(parts.unknown(config.rules, config.routes, config.receivers, config.policy))
    problems.extend(named_twice(config.routes, "a route"))
    problems.extend(named_twice(config.inhibit, "an inhibition"))
    problems.extend(route_problems(config.routes))
    problems.extend(inhibit_problems(config.inhibit))
    problems.extend(silence_problems(config.silences))
    if shared is not None:
        problems.extend(_code_of_others(config, shared))
    if registry is not None:
        problems.extend(islice(registry.problems(config), MAX_SECTION_PROBLEMS))
    placed = _placed(sources, problems)
    return (None if placed else config), placed


# -- the parts of a check


def _parse(raw: Plain, problems: list[Problem], registry: SectionRegistry) -> Config:
    """What of the file can be read; what is wrong in it goes into `problems`."""
    if raw is None:
        return Config()
    if not isinstance(raw, dict):
        problems.append(Problem((), f"expected a mapping, got {kind_of(raw)}", hint="version: 1"))
        return Config()
    for key in raw:
        if key not in Config.model_fields:
            of_defaults = key in DefaultsConfig.model_fields
            near = None if of_defaults else did_you_mean(key, Config.model_fields)
            hint = f"defaults: {{{key}: …}}" if of_defaults else near
            message = f"unknown section {quoted(key)}"
            # It may be a section of secrets whose name was mistyped.
            problems.append(
                Problem((key,), message, "unknown_key", hint, at="key", hide_value=True)
            )
    version = raw.get("version")
    if "version" not in raw:
        problems.append(Problem((), "the key 'version' is missing", "missing_key", "version: 1"))
    elif version != 1 or version is True:
        message = "expected version 1, the only one that this release reads"
        problems.append(Problem(("version",), message, "version", "version: 1"))
    bus = raw.get("bus")
    if isinstance(bus, str):
        bus = {"url": bus}
    given: dict[str, object] = {
        "bus": _section(BusConfig, bus, "bus", problems),
        "labels": parse_labels(raw.get("labels"), problems),
        "secrets": parse_secrets(raw.get("secrets"), problems),
        "capture": parse_capture(raw.get("capture"), ("capture",), problems),
        "defaults": _section(DefaultsConfig, raw.get("defaults"), "defaults", problems),
        "receivers": parse_receivers(raw.get("receivers"), problems, registry.receivers),
        "targets": parse_targets(raw.get("targets"), problems, registry.targets),
        "time_windows": parse_time_windows(raw.get("time_windows"), problems),
        "rules": parse_rules(raw.get("rules"), problems),
        "routes": parse_entries(RouteEntry, raw.get("routes"), "routes", problems),
        "inhibit": parse_entries(InhibitEntry, raw.get("inhibit"), "inhibit", problems),
        "silences": parse_entries(SilenceEntry, raw.get("silences"), "silences", problems),
        "limits": _section(LimitsConfig, raw.get("limits"), "limits", problems),
        "public_url": read_public_url(raw.get("public_url"), "public_url", problems),
        "page_url": read_public_url(raw.get("page_url"), "page_url", problems),
        "policy": parse_entries(PolicyEntry, raw.get("policy"), "policy", problems),
        "prices": _section(PricesConfig, raw.get("prices"), "prices", problems),
        "heartbeat": _optional(HeartbeatConfig, raw.get("heartbeat"), "heartbeat", problems),
        "stop": _section(StopTrust, raw.get("stop"), "stop", problems),
        "store": _section(StoreConfig, store_section(raw.get("store")), "store", problems),
    }
    return Config.model_validate({key: value for key, value in given.items() if key in raw})


def _section(model: type[SectionT], raw: Plain, name: str, problems: list[Problem]) -> SectionT:
    """A section as its model; its defaults when it is empty or wrong."""
    return parse_model(model, {} if raw is None else raw, (name,), problems) or model()


def _optional(
    model: type[SectionT], raw: Plain, name: str, problems: list[Problem]
) -> SectionT | None:
    """A section that has no defaults; None when it is empty or wrong."""
    return None if raw is None else parse_model(model, raw, (name,), problems)


def _code_of_others(config: Config, shared: str) -> Iterator[Problem]:
    for rule in config.rules:
        if CUSTOM_USE.fullmatch(rule.use):
            message = f"the rule is not loaded: {shared}, and could make it run any code"
            yield Problem(
                rule.at("use"), message, "rule_not_loaded", "make the file writable only by you"
            )


def _placed(sources: Sources, problems: Iterable[Problem]) -> list[PlacedProblem]:
    """All problems by place. Where YAML found something, what follows from it is left out.

    At most `MAX_PROBLEMS` of the problems, the first by place; one more marks where the rest
    begins.
    """
    placed = list(sources.problems)
    problems = list(dict.fromkeys(problems))
    taken = {one.place for one in placed}
    by_place = sorted(map(sources.placed, problems), key=sources.order)
    placed += [one for one in by_place[:MAX_PROBLEMS] if one.place not in taken]
    if left_out := by_place[MAX_PROBLEMS:]:
        message = "more problems follow; they are not listed"
        placed.append(
            PlacedProblem(*left_out[0].place, "too_many_problems", message, hide_value=True)
        )
    return hide_lines(sources, placed, problems)
