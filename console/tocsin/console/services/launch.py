"""`tocsin run`: from what the user gave to the options of a launch."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.console.context import CommandContext, check_custom_rules, read_context
from tocsin.console.files import check_writable
from tocsin.console.services.final_report import check_report
from tocsin.console.services.notify_addresses import KeptAddresses
from tocsin.emitter.launch.helper import DRAIN_S
from tocsin.emitter.launch.helper_child import helper_command, helper_words
from tocsin.emitter.launch.options import LaunchOptions
from tocsin.emitter.process.identity import launch_job_id, resolve_run_id, restart_count
from tocsin.emitter.stop.before_update_policy import BeforeUpdatePolicy, before_update_policy
from tocsin.schemas.configuration.file import Config
from tocsin.schemas.configuration.store import capture_json
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.ids import incarnation_id, new_id
from tocsin.schemas.key_folder import keys_folder, own_key
from tocsin.schemas.monotonic_clock import unix_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What is on the command line before `--`."""

    config: Path | None = None
    bus: str | None = None
    run_id: str | None = None
    labels: Sequence[str] = ()
    notify: Sequence[str] = ()
    allow_command: Sequence[str] = ()
    summary: Path | None = None
    report: Path | None = None
    stop: bool = True
    drain_s: float = DRAIN_S
    require_bus: bool = False
    quiet: bool = False

    @property
    def again(self) -> tuple[str, ...]:
        """The options with which another command, in the same folder, finds the same bus."""
        config = () if self.config is None else ("--config", str(self.config))
        return (*config, *(() if self.bus is None else ("--bus", self.bus)))


def launch_options(
    command: Sequence[str], options: RunOptions, environ: Mapping[str, str] | None = None
) -> LaunchOptions:
    """Read the configuration and say how the job is to be started. Starts nothing.

    Raises:
        ConfigurationError: a flag, the configuration or a secret is wrong.
    """
    env = os.environ if environ is None else environ
    if not command:
        raise ConfigurationError(
            "no command: expected one after the options, for example: tocsin run -- python train.py"
        )
    context = read_context(options.config, options.bus, labels=options.labels, environ=env)
    if options.notify and not context.embedded:
        raise ConfigurationError(
            "--notify: on Kafka the action workers send the notices; name a receiver in the "
            "configuration that `tocsin actions` reads, or use an embedded bus"
        )
    if options.allow_command and not context.embedded:
        raise ConfigurationError(
            "--allow-command: on Kafka the action workers run commands; give it to `tocsin actions`"
        )
    _check_receivers(context, options, env)
    if context.embedded:
        check_custom_rules(context)
    check_writable(options.summary, "--summary", "summary.json")
    if options.report is not None:
        check_report(options.report)
    run_id = resolve_run_id(options.run_id, env)
    job_id = launch_job_id(env)
    incarnation = incarnation_id(run_id, job_id, restart_count(env), 0)
    # Made here for what may be wrong with it, and for its URL as any process here can use it.
    bus = context.open_bus()
    keep = log = None
    if isinstance(bus, EmbeddedBus):
        log = bus.path.parent / f"helper-{run_id}.log"
    if options.notify and isinstance(bus, EmbeddedBus):
        keep = KeptAddresses(bus.path, new_id(), tuple(options.notify))
    if context.embedded and options.stop:
        _have_a_key(env)
    config = context.config
    trusted = config.stop.trusted_keys or ()
    before_update = before_update_policy(config, context.settings.labels)
    words = _helper_words(context, options, run_id, bus.url, incarnation)
    return LaunchOptions(
        command=tuple(command),
        run_id=run_id,
        job_id=job_id,
        bus_url=bus.url,
        bus_prefix=context.topics.prefix,
        open_bus=context.open_bus,
        config=context.loaded.path,
        labels=context.settings.labels,
        capture=capture_json(config.capture, context.settings.store, context.loaded.folder),
        stop=options.stop,
        pin=None if config.stop.pin == "off" else config.stop.pin,
        hold=config.stop.on_restart == "hold",
        before_update=before_update.checkpoint,
        trusted_keys=tuple(context.loaded.locate(path) for path in trusted),
        drain_s=options.drain_s,
        quiet=options.quiet,
        summary=options.summary,
        require_bus=options.require_bus,
        again=options.again,
        warnings=_warnings(context, before_update),
        kept=keep,
        prices=config.prices,
        helper_log=log,
        helper=helper_command(words) if context.embedded else (),
        serve=partial(_serve, context, words) if context.embedded else None,
    )


def _warnings(context: CommandContext, before_update: BeforeUpdatePolicy) -> tuple[str, ...]:
    """Lines for the start of the run."""
    without_effect = () if context.embedded else _without_effect(context)
    why_not = before_update.why_not
    unguarded = (f"stop.before_update has no effect: {why_not}",) if why_not else ()
    return (*context.warnings, *without_effect, *unguarded)


def _without_effect(context: CommandContext) -> tuple[str, ...]:
    """Lines about sections of the file that a run on Kafka does not read."""
    config, defaults = context.config, Config()
    sections = ("rules", "receivers", "defaults")
    given = [name for name in sections if getattr(config, name) != getattr(defaults, name)]
    if not given:
        return ()
    return (
        f"{context.loaded.path}: {', '.join(given)} have no effect here: on Kafka the "
        "configuration of `tocsin rules` and `tocsin actions` decides",
    )


def _check_receivers(context: CommandContext, options: RunOptions, env: Mapping[str, str]) -> None:
    """Whether notices can be sent and targets asked, as far as that is known before anything is.

    Raises:
        ConfigurationError: a receiver or an address of `--notify` cannot be used.
        MissingExtra: what it, or a target, needs is not installed.
    """
    if context.embedded and context.config.heartbeat is not None:
        from tocsin.console.services.heartbeat import target_of

        target_of(context)
    if context.embedded and context.config.targets:
        from tocsin.actions.targets.build import check_installed
        from tocsin.actions.targets.registry import TargetKinds

        check_installed(context.config.targets, TargetKinds())
    if not options.notify and not (context.embedded and context.config.receivers):
        return
    # Only who notifies somebody pays for this.
    from tocsin.actions.receivers.address_guard import AddressGuard
    from tocsin.actions.receivers.build import check_usable
    from tocsin.actions.receivers.email.config import EmailReceiver
    from tocsin.actions.receivers.email.smtp_server import SMTP_VARIABLE, server_of_environment
    from tocsin.actions.receivers.kind import ReceiverContext
    from tocsin.actions.receivers.notify_option import parse_addresses
    from tocsin.actions.receivers.registry import ReceiverKinds

    named = {name: address.config for name, address in parse_addresses(options.notify).items()}
    if context.embedded:
        receiver_context = ReceiverContext(
            secrets=context.all_secrets(),
            guard=AddressGuard(private=True),
            folder=context.loaded.folder,
            environ=env,
            commands=frozenset(options.allow_command),
        )
        check_usable({**context.config.receivers, **named}, receiver_context, ReceiverKinds())
    for config in named.values():
        if isinstance(config, EmailReceiver) and not env.get(SMTP_VARIABLE):
            server = server_of_environment(env)
            # Said now rather than in a log, a day later, when the mail did not come.
            if not _answers(server.host, server.port):
                raise ConfigurationError(
                    f"--notify mailto:{','.join(config.to)}: no reply{server.advice}"
                )


def _answers(host: str, port: int) -> bool:
    """Whether somebody listens there. May block for a second."""
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False


def _serve(context: CommandContext, words: Sequence[str]) -> int:
    """What the command line of the helper does, in a process that was forked for it."""
    from tocsin.console.services.helper import main

    return main(words, context)


def _helper_words(
    context: CommandContext, options: RunOptions, run_id: str, url: str, incarnation: str
) -> tuple[str, ...]:
    """The order for the helper process that serves this run on the embedded bus."""
    # Everything of this job comes later than now; the bus may hold days of other runs.
    now_ms = unix_ms()
    words = helper_words(
        run_id,
        url,
        since_ms=now_ms,
        config=context.loaded.path,
        stop=options.stop,
        incarnation=incarnation,
    )
    notify = (word for address in options.notify for word in ("--notify", address))
    allow = (word for path in options.allow_command for word in ("--allow-command", path))
    return (*words, *notify, *allow)


def _have_a_key(env: Mapping[str, str]) -> None:
    """On the embedded bus this machine signs and obeys; it needs a key pair for that."""
    # Without one the run is watched anyway; the launcher says that stops will be refused.
    with contextlib.suppress(ConfigurationError):
        own_key(keys_folder(env))
