"""The helper process of one run on an embedded bus: sampler, rules, actions, archive in one loop.

Started by name by the launcher, which drives it through stdin (`tocsin.emitter.launch.helper`). It
serves only its run: consumer groups of its own, and a lease on the bus, so that `tocsin rules` and
`tocsin actions` leave the run to it.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tocsin.actions.composition import build_actions_service
from tocsin.actions.receivers.address_guard import AddressGuard
from tocsin.bus.port import Bus, BusError, From, Lease, Producer
from tocsin.console.context import CommandContext, read_context
from tocsin.console.services.attached_reports import AttachedReports
from tocsin.console.services.heartbeat import Heartbeat, run_name, target_of
from tocsin.console.services.own_archive import OwnArchive
from tocsin.console.services.reload import (
    ActionsReload,
    ConfigurationWatch,
    RulesReload,
    reload_signal,
)
from tocsin.console.services.workers import SOFTWARE, run_lease, trusted_keys
from tocsin.emitter.launch.enforcer import Enforcer, StopOrder
from tocsin.emitter.launch.helper import NAME
from tocsin.emitter.node.publisher import NodePlan, NodeReport
from tocsin.emitter.process.process_group import set_name
from tocsin.emitter.send.publisher import Publisher
from tocsin.runtime.shutdown import stop_signals
from tocsin.runtime.testing import CrashPoints
from tocsin.runtime.worker import Worker, WorkerSettings
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.key_folder import keys_folder, own_key
from tocsin.schemas.records.configurations import run_worker
from tocsin.schemas.records.events import Data
from tocsin.schemas.records.frames import RecordOrigin
from tocsin.schemas.signing import SigningKey
from tocsin.stream_rules.service import build_rules_service

logger = logging.getLogger(__name__)

ANSWERS_S: Final = 2.0
"""How long the end waits for what a stop has to tell to be acknowledged, seconds."""

LEFTOVERS: Final = 3
"""Exit code: the job is over, and something is left in the ledger."""


OTHERS_S: Final = 5.0
"""The helper before this one, if it was killed, holds its claim for less long."""

_LEASE_POLL_S: Final = 0.25


class RankNews(NamedTuple):
    """What the rank of that process did: it has `left`, begins `saving` a checkpoint, has `saved`
    it."""

    what: str
    pid: int


class Orders:
    """What the launcher says on stdin, line by line. `gone` is set at its end."""

    def __init__(self) -> None:
        self.job: int | None = None
        self.drain_s: float | None = None
        self.stops: list[StopOrder | RankNews] = []
        """Orders to end a rank, and what ranks did, as they came."""
        self.changed = asyncio.Event()
        self.gone = False

    async def listen(self) -> None:
        """Read until EOF. Words that are not known are ignored."""
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
        )
        while True:
            try:
                line = await reader.readline()
            except ValueError:
                # Longer than the reader's limit: it has thrown that part away.
                logger.warning("order too long", extra={"action": "order"})
                continue
            if not line:
                break
            self.apply(line)
        self.gone = True
        self.changed.set()

    def apply(self, line: bytes) -> None:
        """One line. What is no order changes nothing."""
        word, _, value = line.decode(errors="replace").strip().partition(" ")
        try:
            if word == "job":
                self.job = _pid(value)
            elif word == "drain":
                self.drain_s = _seconds(value)
            elif word == "stop":
                self.stops.append(StopOrder.model_validate_json(value))
            elif word in ("left", "saving", "saved"):
                self.stops.append(RankNews(word, _pid(value)))
        except ValueError:
            logger.warning("unknown order: %r", line[:100], extra={"action": "order"})
        self.changed.set()


def _pid(text: str) -> int:
    if not 0 < (pid := int(text)) < 2**31:
        raise ValueError(f"{pid} is not a process")
    return pid


def _seconds(text: str) -> float:
    if not 0 <= (seconds := float(text)) < math.inf:
        raise ValueError(f"{seconds} is not a duration")
    return seconds


class Helper:
    """Serves one run on an open bus until the launcher has no more need of it."""

    def __init__(
        self,
        bus: Bus,
        context: CommandContext,
        *,
        run_id: str,
        since_ms: int,
        notify: Sequence[str],
        allow_command: Sequence[str],
        stop: bool,
        orders: Orders,
        report: NodeReport | None,
    ) -> None:
        self._orders = orders
        self._report = report
        self._enforcement = _Enforcement(bus, context, run_id)
        crash = CrashPoints.from_environment(os.environ)
        self._actions = build_actions_service(
            context.topics,
            context.config,
            bus=bus,
            secrets=context.all_secrets(),
            key=_signing_key(),
            embedded=True,
            notify=notify,
            allow_command=allow_command,
            stop=stop,
            config_path=context.loaded.path,
            software=SOFTWARE,
            trusted=trusted_keys(context),
            report=AttachedReports(bus.url, context.loaded.path).make,
            crash=crash,
        )
        self._rules = build_rules_service(
            context.topics, context.config, folder=context.loaded.folder
        )
        self._workers = [
            Worker(
                bus,
                service,
                topics=context.topics,
                group=f"tocsin-{service.name}-{run_id}",
                only_runs={run_id},
                start=From.time(since_ms),
                settings=WorkerSettings(software=SOFTWARE),
                crash=crash,
            )
            for service in (self._rules, self._actions)
        ]
        rules, actions = self._workers
        self._archive = OwnArchive(bus, context, run_id, crash=crash)
        self._heartbeat = Heartbeat(
            target_of(context),
            sender=run_name(run_id),
            service="run",
            workers=self._workers,
            guard=AddressGuard(private=True),
            # The launcher orders to drain when the job is over; one that was killed does not.
            is_over=lambda: orders.drain_s is not None,
            run=True,
            software=SOFTWARE,
        )
        self.watch = ConfigurationWatch(
            context,
            prepare=[
                RulesReload(rules, self._rules, context).prepare,
                ActionsReload(actions, self._actions).prepare,
                self._heartbeat.prepare,
            ],
            bus=bus,
            service=run_worker(run_id),
            run_id=run_id,
        )

    async def run(self, stopping: asyncio.Event) -> int:
        """Work until the launcher is gone, has ordered to drain, or `stopping` is set.

        Returns the exit code: 0, 1 if a part failed, or `LEFTOVERS`.
        """
        parts = [
            asyncio.create_task(worker.run(), name=f"worker-{number}")
            for number, worker in enumerate(self._workers)
        ]
        ended = asyncio.create_task(stopping.wait(), name="signal")
        reporting: list[asyncio.Task[None]] = []
        if self._report is not None:
            reporting.append(asyncio.create_task(self._report.run(), name="node-report"))
        watching = asyncio.create_task(self.watch.run(), name="configuration")
        beating = asyncio.create_task(self._heartbeat.run(), name="heartbeat")
        archiving = asyncio.create_task(self._archive.run(), name="archive")
        code = 0
        draining: list[asyncio.Task[bool]] = []
        try:
            while not (stopping.is_set() or (self._orders.gone and not self._enforcement.tasks)):
                changed = asyncio.create_task(self._orders.changed.wait(), name="changed")
                await asyncio.wait(
                    {changed, ended, *draining, *parts, *self._enforcement.tasks},
                    return_when=asyncio.FIRST_COMPLETED,
                )
                changed.cancel()
                self._orders.changed.clear()
                if self._report is not None:
                    self._report.node.root_pid = self._orders.job
                await self._enforcement.apply(self._orders.stops)
                if any(part.done() for part in parts):
                    code = 1
                    break
                if draining and draining[0].done():
                    code = 0 if draining[0].result() else LEFTOVERS
                    break
                if not draining and self._orders.drain_s is not None:
                    drain = self._drain(self._orders.drain_s, reporting)
                    draining.append(asyncio.create_task(drain, name="drain"))
        finally:
            await self._enforcement.close()
            self.watch.stop()
            await asyncio.wait({watching})
            self._heartbeat.stop()
            for worker in self._workers:
                worker.stop()
            done = await asyncio.gather(*parts, watching, beating, return_exceptions=True)
            for task in (ended, archiving, *reporting, *draining):
                task.cancel()
            await asyncio.wait([ended, archiving, *reporting, *draining])
            # What the workers have published last is in it.
            await self._archive.finish()
        for error in done:
            if isinstance(error, BaseException):
                logger.error("a worker failed", exc_info=error, extra={"action": "stop"})
                code = 1
        return code

    async def _drain(self, timeout_s: float, reporting: Sequence[asyncio.Task[None]]) -> bool:
        """Let rules and actions take in all that is there, then let the deliveries end."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        for report in reporting:
            # Its last frames are published first, so that the rules read them too.
            report.cancel()
            await asyncio.wait({report}, timeout=timeout_s)
        for worker in self._workers:
            if not await worker.caught_up(max(0.0, deadline - loop.time())):
                return False
        return await self._actions.drain(max(0.0, deadline - loop.time()))


class _Enforcement:
    """Ends ranks that do not leave; its answers are published from the first order on."""

    def __init__(self, bus: Bus, context: CommandContext, run_id: str) -> None:
        self._bus = bus
        self._enforcer = Enforcer(run_id, self._answer)
        self._publisher = Publisher(context.topics, run_id, who="helper")
        self._producer: Producer | None = None
        self._publishing: asyncio.Task[None] | None = None

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """The stops under way."""
        return self._enforcer.under_way

    async def apply(self, stops: list[StopOrder | RankNews]) -> None:
        """Carry out what was ordered by now, and clear the list."""
        if stops and self._publishing is None:
            try:
                self._producer = await self._bus.producer()
            except BusError as error:
                logger.warning("stops are not reported yet: %s", error, extra={"action": "stop"})
            else:
                publishing = self._publisher.run(self._producer)
                self._publishing = asyncio.create_task(publishing, name="answers")
        orders = list(stops)
        stops.clear()
        for order in orders:
            if isinstance(order, StopOrder):
                self._enforcer.obey(order)
            elif order.what == "left":
                self._enforcer.left(order.pid)
            else:
                self._enforcer.saving(order.pid, on=order.what == "saving")

    async def close(self) -> None:
        """Give up what is under way, and publish the results."""
        await self._enforcer.close()
        if self._publishing is not None:
            await self._publisher.flush(ANSWERS_S)
            self._publishing.cancel()
            await asyncio.wait({self._publishing})
        if self._producer is not None:
            await self._producer.close()

    def _answer(self, data: Data) -> None:
        logger.info("%s", data, extra={"action": "stop"})
        self._publisher.publish(data)


def _signing_key() -> SigningKey:
    """This machine's key, or one that nobody trusts: then each stop is refused, and says why."""
    try:
        return own_key(keys_folder(os.environ))
    except ConfigurationError as error:
        logger.warning("stops cannot be signed: %s", error, extra={"action": "start"})
        return SigningKey.generate()


def _report(bus: Bus, context: CommandContext, arguments: argparse.Namespace) -> NodeReport | None:
    if arguments.incarnation is None:
        return None
    origin = RecordOrigin(run_id=arguments.run_id, incarnation=arguments.incarnation)
    plan = NodePlan.from_section(context.config.capture.system, context.loaded.folder)
    return NodeReport(bus, context.topics, origin, folder=Path.cwd(), plan=plan)


async def _lease(bus: Bus, run_id: str, over: Callable[[], bool]) -> Lease | None:
    """Claim the run; a helper that was killed holds its claim for a few seconds more.

    None: it is `over` before that, as somebody else serves the run for as long as he lives.
    """
    waits = 0
    while (lease := await bus.lease(run_lease(run_id))) is None:
        if over():
            return None
        waits += 1
        if waits == int(OTHERS_S / _LEASE_POLL_S):
            logger.warning(
                "another `tocsin run --run-id %s` is running on this bus: both count as one run, "
                "whose rules are with the other until it ends. A run of another id is apart",
                run_id,
                extra={"action": "lease"},
            )
        await asyncio.sleep(_LEASE_POLL_S)
    return lease


async def serve(context: CommandContext, arguments: argparse.Namespace) -> int:
    """Open the bus and serve. The exit code."""
    orders, stopping = Orders(), asyncio.Event()
    listening = asyncio.create_task(orders.listen(), name="orders")
    with stop_signals(stopping), reload_signal() as reloading:
        async with context.open_bus() as bus:
            await bus.init(context.topics.specs())
            lease = await _lease(bus, arguments.run_id, lambda: orders.gone or stopping.is_set())
            if lease is None:
                return LEFTOVERS
            try:
                helper = Helper(
                    bus,
                    context,
                    run_id=arguments.run_id,
                    since_ms=arguments.since_ms,
                    notify=arguments.notify,
                    allow_command=arguments.allow_command,
                    stop=not arguments.no_stop,
                    orders=orders,
                    report=_report(bus, context, arguments),
                )
                reloading.hand_to(helper.watch)
                return await helper.run(stopping)
            finally:
                listening.cancel()
                await lease.release()


def main(argv: Sequence[str] | None = None, context: CommandContext | None = None) -> int:
    """Read the options and serve until the launcher is gone; the exit code.

    `context` is what they name, where a launcher has read it already.
    """
    set_name(NAME)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--bus", required=True)
    parser.add_argument("--since-ms", type=int, required=True, help="nothing older is read")
    parser.add_argument("--incarnation", help="under which the node's samples are sent")
    parser.add_argument("--config", type=Path)
    parser.add_argument("--notify", action="append", default=[], metavar="URL")
    parser.add_argument("--allow-command", action="append", default=[], metavar="PROGRAM")
    parser.add_argument("--no-stop", action="store_true")
    arguments = parser.parse_args(argv)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    if context is None:
        context = read_context(arguments.config, arguments.bus)
    return asyncio.run(serve(context, arguments))


if __name__ == "__main__":
    raise SystemExit(main())
