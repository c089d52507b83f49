"""An embedded bus for two days, in a clock of its own: the files do not grow for ever."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from support.buses import collect, until
from tocsin.bus.embedded import bus as embedded
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.embedded.connection import WAL_BYTES
from tocsin.bus.embedded.spool import SEGMENT_BYTES, SpooledBus
from tocsin.bus.port import Outgoing, Partition
from tocsin.schemas.topics import Topics, issue_partition, telemetry_partition

TOPICS = Topics()
TICK_MS = 300_000
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
TELEMETRY_BYTES = 100_000
STATE_BYTES = 50_000
"""Of all rules together, at each tick."""

A_DAY_BYTES = DAY_MS // TICK_MS * TELEMETRY_BYTES
ROOM_BYTES = 1.1 * A_DAY_BYTES + WAL_BYTES + SEGMENT_BYTES
"""A day of records, and beside it the log and what waits in the spool."""


def size(folder: Path) -> int:
    """Bytes of all files in it."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


async def test_two_days_of_a_run_take_no_more_room_than_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "MAINTENANCE_S", 0.002)
    now_ms = 1_800_000_000_000
    path, run = tmp_path / "bus.db", "long"
    telemetry = Partition(TOPICS.telemetry, telemetry_partition(run))
    state = Partition(TOPICS.state, telemetry_partition(run))
    issues = Partition(TOPICS.issues, issue_partition(run))
    sizes: list[int] = []

    def records(number: int) -> Sequence[Outgoing]:
        """What a worker of the rules has to say after each tick."""
        body = number.to_bytes(4, "big") * (STATE_BYTES // 4)
        saved = [Outgoing(state, f"{run}/rule".encode(), body)]
        hourly = number % (HOUR_MS // TICK_MS) == 0
        return [*saved, *([Outgoing(issues, run.encode(), bytes(2_000))] if hourly else [])]

    async with (
        EmbeddedBus(path, clock=lambda: now_ms) as bus,
        SpooledBus(path, lambda: now_ms) as training,
    ):
        await bus.init(TOPICS.specs())
        await training.init(TOPICS.specs())
        writer, producer = await training.producer(), await bus.producer()
        consumer = await bus.consumer("rules", [TOPICS.telemetry])
        for number in range(2 * DAY_MS // TICK_MS):
            now_ms += TICK_MS
            body = number.to_bytes(4, "big") * (TELEMETRY_BYTES // 4)
            await writer.publish([Outgoing(telemetry, run.encode(), body)])
            (read,) = await collect(consumer, 1)
            assert read.append_ms == now_ms
            await producer.publish(records(number))
            await consumer.commit({telemetry: read.offset + 1})
            if now_ms % HOUR_MS == 0:

                async def tidy() -> bool:
                    """Nothing by age that is over a day old, nothing of a state but the newest; and
                    the room of the others has been given back."""
                    states = {one.spec.name: one.records for one in await bus.show(TOPICS.specs())}
                    old = states[TOPICS.telemetry] > DAY_MS // TICK_MS + 1
                    kept = not old and states[TOPICS.state] <= HOUR_MS // TICK_MS + 1
                    return kept and size(tmp_path) < ROOM_BYTES

                await until(tidy, "what is over was taken away, and its room given back")
                sizes.append(size(tmp_path))

    # `tidy` has held each hour below that bound, and the records of a day were really there.
    assert max(sizes) > A_DAY_BYTES / 2
