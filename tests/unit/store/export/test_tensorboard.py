"""A run in TensorBoard's files, read back by TensorBoard's own reader."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.records.on_bus import send
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.schemas.topics import Topics
from tocsin.store import Run, open_run
from tocsin.store.errors import StoreUnavailable
from tocsin.store.export.tensorboard import FILE, TensorBoardExport
from tocsin.store.export.tensorboard_events import Distribution, histogram_record, plain, usable
from tocsin.store.export.tfrecord import crc32c, record, single, varint
from tocsin.stream_rules.testing import RunBuilder


def events(folder: Path) -> Any:
    """What TensorBoard reads of a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    found.Reload()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, exported_bus: Path) -> Path:
    folder = tmp_path_factory.mktemp("tb")
    export = TensorBoardExport(open_run("run-1", bus=exported_bus), folder)
    export.write()
    export.close()
    assert (export.written.scalars, export.written.histograms, export.written.issues) == (19, 6, 1)
    return folder / "run-1"


def test_scalars_keep_step_value_and_time(folder: Path) -> None:
    found = events(folder)
    loss = found.Scalars("loss")
    assert [one.step for one in loss] == [0, 1, 2, 3, 4, 5]
    assert loss[1].value == 0.5
    assert math.isnan(loss[3].value)
    assert loss[0].wall_time > 1.7e9
    assert loss[1].wall_time > loss[0].wall_time


def test_each_rank_and_mode_is_a_run(folder: Path) -> None:
    assert [one.value for one in events(folder / "eval").Scalars("loss")] == [9.0]
    assert len(events(folder / "rank-1").Scalars("loss")) == 6
    assert sorted(path.parent.name for path in folder.rglob(FILE)) == ["eval", "rank-1", "run-1"]


def test_histograms_are_made_of_quantiles(folder: Path) -> None:
    found = events(folder)
    tags = found.Tags()["histograms"]
    assert len(tags) == 2
    assert not any("\x1b" in tag for tag in tags)
    (first, *_) = found.Histograms("weights/w")
    value = first.histogram_value
    assert (value.min, value.max) == (-2.0, 4.0)
    assert value.bucket_limit == [-2.0, -1.0, 0.0, 1.0, 2.0, 4.0]
    assert value.bucket == pytest.approx(
        [share * value.num for share in (0, 0.05, 0.45, 0.25, 0.2, 0.05)]
    )
    assert value.sum == pytest.approx(0.5 * value.num)
    assert [one.step for one in found.Histograms("weights/w")] == [0, 2, 4]


def test_issues_are_text_that_shows_itself(folder: Path) -> None:
    found = events(folder)
    (tag,) = [tag for tag in found.Tags()["tensors"] if tag.startswith("issues/")]
    (one,) = found.Tensors(tag)
    text = one.tensor_proto.string_val[0].decode()
    assert one.step == 3
    assert "**critical**" in text
    assert "\\[link\\]\\(http" in text
    assert "\\<script\\>" in text
    assert found.summary_metadata[tag].plugin_data.plugin_name == "text"


def test_an_export_repeated_shows_nothing_twice(run: Run, tmp_path: Path) -> None:
    for _ in range(2):
        export = TensorBoardExport(run, tmp_path)
        export.write()
        export.write()
        export.close()
    assert len(events(tmp_path / "run-1").Scalars("loss")) == 6


def test_a_run_that_is_followed_is_written_until_it_ends(run: Run, tmp_path: Path) -> None:
    waits: list[int] = []

    def wait() -> bool:
        waits.append(1)
        return len(waits) < 3

    class Growing:
        """The run as it was while it trained: with a few steps more each time."""

        def __init__(self) -> None:
            self.upto = 1

        def __getattr__(self, name: str) -> Any:
            return getattr(run, name)

        view = None

        def refresh(self) -> None:
            self.upto += 2

        def series(self, *arguments: Any) -> Any:
            from dataclasses import replace

            found = run.series(*arguments)
            there = found.steps < self.upto
            return replace(
                found,
                steps=found.steps[there],
                values=found.values[there],
                at_us=found.at_us[there],
            )

    export = TensorBoardExport(Growing(), tmp_path)  # type: ignore[arg-type]
    export.follow(wait)
    export.close()
    assert [one.step for one in events(tmp_path / "run-1").Scalars("loss")] == [0, 1, 2, 3, 4]
    ended = TensorBoardExport(run, tmp_path / "ended")
    ended.follow(lambda: pytest.fail("it has ended"))
    ended.close()


def test_what_comes_later_for_a_step_is_written_too(tmp_path: Path) -> None:
    bus = tmp_path / "bus.db"
    run = RunBuilder("run-1")
    columns: dict[str, Any] = {
        **dict.fromkeys(("p05", "p25", "p50", "p75", "p95", "mean", "std"), 1.0),
        **{"min": 0.0, "max": 2.0},
    }

    def publish(tensor: str, *steps: int) -> None:
        start = len(run.records)
        run.steps([2, 2], mode="eval", columns={"loss": [1.0, 2.0]})
        run.tensors(2, "weights", (tensor,), columns=columns)
        for step in steps:
            run.steps([step], loss=float(start))

        async def fill() -> None:
            async with EmbeddedBus(bus) as opened:
                await opened.init(Topics().specs())
                await send(opened, run.records[start:])

        asyncio.run(fill())

    publish("w0", 0, 1, 2)
    followed = TensorBoardExport(open_run("run-1", bus=bus), tmp_path / "followed")
    parts: list[tuple[str, int, *tuple[int, ...]]] = [("w1", 3), ("w2", 1, 4)]

    def wait() -> bool:
        if not parts:
            return False
        publish(*parts.pop(0))
        return True

    followed.follow(wait)
    once = TensorBoardExport(open_run("run-1", bus=bus), tmp_path / "once")
    once.write()
    for export in (followed, once):
        export.close()

    assert followed.written == once.written
    for folder in ("run-1", "run-1/eval"):
        losses = [events(tmp_path / name / folder).Scalars("loss") for name in ("followed", "once")]
        assert len({tuple(sorted((one.step, one.value) for one in each)) for each in losses}) == 1


def test_a_folder_that_cannot_be_written_to_is_told(run: Run, tmp_path: Path) -> None:
    (tmp_path / "run-1").write_text("a file")
    with pytest.raises(StoreUnavailable, match="cannot be written"):
        TensorBoardExport(run, tmp_path).write()


def test_the_checksum_is_that_of_the_standard() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"") == 0
    assert crc32c(bytes(32)) == 0x8A9136AA


def test_numbers_are_written_as_protobuf_writes_them() -> None:
    assert varint(0) == b"\x00"
    assert varint(300) == b"\xac\x02"
    assert len(varint(-1)) == 10
    assert single(2, 1e300) == single(2, math.inf)
    assert single(2, -1e300) == single(2, -math.inf)


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=7, max_size=7).map(sorted),
    st.integers(1, 10**9),
)
def test_no_value_is_lost_between_quantiles(edges: list[float], count: int) -> None:
    from tensorboard.compat.proto.event_pb2 import Event

    found = Distribution(edges[0], edges[1:6], edges[6], float(count), 0.0, 1.0)
    assert usable(found)
    written = histogram_record("t", found, step=1, at_s=1.0)
    event = Event.FromString(written[12:-4])
    histo = event.summary.value[0].histo
    assert sum(histo.bucket) == pytest.approx(count)
    assert list(histo.bucket_limit) == sorted(set(histo.bucket_limit))
    assert written == record(event.SerializeToString()) or event.step == 1


def test_text_of_a_run_is_no_markup() -> None:
    assert plain("a*b_[x](y)<z>") == "a\\*b\\_\\[x\\]\\(y\\)\\<z\\>"
    assert not usable(Distribution(math.nan, [0.0] * 5, 1.0, 1.0, 0.0, 0.0))
    assert not usable(Distribution(0.0, [0.0] * 5, 1.0, 0.0, 0.0, 0.0))
