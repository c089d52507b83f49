"""What is on the bus alone is in an answer too, and no row twice."""

from __future__ import annotations

from pathlib import Path

from support.records.made_runs import made_run
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.topics import Topics
from tocsin.store.archive.once import archive_run
from tocsin.store.opening import open_store
from tocsin.store.query.engine import Engine
from tocsin.store.query.live_files import behind, live_files

SQL = (
    "SELECT run_id, count(*), count(DISTINCT step) FROM steps WHERE name = 'loss' "
    "AND mode = 'train' AND rank = 0 GROUP BY run_id ORDER BY run_id"
)


async def test_the_tail_of_a_run_is_read_once(tmp_path: Path) -> None:
    store, topics = open_store(tmp_path / "store"), Topics()
    first, second = made_run("run-1"), made_run("run-2")
    views = [
        RunView(run_id=one.run_id, incarnation=one.incarnation, state="running", next_offset=1_000)
        for one in (first, second)
    ]
    async with EmbeddedBus(tmp_path / "bus.db") as bus:
        await first.publish(bus, stop=40)
        await archive_run(bus, store, "run-1", topics=topics, now_ms=lambda: 0)
        await first.publish(bus, start=40)
        await second.publish(bus)

        known = {run_id: store.manifests(run_id) for run_id in ("run-1", "run-2")}
        runs = behind(known, views, topics)
        live = await live_files(
            bus, known, runs, tmp_path / "live", topics=topics, now_ms=lambda: 0
        )

        assert sorted(runs) == ["run-1", "run-2"]
        files = [*store.files(), *live]
        rows = list(Engine(files, {}).ask(SQL).rows)
        assert rows == [["run-1", 20, 20], ["run-2", 20, 20]]
        alone = await live_files(
            bus, {}, ["run-2"], tmp_path / "alone", topics=topics, now_ms=lambda: 0
        )
        assert [row[:2] for row in Engine(list(alone), {}).ask(SQL).rows] == [["run-2", 20]]

        await archive_run(bus, store, "run-1", topics=topics, now_ms=lambda: 0)
        offset = store.manifests("run-1")["telemetry"].covered[topics.telemetry].next_offset
        done = views[0].model_copy(update={"next_offset": offset})
        assert behind({"run-1": store.manifests("run-1")}, [done], topics) == []
        assert behind({}, [done], topics) == ["run-1"]
