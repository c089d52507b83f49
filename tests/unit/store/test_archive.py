"""The archive: outages of the store, hostile names, merges, and what is deleted."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support.processes.archive import QUICK, archive_all
from support.records.made_runs import MadeRun, made_run
from support.records.stored_rows import Rows, expected_rows, stored_rows
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import Partition, Record
from tocsin.runtime.service import StartOver, Tick
from tocsin.runtime.testing import no_crash
from tocsin.schemas.configuration.file import check_config
from tocsin.schemas.records.frames import RecordOrigin, StepFrame, TensorFrame
from tocsin.schemas.records.saved_tensors import TensorsSaved
from tocsin.schemas.records.wire import meta_of, read_meta
from tocsin.schemas.store_paths import tensors_path
from tocsin.schemas.topics import Topics, telemetry_partition
from tocsin.store import Store, open_run, open_store
from tocsin.store.archive.batch import Taken
from tocsin.store.archive.flush import flush
from tocsin.store.archive.merge import MANY, compact, thin_out, wants_thinning
from tocsin.store.archive.once import archive_run, finish_others
from tocsin.store.archive.records import read_record
from tocsin.store.archive.retention import (
    FORGOTTEN_MS,
    Keep,
    delete_run,
    expired_runs,
    finish_deletion,
    make_room,
)
from tocsin.store.archive.service import ArchiveService, FlushPolicy
from tocsin.store.archive.upkeep import Upkeep
from tocsin.store.config import store_problems
from tocsin.store.errors import DamagedStore, StoreError, StoreUnavailable
from tocsin.store.manifest import manifest_path, quoted, run_folder
from tocsin.store.parquet.tables import Table
from tocsin.store.storage.local import LocalStorage
from tocsin.store.storage.port import Overtaken
from tocsin.store.values import StoredRun
from tocsin.stream_rules.testing import RunBuilder

TOPICS = Topics()
MADE = made_run()


class Flaky(LocalStorage):
    """A disk that is full for the first writes."""

    def __init__(self, folder: Path, failures: int) -> None:
        super().__init__(folder)
        self.left = failures

    def move_in(self, path: str, made: Path) -> None:
        """Fails as a full disk does."""
        if self.left > 0:
            self.left -= 1
            made.unlink()
            raise StoreUnavailable("No space left on device")
        super().move_in(path, made)


class Unheard(LocalStorage):
    """Of its first write the answer is lost, and that write is refused when it is sent again."""

    lost = False

    def replace(self, path: str, data: bytes, *, expected: str | None) -> str:
        """Writes, and says that somebody else did."""
        version = super().replace(path, data, expected=expected)
        if not self.lost:
            self.lost = True
            raise Overtaken(path)
        return version


def of_telemetry(rows: Rows) -> Counter[str]:
    return Counter(
        repr((row[0], row[4]) if row[0] == "events" else row)
        for row in rows.elements()
        if row[0] != "events" or row[2] == TOPICS.telemetry
    )


def service(store: Store, **policy: int) -> ArchiveService:
    return ArchiveService(
        store,
        "telemetry",
        topics=TOPICS,
        upkeep=Upkeep(store, topics=TOPICS),
        policy=FlushPolicy(**policy),
    )


def write(
    store: Store,
    records: Sequence[Record],
    run_id: str = "run-1",
    crash: Callable[[str], None] = no_crash,
) -> None:
    taken = [
        found[1] for found in (read_record(record, "telemetry") for record in records) if found
    ]
    flush(store, run_id, "telemetry", taken, runs_topic=TOPICS.runs, now_ms=1, crash=crash)


# -- outages -------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["flush", "merge"])
def test_a_write_whose_answer_is_lost_deletes_none_of_its_files(tmp_path: Path, at: str) -> None:
    plain, unheard = open_store(tmp_path), Store(Unheard(tmp_path))
    write(plain, MADE.telemetry[:20])
    write(unheard if at == "flush" else plain, MADE.telemetry[20:])
    compact(unheard, "run-1", "telemetry", topics=TOPICS)

    assert isinstance(unheard.storage, Unheard)
    assert unheard.storage.lost
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.parquet")} == {
        file.path for file in plain.manifests("run-1")["telemetry"].files
    }
    assert of_telemetry(stored_rows(plain, "run-1")) == of_telemetry(expected_rows(MADE.telemetry))


async def test_a_full_disk_loses_nothing_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(Flaky(tmp_path / "store", failures=2))
    async with EmbeddedBus(tmp_path / "bus.db") as bus:
        await MADE.publish(bus)
        with caplog.at_level(logging.INFO):
            # So little is held that most of it stays on the bus, and is read again.
            await archive_all(
                bus, store, families=["telemetry"], policy=replace(QUICK, limit_bytes=4_000)
            )
    assert of_telemetry(stored_rows(store, "run-1")) == of_telemetry(expected_rows(MADE.telemetry))
    said = [record.message for record in caplog.records if record.levelno >= logging.INFO]
    assert sum("cannot be written" in line for line in said) == 1
    assert any("answers again" in line for line in said)


def test_what_is_over_the_limit_stays_on_the_bus(tmp_path: Path) -> None:
    storage = Flaky(tmp_path / "store", failures=1)
    archive = service(Store(storage), every_ms=0, limit_bytes=4_000)
    telemetry = MADE.telemetry[0].partition
    archive.apply(MADE.telemetry[:30], Tick(1_000))

    assert archive.wants_checkpoint()
    archive.snapshots(force=False)
    assert archive.committable(telemetry, 30) == 0
    assert not archive.wants_checkpoint()

    archive.apply([], Tick(10_000))
    assert archive.wants_checkpoint()
    archive.snapshots(force=False)
    left = archive.committable(telemetry, 30)
    assert 0 < left < 30

    # Once that is committed, all from there on is asked for again.
    archive.apply(MADE.telemetry[30:40], Tick(10_001))
    with pytest.raises(StartOver):
        archive.snapshots(force=False)
    archive.release({telemetry.number})
    archive.apply(MADE.telemetry[left:40], Tick(10_002))
    assert archive.committable(telemetry, 40) >= left


def test_a_run_is_written_when_it_is_time_or_over(tmp_path: Path) -> None:
    archive = service(Store(LocalStorage(tmp_path)), every_ms=60_000, settle_ms=2_000)
    archive.apply(MADE.telemetry[:-1], Tick(0))
    assert (archive.wants_checkpoint(), archive.next_due_ms()) == (False, 60_000)

    archive.apply(MADE.telemetry[-1:], Tick(1_000))

    assert (archive.wants_checkpoint(), archive.next_due_ms()) == (False, 3_000)
    archive.apply([], Tick(3_000))
    assert archive.wants_checkpoint()


def test_a_damaged_manifest_holds_up_no_other_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(LocalStorage(tmp_path))
    (tmp_path / run_folder("run-1")).mkdir()
    (tmp_path / manifest_path("run-1", "telemetry")).write_text("{")
    archive = service(store, every_ms=0)
    archive.apply([*MADE.telemetry, *made_run("run-2").telemetry], Tick(0))

    archive.snapshots(force=True)

    assert [run.run_id for run in open_store(tmp_path).runs()] == ["run-2"]
    assert "run run-1 is not archived" in caplog.text
    assert "is not a manifest of a run" in caplog.text


def test_what_duckdb_refuses_holds_up_no_other_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(LocalStorage(tmp_path))
    write_tables = store.duck.write

    def refuse(tables: Sequence[Table], target: Path, *, order: str, spill: Path) -> None:
        monkeypatch.undo()
        raise StoreError("DuckDB could not do it: Binder Error")

    monkeypatch.setattr(store.duck, "write", refuse)
    archive = service(store, every_ms=0)
    archive.apply([*MADE.telemetry, *made_run("run-2").telemetry], Tick(0))

    archive.snapshots(force=True)

    assert store.duck.write == write_tables
    assert [run.run_id for run in open_store(tmp_path).runs()] == ["run-2"]
    assert "run run-1 is not archived: DuckDB could not do it" in caplog.text


# -- names and logs ------------------------------------------------------------------------


def hostile_records(run_id: str) -> list[Record]:
    """Names that could leave their folder, or be taken for another's."""
    place = Partition(TOPICS.telemetry, telemetry_partition(run_id))
    origin = RecordOrigin(run_id=run_id, incarnation="..")
    frames: list[StepFrame | TensorFrame] = [
        StepFrame(
            origin=origin,
            steps=np.array([1], np.uint64),
            at_us=np.array([1], np.uint64),
            columns=("Loss", "loss", "'; DROP TABLE t0; --", "", "\N{BELL}"),
            values=np.array([[1, 2, 3, 4, 5]], np.float32),
        )
    ]
    frames += [
        TensorFrame(
            origin=origin,
            step=1,
            collection=name,
            rows=("a'\"b", "../../c"),
            columns=("L2", "l2", "step", 'q"', "%41", "~"),
            values=np.arange(12, dtype=np.float32).reshape(2, 6),
            count_columns=("tensor", "l2"),
            counts=np.array([[7, 8], [9, 2**63]], np.uint64),
        )
        for name in ("../../../x", "_steps", "steps", "🔔" * 60, "a/b")
    ]
    return [
        Record(
            place,
            offset,
            1 + offset,
            run_id.encode(),
            frame.encode(),
            meta_of(frame, boot="boot", seq=offset).headers(),
        )
        for offset, frame in enumerate(frames)
    ]


def test_names_leave_no_folder_and_are_told_apart(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "store"
    store = open_store(folder)
    run_id = "a=b@c:d+e.."
    write(store, hostile_records(run_id), run_id)
    assert compact(store, run_id, "telemetry", topics=TOPICS)

    (known,) = store.runs()
    run = open_run(run_id, store=folder)

    assert (known.run_id, known.incarnations, run.incarnation) == (run_id, ("..",), "..")
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]
    assert {path.name for path in folder.iterdir()} == {".scratch", run_folder(run_id)}
    assert [run.series(name).values[0] for name in ("Loss", "loss", "", "\N{BELL}")] == [1, 2, 4, 5]
    assert set(run.collections()) == {"../../../x", "_steps", "steps", "🔔" * 60, "a/b"}
    tensor = run.tensor("../../c", "_steps")
    found = {name: tensor.statistic(name).values.tolist() for name in tensor.statistics()}
    assert found == {
        "L2": [6], "l2": [7], "step": [8], 'q"': [9], "%41": [10], "~": [11], "tensor": [9],
    }  # fmt: skip


def test_quoted_names_are_distinct_and_short() -> None:
    names = ["a", "A", "_a", "~a", "a/b", "a%2Fb", "x" * 300, "x" * 301, "é" * 64, "é" * 65, ".."]
    found = [quoted(name) for name in names]
    assert len(set(found)) == len(names)
    assert all("/" not in one and len(one) < 200 for one in found)


def test_a_bus_that_was_made_anew_is_another_log(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write(store, MADE.telemetry)
    again = [
        replace(
            record,
            append_ms=record.append_ms + 10**9,
            headers=replace(meta := read_meta(record.headers), boot=f"{meta.boot}/2").headers(),
        )
        for record in MADE.telemetry
    ]
    write(store, MADE.telemetry)
    write(store, again)
    assert open_run("run-1", store=store).series("loss").steps.tolist() == sorted([*range(20)] * 2)


def test_a_record_in_another_runs_partition_is_not_taken(tmp_path: Path) -> None:
    archive = service(open_store(tmp_path), every_ms=0)
    stray = replace(
        MADE.telemetry[0],
        partition=Partition(TOPICS.telemetry, MADE.telemetry[0].partition.number + 1),
    )
    archive.apply([stray], Tick(0))
    assert not archive.wants_checkpoint()


# -- merges --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A run in many small files."""
    store = open_store(tmp_path_factory.mktemp("many"))
    for record in MADE.telemetry:
        write(store, [record])
    return store


def test_many_small_files_become_few_while_it_runs(many: Store) -> None:
    before = many.manifests("run-1")["telemetry"]
    assert wants_thinning(before)

    fewer = thin_out(many, "run-1", "telemetry", topics=TOPICS)

    after = many.manifests("run-1")["telemetry"]
    assert fewer >= MANY - 1
    assert len(after.files) == len(before.files) - fewer
    assert not wants_thinning(after)
    assert of_telemetry(stored_rows(many, "run-1")) == of_telemetry(expected_rows(MADE.telemetry))


def test_a_run_that_is_open_finds_its_files_after_they_were_sorted(many: Store) -> None:
    run = open_run("run-1", store=many)
    loss = run.series("loss").values.tolist()

    assert compact(many, "run-1", "telemetry", topics=TOPICS)

    assert run.series("loss").values.tolist() == loss
    manifest = many.manifests("run-1")["telemetry"]
    assert {file.order for file in manifest.files} == {"tensor"}
    places = [(file.kind, file.incarnation, file.collection) for file in manifest.files]
    assert len(set(places)) == len(places)


async def test_while_files_are_sorted_more_may_be_written(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    async with EmbeddedBus(tmp_path / "bus.db") as bus:
        await MADE.publish(bus, stop=40)
        await archive_run(bus, store, "run-1", topics=TOPICS, now_ms=lambda: 1)
        await MADE.publish(bus, start=40)
        loop = asyncio.get_running_loop()

        def meanwhile(point: str) -> None:
            if point == "merged" and not done:
                done.append(point)
                asyncio.run_coroutine_threadsafe(
                    archive_run(bus, open_store(tmp_path / "store"), "run-1", topics=TOPICS,
                                now_ms=lambda: 2), loop,
                ).result()  # fmt: skip

        done: list[str] = []
        sorting = asyncio.to_thread(
            compact, store, "run-1", "telemetry", topics=TOPICS, crash=meanwhile
        )
        assert not await sorting
        assert done
    assert of_telemetry(stored_rows(store, "run-1")) == of_telemetry(expected_rows(MADE.telemetry))
    assert compact(store, "run-1", "telemetry", topics=TOPICS)


class Followed(LocalStorage):
    """A folder in which somebody does something as soon as a manifest says that all is sorted."""

    def __init__(self, folder: Path, then: Callable[[], None]) -> None:
        super().__init__(folder)
        self._then = then

    def replace(self, path: str, data: bytes, *, expected: str | None) -> str:
        """Then the other one goes on."""
        version = super().replace(path, data, expected=expected)
        if b'"compacted":true' in data:
            self._then()
        return version


def test_a_file_that_is_written_while_others_clean_up_stays(tmp_path: Path) -> None:
    first, last = MADE.telemetry[:-1], MADE.telemetry[-1:]
    write(open_store(tmp_path), first)
    left = tmp_path / run_folder("run-1") / "incarnation=x" / "telemetry-1.parquet"
    left.parent.mkdir()
    left.touch()
    written, deleted = threading.Event(), threading.Event()

    def pause(point: str) -> None:
        if point == "files_written":
            written.set()
            deleted.wait(60)

    late = threading.Thread(
        target=write, args=(open_store(tmp_path), last), kwargs={"crash": pause}
    )

    def then() -> None:
        late.start()
        assert written.wait(60)

    assert compact(Store(Followed(tmp_path, then)), "run-1", "telemetry", topics=TOPICS)
    deleted.set()
    late.join()

    rows = of_telemetry(stored_rows(open_store(tmp_path), "run-1"))
    assert rows == of_telemetry(expected_rows(MADE.telemetry))
    assert not left.exists()


def test_two_may_sort_a_run_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for records in (MADE.telemetry[:20], MADE.telemetry[20:]):
        write(open_store(tmp_path), records)
    locate: Callable[[LocalStorage, str], Path] = LocalStorage.local
    done: list[bool] = []

    def overtaken(storage: LocalStorage, path: str) -> Path:
        if storage is first.storage and not done:
            done.append(compact(open_store(tmp_path), "run-1", "telemetry", topics=TOPICS))
        return locate(storage, path)

    monkeypatch.setattr(LocalStorage, "local", overtaken)
    first = open_store(tmp_path)

    assert compact(first, "run-1", "telemetry", topics=TOPICS)

    assert done == [True]
    rows = of_telemetry(stored_rows(open_store(tmp_path), "run-1"))
    assert rows == of_telemetry(expected_rows(MADE.telemetry))


def test_upkeep_sorts_what_an_earlier_process_has_left(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write(store, MADE.telemetry)
    Upkeep(store, topics=TOPICS).run_due(FORGOTTEN_MS * 2)
    assert store.manifests("run-1")["telemetry"].compacted


async def test_a_later_run_finishes_what_one_before_has_left(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    served = {"run-1"}

    async def held(run_id: str) -> bool:
        return run_id in served

    async with EmbeddedBus(tmp_path / "bus.db") as bus:
        await MADE.publish(bus, stop=40)
        await archive_run(bus, store, "run-1", topics=TOPICS, now_ms=lambda: NOW_MS)
        await MADE.publish(bus, start=40)

        async def finish(after_min: int) -> int:
            later_ms = NOW_MS + after_min * 60_000
            return await finish_others(
                bus, store, topics=TOPICS, now_ms=lambda: later_ms, held=held
            )

        assert await finish(20) == 0
        served.clear()
        assert [await finish(5), await finish(20), await finish(60)] == [0, 1, 0]
    assert of_telemetry(stored_rows(store, "run-1")) == of_telemetry(expected_rows(MADE.telemetry))
    assert all(manifest.compacted for manifest in store.manifests("run-1").values())


async def test_a_damaged_run_does_not_keep_a_later_one_from_finishing_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path / "store")

    async def held(run_id: str) -> bool:
        return False

    async with EmbeddedBus(tmp_path / "bus.db") as bus:
        for run in (made_run("damaged"), MADE):
            await run.publish(bus, stop=40)
            await archive_run(bus, store, run.run_id, topics=TOPICS, now_ms=lambda: NOW_MS)
        (tmp_path / "store" / manifest_path("damaged", "issues")).write_text("{")
        later_ms = NOW_MS + 20 * 60_000
        done = await finish_others(bus, store, topics=TOPICS, now_ms=lambda: later_ms, held=held)

    assert done == 1
    assert store.manifests("run-1")["telemetry"].compacted
    assert "run damaged is not archived" in caplog.text


def test_upkeep_looks_after_the_others_of_a_damaged_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    for run in (made_run("damaged"), MADE):
        write(store, run.telemetry, run.run_id)
    (tmp_path / manifest_path("damaged", "issues")).write_text("{")
    Upkeep(store, topics=TOPICS).run_due(FORGOTTEN_MS * 2)
    assert store.manifests("run-1")["telemetry"].compacted
    assert "failed for damaged" in caplog.text


# -- what is kept --------------------------------------------------------------------------


def stored(
    run_id: str, *, ended_ms: int | None, size: int = 100, state: str = "ended"
) -> StoredRun:
    return StoredRun(run_id, (), 1, ended_ms, state, "", {}, None, size, updated_ms=ended_ms or 0)


NOW_MS = 100 * 24 * 3_600_000
RUNS = [
    stored("old", ended_ms=NOW_MS - 40 * 86_400_000),
    stored("new", ended_ms=NOW_MS - 1_000),
    stored("mid", ended_ms=NOW_MS - 20 * 86_400_000),
    replace(stored("live", ended_ms=None, state="running"), updated_ms=NOW_MS - 1_000),
]


@pytest.mark.parametrize(
    ("keep", "gone"),
    [
        (Keep(), []),
        (Keep(runs=4, size_bytes=400, age_ms=50 * 86_400_000), []),
        (Keep(runs=2), ["old", "mid"]),
        (Keep(size_bytes=310), ["old"]),
        (Keep(age_ms=30 * 86_400_000), ["old"]),
        (Keep(runs=1, size_bytes=1), ["old", "mid", "new"]),
        (Keep(size_bytes=1), ["old", "mid"]),
    ],
)
def test_the_oldest_go_first_and_live_ones_never(keep: Keep, gone: list[str]) -> None:
    assert [one.run_id for one in expired_runs(RUNS, keep, NOW_MS)] == gone


def test_a_run_of_which_nothing_came_for_days_is_not_live() -> None:
    lost = replace(RUNS[-1], updated_ms=NOW_MS - FORGOTTEN_MS - 1)
    assert [one.run_id for one in expired_runs([lost], Keep(runs=0), NOW_MS)] == ["live"]


def test_a_deleted_run_is_gone_and_may_come_again(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    other: MadeRun = made_run("run-2")
    write(store, MADE.telemetry)
    write(store, other.telemetry, "run-2")

    gone = make_room(store, Keep(runs=1), NOW_MS + 2**41)

    assert [one.run_id for one in gone] == ["run-1"]
    assert [run.run_id for run in store.runs()] == ["run-2"]
    assert not (tmp_path / run_folder("run-1")).exists()
    write(store, MADE.telemetry)
    assert len(open_run("run-1", store=store).steps()) == 20


@pytest.mark.parametrize(("place", "counted"), [("here", 10**6), ("file:///other", 0), ("s3", 0)])
def test_only_tensors_that_are_saved_in_the_store_count(
    tmp_path: Path, place: str, counted: int
) -> None:
    store = open_store(tmp_path)
    run = RunBuilder("run-1")
    path = tensors_path("run-1", run.incarnation, "weights", step=1, rank=0)
    root = {"here": tmp_path.as_uri(), "s3": "s3://ml/tensors"}.get(place, place)
    if place == "here":
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_bytes(b"tensors")
    run.event(
        TensorsSaved(
            run_id=run.run_id,
            incarnation=run.incarnation,
            rank=0,
            world_size=1,
            collection="weights",
            step=1,
            uri=f"{root}/{path}",
            path=path,
            size_bytes=10**6,
            tensors=(),
        )
    )

    write(store, run.records)

    manifest = store.manifests("run-1")["telemetry"]
    assert manifest.size_bytes - sum(file.size_bytes for file in manifest.files) == counted


@pytest.mark.parametrize(
    "finish",
    [
        lambda store: make_room(store, Keep(), 1),
        lambda store: Upkeep(store, topics=TOPICS, keep=Keep()).run_due(1),
    ],
)
def test_a_deletion_that_was_killed_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finish: Callable[[Store], object]
) -> None:
    store = open_store(tmp_path)
    write(store, MADE.telemetry)
    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "delete", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            delete_run(store, "run-1", NOW_MS)

    assert list(store.runs()) == []
    assert store.manifests("run-1") == {}
    finish(store)
    assert not (tmp_path / run_folder("run-1")).exists()


class Meanwhile(LocalStorage):
    """Lets something happen once a run is marked, and before its files are deleted."""

    happen: Callable[[], None] = staticmethod(lambda: None)

    def delete(self, paths: Iterable[str]) -> None:
        """What happens comes first."""
        happen, self.happen = self.happen, lambda: None
        happen()
        super().delete(paths)


def started_again() -> list[Record]:
    """What comes on the bus behind `MADE`: the same run in a new incarnation, which trains."""
    run = RunBuilder("run-1", incarnation="made-2")
    run.boot = "again"
    run.wait(3_600)
    run.started()
    run.steps(range(3), loss=0.5)
    return [replace(one, offset=one.offset + len(MADE.telemetry)) for one in run.records]


@pytest.mark.parametrize("finishing", [False, True])
def test_what_a_run_writes_that_starts_again_while_it_is_deleted_stays(
    tmp_path: Path, finishing: bool
) -> None:
    storage = Meanwhile(tmp_path)
    store = Store(storage)
    write(store, MADE.telemetry)
    saved = tmp_path / tensors_path("run-1", MADE.incarnation, "weights", step=1, rank=0)
    new = tmp_path / tensors_path("run-1", "made-2", "weights", step=1, rank=0)
    for path in (saved, new):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"tensors")

    def die() -> None:
        raise KeyboardInterrupt

    if finishing:
        storage.happen = die
        with pytest.raises(KeyboardInterrupt):
            delete_run(store, "run-1", NOW_MS)
    storage.happen = lambda: write(open_store(tmp_path), started_again())
    if finishing:
        finish_deletion(store, run_folder("run-1"))
    else:
        assert delete_run(store, "run-1", NOW_MS)

    run = open_run("run-1", store=open_store(tmp_path))
    assert list(run.series("loss").values) == [0.5] * 3
    assert (saved.exists(), new.exists()) == (False, True)
    named = {file.path for file in store.manifests("run-1")["telemetry"].files}
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.parquet")} == named


def answers(run: MadeRun) -> list[Taken]:
    """What rules and actions published of it, as records of the bus."""
    made = [
        Record(one.partition, offset, NOW_MS, one.key, one.value, one.headers)
        for offset, one in enumerate(run.others)
        if one.partition.topic == TOPICS.issues
    ]
    return [found[1] for found in (read_record(record, "issues") for record in made) if found]


def test_the_first_file_of_a_family_stays_that_is_written_during_a_deletion(
    tmp_path: Path,
) -> None:
    store = open_store(tmp_path)
    write(store, MADE.telemetry)

    def deleted_meanwhile(point: str) -> None:
        if point == "files_written" and store.manifests("run-1"):
            assert delete_run(open_store(tmp_path), "run-1", NOW_MS)

    flush(
        *(store, "run-1", "issues", answers(MADE)),
        runs_topic=TOPICS.runs,
        now_ms=NOW_MS,
        crash=deleted_meanwhile,
    )

    files = store.manifests("run-1")["issues"].files
    assert files
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.parquet")} == {
        file.path for file in files
    }


def test_a_run_goes_with_the_samples_of_a_training_that_never_came(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    run = RunBuilder("run-1", incarnation="made-2")
    run.boot = "again"
    run.system({"cpu.percent": [50.0]})
    samples = [replace(one, offset=one.offset + len(MADE.telemetry)) for one in run.records]
    write(store, [*MADE.telemetry, *samples])
    manifest = store.manifests("run-1")["telemetry"]
    assert "made-2" in {file.incarnation for file in manifest.files}
    assert "made-2" not in manifest.trainings

    assert delete_run(store, "run-1", NOW_MS)

    assert not list(tmp_path.glob("run=*"))


def test_the_trainings_of_a_deleted_run_do_not_come_back_with_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    write(store, MADE.telemetry)
    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "delete", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            delete_run(store, "run-1", NOW_MS)
    write(store, started_again())
    assert list(store.manifests("run-1")["telemetry"].trainings) == ["made-2"]


def test_a_run_without_telemetry_is_not_deleted(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    flush(store, "run-1", "issues", answers(MADE), runs_topic=TOPICS.runs, now_ms=NOW_MS)
    files = set(store.storage.files(""))
    assert not delete_run(store, "run-1", NOW_MS)
    finish_deletion(store, run_folder("run-1"))
    assert set(store.storage.files("")) == files


def test_a_run_that_has_started_again_is_not_deleted(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write(store, MADE.telemetry)
    write(store, started_again())
    files = set(store.storage.files(""))

    assert not delete_run(store, "run-1", 2)

    assert set(store.storage.files("")) == files
    assert [run.run_id for run in store.runs()] == ["run-1"]


def test_a_run_is_deleted_though_a_manifest_is_damaged(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for run in (MADE, made_run("run-2")):
        write(store, run.telemetry, run.run_id)
        (tmp_path / manifest_path(run.run_id, "issues")).write_text("{")

    gone = make_room(store, Keep(runs=0), NOW_MS)

    assert {one.run_id for one in gone} == {"run-1", "run-2"}
    assert not list(tmp_path.glob("run=*"))


def test_a_file_that_is_gone_is_said(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write(store, MADE.telemetry)
    for path in tmp_path.glob("run=*/**/*.parquet"):
        path.unlink()
    with pytest.raises(DamagedStore, match="are missing that its manifest names"):
        open_run("run-1", store=store).series("loss")


# -- the section ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ("{endpoint: 'http://x'}", "'endpoint' is for a bucket"),
        ("{url: /data, region: eu}", "'region' is for a bucket"),
        ("{keep: {}}", "expected at least one of"),
        ("{keep: {bytes: 10kB}}", "expected at least 1MB"),
        ("{keep: {bytes: 10}}", "expected a size with its unit"),
        ("ftp://x", "expected a folder, or s3://"),
        ("s3://key:pass@bucket", "credentials do not belong"),
        ("{every: 1d}", "expected 1s to 6h"),
    ],
)
def test_what_is_wrong_with_the_section(section: str, problem: str) -> None:
    config, problems = check_config(f"version: 1\nstore: {section}\n", "tocsin.yaml")
    found = [one.message for one in problems]
    found += [] if config is None else [one.message for one in store_problems(config)]
    assert any(problem in message for message in found), found


@pytest.mark.parametrize(
    ("section", "enabled", "url"),
    [("off", False, None), ("/data/store", True, "/data/store"), ("{every: 1m}", True, None)],
)
def test_short_forms(section: str, enabled: bool, url: str | None) -> None:
    config, problems = check_config(f"version: 1\nstore: {section}\n", "tocsin.yaml")
    assert problems == []
    assert config is not None
    assert (config.store.enabled, config.store.url) == (enabled, url)
