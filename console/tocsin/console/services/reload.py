"""A configuration that changes while a worker runs: taken over, or refused as a whole.

The files are looked at every two seconds, and read when they have been the same twice, since an
editor may not be done; after SIGHUP they are read at once. After a refusal, the files of secrets
that were missing are looked at, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tocsin.actions.delivery.service import ActionsService
from tocsin.bus.port import Bus, BusError, Outgoing, Partition
from tocsin.console.context import CommandContext
from tocsin.console.views.bus_view import read_refused
from tocsin.runtime import metrics as names
from tocsin.runtime.clock import Clock, SystemClock
from tocsin.runtime.metrics import Metrics
from tocsin.runtime.worker import Worker
from tocsin.schemas.configuration.problems import ConfigProblems
from tocsin.schemas.configuration.settings import missing_secrets
from tocsin.schemas.configuration.sources import config_files
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.configurations import (
    MAX_PROBLEMS,
    WORKERS_PARTITION,
    ConfigurationRefused,
)
from tocsin.schemas.records.events import Event, clip
from tocsin.schemas.records.wire import meta_of
from tocsin.schemas.topics import Topics
from tocsin.stream_rules.engine.configured_rules import specs_at_runtime
from tocsin.stream_rules.service import RulesService

if TYPE_CHECKING:
    from tocsin.store.archive.upkeep import Upkeep

logger = logging.getLogger(__name__)

POLL_S: Final = 2.0
"""Between two looks at the files."""

Stamp = tuple[tuple[object, ...], ...]

TakeOver = Callable[[], Awaitable[None]]
Prepare = Callable[[CommandContext], Awaitable[TakeOver]]
"""Makes a service ready for a configuration, in the event loop; what it returns takes it over and
must not fail. Raises ConfigurationError."""


class RulesReload:
    """Takes new rules over for the incarnations that follow."""

    def __init__(self, worker: Worker, service: RulesService, context: CommandContext) -> None:
        self._worker = worker
        self._service = service
        self._config = context.config

    async def prepare(self, context: CommandContext) -> TakeOver:
        """What takes over another configuration. Raises ConfigurationError: it cannot be used."""
        specs, later = await asyncio.to_thread(
            specs_at_runtime, self._service.specs, self._config, context.config
        )

        async def take_over() -> None:
            self._config = context.config
            await self._worker.in_thread(self._service.use, specs)
            if later:
                logger.warning(
                    "rules from files, and rules that compare runs, change at the next start of "
                    "the worker: %s",
                    ", ".join(later),
                    extra={"action": "reload"},
                )

        return take_over


class ActionsReload:
    """Takes receivers, action lists, routes, silences and inhibitions over at once."""

    def __init__(self, worker: Worker, service: ActionsService) -> None:
        self._worker = worker
        self._service = service

    async def prepare(self, context: CommandContext) -> TakeOver:
        """What takes over another configuration. Raises ConfigurationError: it cannot be used."""
        assert self._service.set_up is not None
        loaded = context.loaded
        setup = await asyncio.to_thread(
            self._service.set_up, loaded.config, context.all_secrets(), loaded.path
        )

        async def take_over() -> None:
            await self._service.use(setup, self._worker.in_thread)

        return take_over


class ArchiveReload:
    """Takes over how much the store keeps. Other settings of the store wait for the next start."""

    def __init__(self, upkeep: Upkeep, context: CommandContext) -> None:
        self._upkeep = upkeep
        self._store = context.settings.store

    async def prepare(self, context: CommandContext) -> TakeOver:
        """What takes over another configuration."""
        from tocsin.store.configured import keep_of

        store = context.settings.store

        async def take_over() -> None:
            in_use = self._store.model_copy(update={"keep": store.keep})
            if in_use != store:
                logger.warning(
                    "the section 'store' has changed: but for `keep`, that takes effect at the "
                    "next start of the worker",
                    extra={"action": "reload"},
                )
            if in_use != self._store:
                self._upkeep.use(keep_of(in_use))
            self._store = store

        return take_over


class ConfigurationWatch:
    """Runs beside a worker, as a part of its process.

    Args:
        context: as the process was started with.
        prepare: of each service of the process.
        bus: gets the record of a refusal; None: the process may not write to it.
        service: names the process, for the bus and metrics.
        run_id: the run, of its helper: refusals of earlier helpers of it, maybe of other hosts, are
            deleted. None: one of this process's name is, if there is one.
    """

    def __init__(
        self,
        context: CommandContext,
        *,
        prepare: Sequence[Prepare],
        bus: Bus | None,
        service: str,
        run_id: str | None = None,
        metrics: Metrics | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._context = context
        self._prepare = prepare
        self._bus = bus
        self._service = service
        self._worker = clip(f"{service}@{socket.gethostname()}", 300)
        self._metrics = metrics or Metrics()
        self._clock = clock or SystemClock()
        self._asked = asyncio.Event()
        self._stopping = False
        self._run_id = run_id
        self._refused = run_id is None
        self._rejected: CommandContext | None = None
        # What was read last, and what was seen last.
        self._loaded: tuple[Stamp, Stamp] = (stamp_of(context.loaded.path), ())
        self._seen: tuple[Stamp, Stamp] = self._loaded

    def ask(self) -> None:
        """Have the configuration read again now: the handler of SIGHUP."""
        self._asked.set()

    def stop(self) -> None:
        """Ask `run` to return."""
        self._stopping = True
        self._asked.set()

    async def run(self) -> None:
        """Look until `stop`."""
        self._record(ok=True)
        await self._delete_earlier()
        while not self._stopping:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._asked.wait()
            if not self._stopping:
                await self.check(requested=self._asked.is_set())
        await self._delete_refusal()

    async def check(self, *, requested: bool = False) -> None:
        """One look at the files, and what follows from it."""
        self._asked.clear()
        path = self._context.loaded.path
        seen = await asyncio.to_thread(lambda: (stamp_of(path), self._absent()))
        settled, self._seen = seen == self._seen, seen
        if requested or (settled and seen != self._loaded):
            self._loaded = seen
            await self._reload()

    def _absent(self) -> Stamp:
        """The secrets that the refused configuration waits for. May block."""
        if (context := self._rejected) is None:
            return ()
        found = missing_secrets(context.config, os.environ, folder=context.loaded.folder)
        return _awaited(context, found)

    async def _reload(self) -> None:
        self._rejected, self._loaded = None, (self._loaded[0], ())
        context = None
        try:
            context = await asyncio.to_thread(self._context.read_again)
            if context.loaded.shared is not None:
                raise ConfigurationError(
                    f"{context.loaded.shared}: a change is applied at the next start only"
                )
            ready = [await prepare(context) for prepare in self._prepare]
        except ConfigurationError as error:
            if context is not None:
                # Missing as they were read: a file that comes from now on is a change.
                missing = _awaited(context, context.secrets.missing)
                self._rejected, self._loaded = context, (self._loaded[0], missing)
            await self._refuse(error)
            return
        for take_over in ready:
            await take_over()
        if context.settings.bus != self._context.settings.bus:
            logger.warning(
                "the section 'bus' has changed: that takes effect at the next start of the worker",
                extra={"action": "reload"},
            )
        self._context = context
        self._record(ok=True)
        await self._delete_refusal()
        logger.info("configuration applied", extra={"action": "reload"})

    async def _refuse(self, error: ConfigurationError) -> None:
        logger.error(
            "the configuration was refused, the one from before stays in effect:\n%s",
            error,
            extra={"action": "reload"},
        )
        self._record(ok=False)
        self._refused = True
        found = [clip(line) for line in _problems(error)]
        refused = ConfigurationRefused(
            worker=self._worker,
            at_ms=self._clock.now_ms(),
            problems=tuple(found[:MAX_PROBLEMS]),
            more=max(0, len(found) - MAX_PROBLEMS),
        )
        await self._publish(refused_record(self._context.topics, refused))

    async def _delete_earlier(self) -> None:
        """Take away what a process that was killed has left."""
        if self._run_id is None or self._bus is None:
            await self._delete_refusal()
            return
        topics = self._context.topics
        try:
            found = await read_refused(self._bus, topics)
        except BusError as error:
            logger.warning("refusals are not read: %s", error, extra={"action": "reload"})
            return
        # Most runs have none: nothing is written for them.
        for one in found:
            if one.is_of_run(self._run_id):
                await self._publish(Outgoing(_partition(topics), one.key, None))

    async def _delete_refusal(self) -> None:
        """Take the record away, if there is one."""
        if self._refused:
            self._refused = False
            key = ConfigurationRefused(worker=self._worker, at_ms=0, problems=("",)).key
            await self._publish(Outgoing(_partition(self._context.topics), key, None))

    async def _publish(self, record: Outgoing) -> None:
        if self._bus is None:
            return
        try:
            producer = await self._bus.producer()
            try:
                await producer.publish([record])
            finally:
                await producer.close()
        except BusError as error:
            logger.warning("not on the bus: %s", error, extra={"action": "reload"})

    def _record(self, *, ok: bool) -> None:
        self._metrics.set(names.RELOAD_SUCCESSFUL, float(ok), service=self._service)
        if ok:
            now_s = self._clock.now_ms() / 1000
            self._metrics.set(names.RELOAD_TIMESTAMP, now_s, service=self._service)


class ReloadSignal:
    """What SIGHUP asks for: of the watch, once there is one."""

    def __init__(self) -> None:
        self._watch: ConfigurationWatch | None = None
        self._asked = False

    def hand_to(self, watch: ConfigurationWatch) -> None:
        """From now on the watch is asked; at once, if SIGHUP came before."""
        self._watch = watch
        if self._asked:
            watch.ask()

    def ask(self) -> None:
        """SIGHUP has come."""
        if self._watch is None:
            self._asked = True
        else:
            self._watch.ask()


@contextlib.contextmanager
def reload_signal() -> Iterator[ReloadSignal]:
    """Within: SIGHUP has the configuration read again, and does not end the process. From before
    the bus is reached, which may take long. Main thread only.
    """
    reload, loop = ReloadSignal(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, reload.ask)
    try:
        yield reload
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


def refused_record(topics: Topics, refused: ConfigurationRefused) -> Outgoing:
    """The record for the control topic. Pure."""
    event = Event.wrap(
        refused,
        id=f"{refused.worker}/{refused.at_ms}"[:200],
        source="/workers",
        time_ms=refused.at_ms,
        subject=refused.worker,
    )
    return Outgoing(_partition(topics), refused.key, event.encode(), meta_of(event).headers())


def stamp_of(path: Path | None) -> Stamp:
    """What changes when a configuration does: names, and facts about the files. May block."""
    if path is None:
        return ()
    found: list[tuple[object, ...]] = []
    try:
        for file in config_files(path):
            facts = file.stat()
            owned = (facts.st_mode, facts.st_uid, facts.st_gid)
            found.append(
                (file, facts.st_mtime_ns, facts.st_size, facts.st_ino, facts.st_dev, *owned)
            )
    except (OSError, ConfigurationError) as error:
        found.append(("unreadable", str(error)))
    return tuple(found)


def _awaited(context: CommandContext, missing: Mapping[str, str]) -> Stamp:
    """The missing secrets that may come: a variable of this process does not change any more."""
    secrets = context.config.secrets
    return tuple((name, why) for name, why in missing.items() if secrets[name].file is not None)


def _problems(error: ConfigurationError) -> list[str]:
    """One line each, with its place, and no line of the file."""
    if isinstance(error, ConfigProblems):
        return [f"{one.source}:{one.line}:{one.column}: {one.message}" for one in error.problems]
    return str(error).splitlines()


def _partition(topics: Topics) -> Partition:
    return Partition(topics.control, WORKERS_PARTITION)
