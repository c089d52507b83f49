"""What flags, environment and file give to a command: read once, at its start."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tocsin.bus.configured import open_configured_bus
from tocsin.bus.port import Bus
from tocsin.schemas.configuration.file import (
    Config,
    LoadedConfig,
    SectionRegistry,
    SectionValidator,
    check_sources,
    load_config,
    shared_config,
)
from tocsin.schemas.configuration.problems import ConfigProblems, Problem
from tocsin.schemas.configuration.sections import RuleEntry
from tocsin.schemas.configuration.settings import (
    Secrets,
    Settings,
    resolve_secrets,
    resolve_settings,
)
from tocsin.schemas.configuration.sources import CONFIG_VARIABLE, Sources, read_files
from tocsin.schemas.topics import Topics

if TYPE_CHECKING:
    from tocsin.store.catalog import Store


@dataclass(frozen=True, slots=True)
class CommandContext:
    """A validated configuration, what was laid over it, and the secrets' values."""

    loaded: LoadedConfig
    settings: Settings
    secrets: Secrets
    read_again: Callable[[], CommandContext] = field(compare=False, repr=False)
    """Reads flags, environment and file once more; raises as `read_context` does."""

    @property
    def config(self) -> Config:
        """What the file says, or the defaults."""
        return self.loaded.config

    def all_secrets(self) -> Secrets:
        """The secrets, for who delivers. Raises SecretUnavailable: some are missing here."""
        self.secrets.require_all()
        return self.secrets

    @property
    def topics(self) -> Topics:
        """The topic names of the bus's prefix."""
        return Topics(self.settings.bus.prefix)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know before anything begins."""
        return () if self.loaded.shared is None else (shared_config(self.loaded.shared),)

    @property
    def embedded(self) -> bool:
        """Whether the bus is a file."""
        return self.settings.bus.url.startswith("embedded:")

    def trusted_paths(self, environ: Mapping[str, str]) -> list[Path]:
        """Files and folders of the keys whose commands count."""
        from tocsin.emitter.stop.verification import trusted_paths

        configured = self.config.stop.trusted_keys or ()
        return trusted_paths(environ, tuple(map(self.loaded.locate, configured)))

    def open_store(self) -> Store:
        """The store; whether runs are to be archived there is `settings.store.enabled`.

        Raises:
            UnusableStore: its URL is wrong. MissingExtra: a bucket without the extra `store`.
        """
        from tocsin.store.configured import configured_store

        folder = self.loaded.folder if self.settings.store_origin == "file" else Path.cwd()
        bus = self.open_bus(create=False)
        return configured_store(
            self.settings.store, folder=folder, bus_file=getattr(bus, "path", None)
        )

    def open_bus(self, *, create: bool = True) -> Bus:
        """The bus, still to be entered. Raises UnusableBus, MissingExtra."""
        explicit = self.settings.bus_origin != "default"
        # A path in the file is meant from the file's folder; a flag's or variable's from here.
        folder = self.loaded.folder if self.settings.bus_origin == "file" else Path.cwd()
        return open_configured_bus(
            self.settings.bus, self.secrets, folder=folder, explicit=explicit, create=create
        )


def read_context(
    config: Path | None,
    bus: str | None,
    *,
    labels: Sequence[str] = (),
    store: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> CommandContext:
    """Read and check the configuration, with all services' own checks.

    Raises:
        ConfigProblems: the file has problems; all are in the error.
        ConfigurationError: a flag, a variable or a secret is wrong.
    """
    env = os.environ if environ is None else environ
    loaded = read_configuration(config, environ=env)
    settings = resolve_settings(loaded.config, env, bus=bus, labels=labels, store=store)
    secrets = resolve_secrets(loaded.config, env, folder=loaded.folder)
    # The file that was found: without it another one, or none, would count.
    found = loaded.path or config
    again = partial(read_context, found, bus, labels=labels, store=store, environ=environ)
    return CommandContext(loaded, settings, secrets, again)


def read_viewing_context(
    config: Path | None, bus: str | None, store: str | None = None
) -> CommandContext:
    """What a command needs that only shows what is on the bus.

    Problems of a file that nobody named do not keep anybody from looking: the defaults count then,
    and a line on stderr reports that.

    Raises:
        ConfigProblems: the file that was named has problems.
        ConfigurationError: a flag, a variable or a secret is wrong.
    """
    try:
        return read_context(config, bus, store=store)
    except ConfigProblems as error:
        if config is not None or os.environ.get(CONFIG_VARIABLE):
            raise
        settings = resolve_settings(Config(), os.environ, bus=bus, store=store)
        count = len(error.problems)
        print(
            f"tocsin: the configuration here has {count} problem{'s' if count > 1 else ''} "
            f"(`tocsin check`); reading {settings.bus.url}, --bus names another",
            file=sys.stderr,
        )
    loaded = LoadedConfig(Config(), None, Path.cwd())
    return CommandContext(
        loaded, settings, Secrets({}), partial(read_viewing_context, config, bus, store=store)
    )


def read_configuration(
    config: Path | None, *, environ: Mapping[str, str] | None = None
) -> LoadedConfig:
    """Read and check the configuration alone, without its secrets' values.

    Raises:
        ConfigProblems: the file has problems; all are in the error.
        ConfigurationError: the file cannot be read, or is not to be trusted.
    """
    env = os.environ if environ is None else environ
    loaded = load_config(config, env, registry=section_registry())
    if not loaded.config.rules:
        return loaded
    from tocsin.stream_rules.engine.configured_rules import with_own_names

    return replace(loaded, config=with_own_names(loaded.config))


def check_custom_rules(context: CommandContext) -> None:
    """Load the custom rules of the configuration, in a process of their own that ends with it.

    For who is going to run them: it runs their code. It blocks for half a second, and may for half
    a minute; without custom rules not at all.

    Raises:
        ConfigProblems: one cannot be loaded, or its parameters are wrong.
    """
    from tocsin.stream_rules.custom.host import load_apart
    from tocsin.stream_rules.engine.configured_rules import custom_entries

    path = context.loaded.path
    customs = custom_entries(context.config.rules)
    if not customs or path is None:
        return
    loaded = load_apart(customs, folder=context.loaded.folder)
    if loaded.problems:
        texts = read_files(path)
        registry = section_registry(lambda _: loaded.problems)
        _, problems = check_sources(Sources.from_texts(texts), registry)
        raise ConfigProblems(problems, texts)


def section_registry(
    load: Callable[[Sequence[RuleEntry]], Iterable[Problem]] | None = None,
) -> SectionRegistry:
    """All services' checks of their own sections.

    `load` says what is wrong with custom rules; without it they are not loaded.
    """
    # What the services import is not paid by who reads no configuration.
    from tocsin.actions.config import (
        receiver_problems,
        repeat_problems,
        target_problems,
        window_problems,
    )
    from tocsin.actions.receivers.registry import ReceiverKinds
    from tocsin.actions.targets.registry import TargetKinds
    from tocsin.store.config import store_problems

    receivers, targets = ReceiverKinds(), TargetKinds()
    registry = SectionRegistry(receivers, targets)
    registry.register("receivers", receiver_problems(receivers))
    registry.register("targets", target_problems(targets))
    registry.register("time_windows", window_problems)
    registry.register("defaults", repeat_problems)
    registry.register("store", store_problems)
    registry.register("rules", _rule_validator(load))
    return registry


def _rule_validator(
    load: Callable[[Sequence[RuleEntry]], Iterable[Problem]] | None,
) -> SectionValidator:
    """`rule_problems`, for a configuration that names a rule. The rules take half of the time of a
    short command to import."""

    def validate(config: Config) -> Iterable[Problem]:
        if not (config.rules or config.routes or config.inhibit or config.silences):
            return ()
        from tocsin.stream_rules.engine.configured_rules import rule_problems

        return rule_problems(load=load)(config)

    return validate
