"""`tocsin rules`, `actions` and `archive`: the worker of a service, run until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Final, TypeVar

from tocsin.actions.composition import build_actions_service
from tocsin.actions.delivery.service import ActionsService
from tocsin.actions.receivers.address_guard import AddressGuard, parse_networks
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import Bus, Outgoing
from tocsin.console.context import CommandContext, check_custom_rules
from tocsin.console.links.server import LinkPages
from tocsin.console.services.attached_reports import AttachedReports
from tocsin.console.services.heartbeat import Heartbeat, sender_name, target_of
from tocsin.console.services.notify_addresses import kept_addresses
from tocsin.console.services.reload import (
    ActionsReload,
    ArchiveReload,
    ConfigurationWatch,
    Prepare,
    RulesReload,
    reload_signal,
)
from tocsin.emitter.stop.verification import read_keys
from tocsin.runtime.heap import rare_collections
from tocsin.runtime.http import HttpEndpoints, Pages, service_metrics
from tocsin.runtime.metrics import Metrics
from tocsin.runtime.service import Service
from tocsin.runtime.shutdown import Part, serve, stop_signals
from tocsin.runtime.testing import CrashPoints
from tocsin.runtime.watchdog import Watchdog
from tocsin.runtime.worker import Worker, WorkerSettings
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.key_folder import keys_folder, own_key
from tocsin.schemas.signing import TrustedKeys
from tocsin.store.manifest import FAMILIES
from tocsin.stream_rules.service import RulesService, build_rules_service

logger = logging.getLogger(__name__)

ServiceT = TypeVar("ServiceT", bound=Service)

SOFTWARE: Final = f"tocsin {version('tocsin')}"


UPLOAD_S: Final = 600.0
"""An archive worker hangs that has not ended a round for so long: a round may write to a bucket."""


def run_lease(run_id: str) -> str:
    """The lease that a run's own helper holds on an embedded bus; others leave such a run be."""
    return f"run/{run_id}"


def trusted_keys(context: CommandContext) -> Callable[[], TrustedKeys]:
    """Reads the keys of those whose silences count."""
    return lambda: read_keys(context.trusted_paths(os.environ))


async def run_rules(
    context: CommandContext,
    *,
    allow_cidr: Sequence[str] = (),
    http: str | None = None,
    member: str | None = None,
    standby_bytes: int = 0,
) -> int:
    """Telemetry in, issues out, until SIGTERM or SIGINT. The exit code.

    `member` is the worker's name in its group, where it has one that survives a restart.
    `standby_bytes`: how much it keeps, on Kafka, of the states of other workers' runs.

    Raises:
        ConfigurationError: a custom rule cannot be loaded, or a CIDR is wrong.
    """

    check_custom_rules(context)

    def build(bus: Bus, metrics: Metrics, crash: CrashPoints) -> RulesService:
        return build_rules_service(
            context.topics, context.config, folder=context.loaded.folder, metrics=metrics
        )

    def reload(worker: Worker, service: RulesService) -> Prepare:
        return RulesReload(worker, service, context).prepare

    group = f"{context.topics.prefix}-rules"
    return await _run(
        context,
        build,
        reload,
        group=group,
        allow_cidr=allow_cidr,
        http=http,
        member=member,
        # On an embedded bus the other workers are the helpers of runs, whose states are followed.
        standby_bytes=0 if context.embedded else standby_bytes,
    )


async def run_actions(
    context: CommandContext,
    *,
    allow_cidr: Sequence[str] = (),
    allow_command: Sequence[str] = (),
    http: str | None = None,
    member: str | None = None,
) -> int:
    """Issues in, notices and stops out, until SIGTERM or SIGINT. The exit code.

    On an embedded bus it is this machine's own: it may reach private addresses, and goes on with
    the notices that runs of `--notify` have left.

    Raises:
        ConfigurationError: a CIDR is wrong, or the signing key cannot be made.
    """

    secrets = context.all_secrets()

    def build(bus: Bus, metrics: Metrics, crash: CrashPoints) -> ActionsService:
        kept = partial(kept_addresses, bus.path) if isinstance(bus, EmbeddedBus) else None
        return build_actions_service(
            context.topics,
            context.config,
            bus=bus,
            secrets=secrets,
            key=own_key(keys_folder(os.environ)),
            embedded=context.embedded,
            kept_addresses=kept,
            allow_cidr=allow_cidr,
            allow_command=allow_command,
            config_path=context.loaded.path,
            metrics=metrics,
            trusted=trusted_keys(context),
            links=True,
            report=AttachedReports(bus.url, context.loaded.path).make,
            software=SOFTWARE,
            crash=crash,
        )

    def reload(worker: Worker, service: ActionsService) -> Prepare:
        return ActionsReload(worker, service).prepare

    def pages(bus: Bus, service: ActionsService, metrics: Metrics) -> Pages:
        return LinkPages(
            bus,
            context.topics,
            public_url=lambda: service.public_url,
            trusted=trusted_keys(context),
            environ=os.environ,
            metrics=metrics,
        ).add_to

    if context.config.public_url is not None and http is None:
        logger.warning(
            "messages have links to %s, which this worker does not serve: it has no --http",
            context.config.public_url,
            extra={"action": "start"},
        )
    group = f"{context.topics.prefix}-actions"
    return await _run(
        context,
        build,
        reload,
        group=group,
        allow_cidr=allow_cidr,
        http=http,
        member=member,
        pages=pages,
    )


async def run_archive(context: CommandContext, *, http: str | None = None) -> int:
    """Telemetry and what was found in it into files, until SIGTERM or SIGINT. The exit code.

    On an embedded bus it archives runs that a helper archives, too: the manifest of a run keeps the
    two apart, so nothing is there twice.

    Raises:
        ConfigurationError: the store cannot be used.
        MissingExtra: the extra `store` is not installed.
    """
    from tocsin.store.archive.service import ArchiveService, FlushPolicy, check_store
    from tocsin.store.archive.upkeep import Upkeep
    from tocsin.store.configured import keep_of

    store = context.open_store()
    await asyncio.to_thread(check_store, store)
    for line in context.warnings:
        logger.warning("%s", line, extra={"action": "start"})
    guard = AddressGuard(private=context.embedded)
    group = f"{context.topics.prefix}-archive"
    metrics = service_metrics(group, software=SOFTWARE, served=http is not None, environ=os.environ)
    crash = CrashPoints.from_environment(os.environ)
    every_ms = round(context.settings.store.every.total_seconds() * 1000)
    stopping = asyncio.Event()
    with stop_signals(stopping), reload_signal() as reloading:
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(asyncio.to_thread, metrics.close)
            bus = await _connected(stack, context, stopping)
            if bus is None:
                return 0
            upkeep = Upkeep(
                store, topics=context.topics, keep=keep_of(context.settings.store), crash=crash
            )
            services = [
                ArchiveService(
                    store,
                    family,
                    topics=context.topics,
                    upkeep=upkeep,
                    policy=FlushPolicy(every_ms=every_ms),
                    metrics=metrics,
                    crash=crash,
                )
                for family in FAMILIES
            ]
            workers = [
                Worker(
                    bus,
                    service,
                    topics=context.topics,
                    group=f"{context.topics.prefix}-{service.name}",
                    metrics=metrics,
                    settings=WorkerSettings(software=SOFTWARE),
                    crash=crash,
                )
                for service in services
            ]
            heartbeat = Heartbeat(
                target_of(context),
                sender=sender_name("archive", http),
                service="archive",
                workers=workers,
                guard=guard,
                is_over=stopping.is_set,
                software=SOFTWARE,
                metrics=metrics,
            )
            watch = ConfigurationWatch(
                context,
                prepare=[ArchiveReload(upkeep, context).prepare, heartbeat.prepare],
                # An archive writes nothing on the bus.
                bus=None,
                service="archive",
                metrics=metrics,
            )
            watchdogs = [Watchdog(partial(_alive_ms, one), hangs_s=UPLOAD_S) for one in workers]
            parts: list[Part] = [*watchdogs, watch, *workers, heartbeat]
            if http is not None:
                host, port = http_address(http)
                ready = [worker.ready.is_set for worker in workers]
                parts.append(HttpEndpoints(host, port, metrics, ready))
            logger.info("archiving %s into %s", bus.url, store.url, extra={"action": "start"})
            upkeep.start()
            reloading.hand_to(watch)
            return await serve(parts, stopping)


async def _run(
    context: CommandContext,
    build: Callable[[Bus, Metrics, CrashPoints], ServiceT],
    reload: Callable[[Worker, ServiceT], Prepare],
    *,
    group: str,
    allow_cidr: Sequence[str],
    http: str | None,
    member: str | None,
    standby_bytes: int = 0,
    pages: Callable[[Bus, ServiceT, Metrics], Pages] | None = None,
) -> int:
    guard = AddressGuard(private=context.embedded, allow=parse_networks(allow_cidr))
    target = target_of(context)
    for line in context.warnings:
        logger.warning("%s", line, extra={"action": "start"})
    metrics = service_metrics(group, software=SOFTWARE, served=http is not None, environ=os.environ)
    crash = CrashPoints.from_environment(os.environ)
    stopping = asyncio.Event()
    with stop_signals(stopping), reload_signal() as reloading:
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(asyncio.to_thread, metrics.close)
            bus = await _connected(stack, context, stopping)
            if bus is None:
                return 0
            service = build(bus, metrics, crash)
            worker = Worker(
                bus,
                service,
                topics=context.topics,
                group=group,
                member=member,
                skip=_held_by_its_helper(bus) if context.embedded else None,
                metrics=metrics,
                settings=WorkerSettings(software=SOFTWARE, standby_bytes=standby_bytes),
                crash=crash,
            )
            heartbeat = Heartbeat(
                target,
                sender=sender_name(service.name, http),
                service=service.name,
                workers=[worker],
                guard=guard,
                is_over=stopping.is_set,
                software=SOFTWARE,
                metrics=metrics,
            )
            watch = ConfigurationWatch(
                context,
                prepare=[reload(worker, service), heartbeat.prepare],
                bus=bus,
                service=service.name,
                metrics=metrics,
            )
            watchdog = Watchdog(
                partial(_alive_ms, worker),
                last_words=partial(_write_last_words, service, context.open_bus),
            )
            parts: list[Part] = [watchdog, watch, worker, heartbeat]
            if http is not None:
                host, port = http_address(http)
                own = None if pages is None else pages(bus, service, metrics)
                parts.append(HttpEndpoints(host, port, metrics, [worker.ready.is_set], pages=own))
            logger.info("working on %s as %s", bus.url, group, extra={"action": "start"})
            reloading.hand_to(watch)
            with rare_collections():
                return await serve(parts, stopping)


def _alive_ms(worker: Worker) -> int | None:
    return worker.alive_ms


def _write_last_words(service: Service, open_bus: Callable[[], Bus]) -> None:
    """In a thread of the watchdog: the event loop may hang, so the bus is opened once more."""

    async def write(words: Sequence[Outgoing]) -> None:
        async with open_bus() as bus:
            producer = await bus.producer()
            await producer.publish(words)
            await producer.close()

    try:
        if words := service.last_words():
            asyncio.run(write(words))
    except Exception:
        # Whatever it is: the process ends.
        logger.exception("last words not written", extra={"action": "watchdog"})


async def _connected(
    stack: contextlib.AsyncExitStack, context: CommandContext, stopping: asyncio.Event
) -> Bus | None:
    """The bus, entered; None if `stopping` was set before brokers answered."""
    if context.embedded:
        bus = await stack.enter_async_context(context.open_bus())
        await bus.init(context.topics.specs())
        return bus
    # Here, since it needs the extra of Kafka.
    from tocsin.console.services.broker_connection import connect

    return await connect(stack, context.open_bus, stopping)


def _held_by_its_helper(bus: Bus) -> Callable[[str], Awaitable[bool]]:
    async def skip(run_id: str) -> bool:
        return await bus.leased(run_lease(run_id))

    return skip


def http_address(text: str) -> tuple[str, int]:
    """What `--http` says. Raises ConfigurationError: it is no HOST:PORT."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 <= int(port) <= 65_535:
        raise ConfigurationError(f"--http {text}: expected HOST:PORT, for example 127.0.0.1:9464")
    return host.strip("[]"), int(port)
