"""Follows a bus for `tocsin watch` and the page, and goes on when it comes back after it was away.

Nobody polls fast: the reader of runs, issues and deliveries sleeps until one is written. Telemetry
is read together twice a second, and only that of runs that are shown first; of the others each view
brings a point of the loss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from tocsin.bus.port import (
    EARLIEST,
    LATEST,
    Bus,
    BusError,
    BusUnavailable,
    From,
    MissingBus,
    Partition,
    Reader,
    Record,
    UnknownTopic,
)
from tocsin.bus.reading import read_to_end
from tocsin.console.context import CommandContext
from tocsin.console.views.bus_view import view_partitions
from tocsin.console.views.status import ago
from tocsin.console.watch.frame import Situation
from tocsin.console.watch.state import BACK_MS, MAX_SHOWN, WatchState
from tocsin.schemas.errors import first_error
from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.schemas.topics import TELEMETRY_PARTITIONS, telemetry_partition

FOLLOWED: Final = 12
"""Of so many runs the losses are read from telemetry on Kafka, where there may be thousands."""

ROUND_S: Final = 0.5
"""Pause between two readings of telemetry."""

ROUND_RECORDS: Final = 500
_FULL_ROUND_S: Final = 0.02

MAX_ROUNDS: Final = 100
"""After so many full rounds on end it cannot keep up with telemetry, and lets it be for a time."""

GAP_S: Final = 30.0

RETRY_S: Final = 1.0
"""Pause before a bus that is away is tried again."""

QUIET_S: Final = 5.0
"""When nothing came for that long, the bus is asked whether it is there."""


class Follower:
    """The state of a bus, kept up to date. `changed` is set with each change.

    Args:
        run_id: of this run alone; None: of all.
        limit: how many runs, issues and deliveries are kept, each.
        telemetry: whether losses are read from it, or only from the views of the runs.
        control: whether stop commands are read, too.
    """

    def __init__(
        self,
        context: CommandContext,
        run_id: str | None,
        *,
        limit: int = MAX_SHOWN,
        telemetry: bool = True,
        control: bool = False,
    ) -> None:
        self._context = context
        self._run_id = run_id
        self._limit = limit
        self._telemetry = telemetry
        self._control = control
        self.state = WatchState(context.topics, run_id, limit)
        self.changed = asyncio.Event()
        self._url = context.settings.bus.url
        self._opened = False
        self._trouble: BusError | None = None
        self._trouble_ms = 0

    def situation(self, now_ms: int) -> Situation:
        """Which bus it is, and what is wrong with it."""
        if self._trouble is None:
            return Situation(self._url)
        if not self._opened:
            return Situation(self._url, f"waiting for the bus: {self._trouble}")
        since = ago(self._trouble_ms, now_ms).removesuffix(" ago")
        return Situation(self._url, f"bus away for {since}, trying again: {self._trouble}")

    async def read_once(self) -> None:
        """Read what there is now.

        Raises:
            UnusableBus, UnknownTopic: the bus was never set up.
            BusUnavailable: it does not answer.
        """
        async with self._context.open_bus(create=False) as bus:
            self._url = bus.url
            await self._catch_up(await bus.reader(self._view_places()), self.state)
            places = self._loss_places(everything=False)
            if places:
                reader = await bus.reader(places)
                rounds = 0
                ends = await reader.ends(list(places))
                async for records in read_to_end(reader, ends, max_records=ROUND_RECORDS):
                    self._apply(records)
                    rounds += 1
                    if rounds >= MAX_ROUNDS:
                        break

    async def follow(self) -> None:
        """Follow for ever, over outages.

        Raises:
            UnusableBus, UnknownTopic: the bus was never set up, and will not be by waiting.
        """
        while True:
            bus = self._context.open_bus(create=False)
            self._url = bus.url
            try:
                async with bus:
                    await self._follow(bus)
            except* BusError as group:
                failure = first_error(group)
            if not self._opened and not self._may_come(failure):
                raise failure
            if self._trouble is None:
                self._trouble_ms = unix_ms()
            self._trouble = failure
            self.changed.set()
            await asyncio.sleep(RETRY_S)

    def _may_come(self, failure: BusError) -> bool:
        """Whether it makes sense to wait for a bus that has not been there yet."""
        if isinstance(failure, BusUnavailable | MissingBus):
            return True
        # A run makes the file first, then the topics in it.
        return isinstance(failure, UnknownTopic) and self._context.embedded

    async def _follow(self, bus: Bus) -> None:
        """Until the bus goes away."""
        state = WatchState(self._context.topics, self._run_id, self._limit)
        reader = await bus.reader(self._view_places())
        await self._catch_up(reader, state)
        state.carry_over(self.state)
        self.state, self._trouble, self._opened = state, None, True
        self.changed.set()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_views(reader), name="tocsin-watch-views")
            if self._telemetry:
                group.create_task(self._follow_losses(bus), name="tocsin-watch-losses")

    async def _catch_up(self, reader: Reader, state: WatchState) -> None:
        ends = await reader.ends(list(self._view_places()))
        async for records in read_to_end(reader, ends):
            for record in records:
                state.apply(record)

    async def _follow_views(self, reader: Reader) -> None:
        some = next(iter(self._view_places()))
        while True:
            records = await reader.poll(timeout_s=QUIET_S)
            if records:
                self._apply(records)
            else:
                # A reader of Kafka waits for brokers that are gone without a word.
                await reader.ends([some])

    async def _follow_losses(self, bus: Bus) -> None:
        reader: Reader | None = None
        places: Mapping[Partition, From] = {}
        full = 0
        while True:
            wanted = self._loss_places(everything=self._context.embedded)
            if reader is None or not wanted.keys() <= places.keys():
                places = await _moved(reader, places, wanted)
                reader = await bus.reader(places) if places else None
            if reader is None:
                await asyncio.sleep(RETRY_S)
                continue
            records = await reader.poll(timeout_s=RETRY_S, max_records=ROUND_RECORDS)
            self._apply(records)
            full = full + 1 if len(records) >= ROUND_RECORDS else 0
            if full >= MAX_ROUNDS:
                await asyncio.sleep(GAP_S)
                for partition in places:
                    await reader.seek(partition, LATEST)
                full = 0
            await asyncio.sleep(_FULL_ROUND_S if full else ROUND_S)

    def _apply(self, records: Sequence[Record]) -> None:
        changes = [self.state.apply(record) for record in records]
        if any(changes):
            self.changed.set()

    def _view_places(self) -> Mapping[Partition, From]:
        topics = self._context.topics
        partitions = view_partitions(topics, self._run_id, control=self._control)
        return dict.fromkeys(partitions, EARLIEST)

    def _loss_places(self, *, everything: bool) -> Mapping[Partition, From]:
        """Where telemetry is read, and from when; of `everything` in the file of this machine, so
        that a run is seen with its first step.
        """
        now_ms, topic = unix_ms(), self._context.topics.telemetry
        starts: dict[int, int] = {}
        if self._run_id is not None:
            starts = {telemetry_partition(self._run_id): now_ms - BACK_MS}
        elif everything:
            starts = dict.fromkeys(range(TELEMETRY_PARTITIONS), now_ms - BACK_MS)
        starts |= self.state.places(now_ms, MAX_SHOWN if everything else FOLLOWED)
        return {
            Partition(topic, number): From.time(max(0, start_ms))
            for number, start_ms in starts.items()
        }


async def _moved(
    reader: Reader | None, places: Mapping[Partition, From], wanted: Mapping[Partition, From]
) -> Mapping[Partition, From]:
    """Where to read on when other partitions are wanted; closes the reader."""
    if reader is None:
        return wanted
    found = {
        partition: From.offset(await reader.position(partition)) if partition in places else start
        for partition, start in wanted.items()
    }
    await reader.close()
    return found
