"""Telemetry in a file, and from a bus."""

from __future__ import annotations

import asyncio
import gzip
from pathlib import Path

import pytest

from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import Outgoing
from tocsin.schemas.topics import Topics
from tocsin.stream_rules.reading.recordings import UnreadableRecording
from tocsin.stream_rules.testing import (
    RunBuilder,
    assert_fires,
    load_records,
    records_of_run,
    save_records,
)


def bad_run() -> RunBuilder:
    run = RunBuilder("r-1")
    run.started()
    run.steps(range(5), loss=1.0)
    run.steps([5], loss=float("nan"))
    return run


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    run = bad_run()

    assert save_records(tmp_path / "run.gz", run.records) == len(run.records)

    assert load_records(tmp_path / "run.gz") == tuple(run.records)
    assert_fires(load_records(str(tmp_path / "run.gz")), "nonfinite", first_step=5)
    assert [path.name for path in tmp_path.iterdir()] == ["run.gz"]


@pytest.mark.parametrize(
    "data",
    [b"no gzip", gzip.compress(b"{}\n"), gzip.compress(b"[1, 2]\n" * 99)[:-9]],
    ids=["no gzip", "no records", "torn"],  # the bytes have the time in them
)
def test_another_file_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "run.gz").write_bytes(data)

    with pytest.raises(UnreadableRecording):
        load_records(tmp_path / "run.gz")


async def fill(path: Path, run: RunBuilder) -> None:
    async with EmbeddedBus(path) as bus:
        await bus.init(Topics().specs())
        producer = await bus.producer()
        await producer.publish(
            [Outgoing(r.partition, r.key, r.value, r.headers) for r in run.records]
        )
        await producer.close()


def test_a_run_is_read_from_its_bus(tmp_path: Path) -> None:
    run = bad_run()
    asyncio.run(fill(tmp_path / "bus.db", run))

    found = records_of_run(tmp_path / "bus.db", "r-1")

    assert [record.value for record in found] == [record.value for record in run.records]
    assert records_of_run(tmp_path / "bus.db", "r-2") == ()
