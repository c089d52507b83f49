"""What a launcher has open while it watches: the bus, a publisher, the view of its own run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Final

from tocsin.bus.port import BusError, Partition, Reader, Record, RunBus, Writer
from tocsin.bus.reading import read_to_end
from tocsin.emitter.launch.options import LaunchOptions
from tocsin.emitter.launch.own_run import open_reader, partitions_of
from tocsin.emitter.node.publisher import NodePlan, NodeReport
from tocsin.emitter.send.publisher import Publisher
from tocsin.emitter.stop import datagrams
from tocsin.schemas.records.frames import RecordOrigin
from tocsin.schemas.text import plain_line
from tocsin.schemas.topics import Topics

logger = logging.getLogger(__name__)

CLOSE_S: Final = 5.0
"""How long each part of the bus may take to close, seconds."""

FLUSH_S: Final = 5.0
"""How long records that are queued may take to reach the bus, seconds."""

_POLL_S: Final = 5.0
_PAUSE_S: Final = 1.0


class Watch:
    """The open parts, and the tasks that use them."""

    def __init__(
        self,
        bus: RunBus,
        publisher: Publisher,
        producer: Writer,
        view: Reader,
        partitions: Sequence[Partition],
        options: LaunchOptions,
        print_line: Callable[[str], None],
        left: Callable[[float], float],
    ) -> None:
        self.bus: Final = bus
        self.publisher: Final = publisher
        self.producer: Final = producer
        self._view = view
        self._options = options
        self._topics = Topics(options.bus_prefix)
        self._partitions = partitions
        self._print_line = print_line
        self._left = left
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._endpoint: datagrams.Endpoint | None = None
        self._on_message: Callable[[datagrams.Message], object] | None = None
        self._report: NodeReport | None = None

    @classmethod
    async def open(
        cls,
        stack: contextlib.AsyncExitStack,
        bus: RunBus,
        options: LaunchOptions,
        topics: Topics,
        print_line: Callable[[str], None],
        *,
        timeout_s: float,
        left: Callable[[float], float],
    ) -> Watch:
        """Open the bus and what is needed on it; `stack` closes it, each part in `left(CLOSE_S)`.

        Raises:
            TimeoutError: not within `timeout_s`.
            TocsinError, OSError: as the bus raises them.
        """
        async with asyncio.timeout(timeout_s):
            await stack.enter_async_context(_bounded(bus, left))
            if bus.url.startswith("embedded:"):
                await bus.init(topics.specs())
            helped = bus.url.startswith("embedded:")
            partitions = partitions_of(topics, options.run_id, helped=helped)
            view = await open_reader(bus, partitions)
            stack.push_async_callback(_close, view, left)
            producer = await bus.producer()
            stack.push_async_callback(_close, producer, left)
        publisher = Publisher(topics, options.run_id, observe=options.observe)
        return cls(bus, publisher, producer, view, partitions, options, print_line, left)

    def listen_to_processes(
        self, runtime: Path, on_message: Callable[[datagrams.Message], object]
    ) -> datagrams.Endpoint:
        """Bind the launcher's socket in `runtime`; each goes to `on_message`. Raises OSError."""
        endpoint = datagrams.Endpoint(runtime / datagrams.LAUNCHER_SOCKET)
        self._endpoint, self._on_message = endpoint, on_message
        asyncio.get_running_loop().add_reader(endpoint.fileno(), self.drain_datagrams)
        return endpoint

    def drain_datagrams(self) -> None:
        """Take the messages that processes have sent by now."""
        if self._endpoint is not None and self._on_message is not None:
            for message in self._endpoint.drain():
                self._on_message(message)

    def start(self, name: str, coroutine: Coroutine[None, None, None]) -> None:
        """Start a task whose failure costs a line, not the job."""

        async def guarded() -> None:
            try:
                await coroutine
            except Exception as error:
                # The launcher's isolation, per task: the others and the job go on.
                logger.exception("a task of the launcher failed", extra={"task": name})
                self._print_line(f"{name} ended: {plain_line(str(error))}; the job continues")

        self._tasks[name] = asyncio.create_task(guarded(), name=name)

    async def publish_behind(self) -> None:
        """What is published from now on stands behind all that the job's processes have written,
        which have ended: an embedded bus takes in one writer after the other, the oldest first.
        """
        if not self.bus.url.startswith("embedded:") or "publish" not in self._tasks:
            return
        with contextlib.suppress(BusError):
            producer = await self.bus.producer()
            await self.publisher.flush(self._left(FLUSH_S))
            await self.end("publish", timeout_s=self._left(CLOSE_S))
            self.start("publish", self.publisher.run(producer))

    def sample_node(self, origin: RecordOrigin) -> None:
        """Sample this node, under that name: where no helper does so."""
        here, file = Path.cwd(), self._options.config
        plan = NodePlan.read(self._options.capture, here if file is None else here / file.parent)
        self._report = NodeReport(self.bus, self._topics, origin, folder=here, plan=plan)
        self.start("sample", self._report.run())

    def job_started(self, pid: int) -> None:
        """The job runs: its processes are looked at from now on."""
        if self._report is not None:
            self._report.node.root_pid = pid

    async def end(self, *names: str, timeout_s: float) -> None:
        """Cancel these tasks and wait until they have ended, for `timeout_s` at most."""
        tasks = {self._tasks[name] for name in names if name in self._tasks}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)

    async def follow(self, apply: Callable[[Record], None]) -> None:
        """Hand over what is written about this run, for ever."""
        away = False
        while True:
            try:
                records = await self._view.poll(timeout_s=_POLL_S)
            except BusError as error:
                logger.log(logging.DEBUG if away else logging.WARNING, "cannot read: %s", error)
                away = True
                await asyncio.sleep(_PAUSE_S)
                continue
            away = False
            for record in records:
                apply(record)

    async def read_the_rest(self, apply: Callable[[Record], None], *, timeout_s: float) -> None:
        """End `follow`, and hand over what was written last. Raises BusError, TimeoutError."""
        follower = self._tasks.pop("follow", None)
        if follower is not None:
            follower.cancel()
            await asyncio.gather(follower, return_exceptions=True)
        async with asyncio.timeout(timeout_s):
            ends = await self._view.ends(self._partitions)
            async for records in read_to_end(self._view, ends):
                for record in records:
                    apply(record)

    async def close(self, flush_s: float) -> None:
        """Say what is still to be reported, then end all tasks and the socket."""
        if "publish" in self._tasks:
            await self.publisher.flush(flush_s)
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=self._left(CLOSE_S))
        if self._endpoint is not None:
            asyncio.get_running_loop().remove_reader(self._endpoint.fileno())
            self._endpoint.close()


@contextlib.asynccontextmanager
async def _bounded(bus: RunBus, left: Callable[[float], float]) -> AsyncIterator[RunBus]:
    """The bus, entered; leaving it cannot hold up the exit."""
    await bus.__aenter__()
    try:
        yield bus
    finally:
        with contextlib.suppress(TimeoutError, BusError):
            async with asyncio.timeout(left(CLOSE_S)):
                await bus.__aexit__(None, None, None)


async def _close(part: Reader | Writer, left: Callable[[float], float]) -> None:
    with contextlib.suppress(TimeoutError, BusError):
        async with asyncio.timeout(left(CLOSE_S)):
            await part.close()
