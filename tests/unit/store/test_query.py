"""SQL over the runs of a store: its tables, what is refused, and its limits."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest

from support.records.made_runs import LAYERS, made_run
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.schemas.records.runs_fold import RunsView
from tocsin.schemas.topics import Topics
from tocsin.store.archive.once import archive_run
from tocsin.store.catalog import FileOfRun, Store
from tocsin.store.opening import open_store
from tocsin.store.query.engine import (
    TABLES,
    Engine,
    Limits,
    QueryTooLarge,
    WrongQuery,
)
from tocsin.store.query.facts import Cell, Facts, facts_of
from tocsin.store.query.stored_facts import fold_stored

USUAL: Final = Limits()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store with two runs, one of them sorted, and a secret beside it."""
    folder = tmp_path_factory.mktemp("it's a store")
    store = open_store(folder / "store")
    (folder / "secret.csv").write_text("a,b\n1,2\n")

    async def fill() -> None:
        async with EmbeddedBus(folder / "bus.db") as bus:
            for number, run_id in enumerate(("run-1", "run-2")):
                await made_run(run_id, steps=4 + number).publish(bus)
                await archive_run(
                    bus, store, run_id, topics=Topics(), now_ms=lambda: 0, over=number == 0
                )

    asyncio.run(fill())
    return store


@functools.cache
def read(store: Store) -> tuple[list[FileOfRun], Mapping[str, Facts]]:
    view = RunsView()
    fold_stored(store, view, Topics(), [run.run_id for run in store.runs()])
    return list(store.files()), facts_of(view)


def engine(store: Store, limits: Limits = USUAL) -> Engine:
    return Engine(*read(store), limits)


def ask(store: Store, sql: str, limits: Limits = USUAL) -> list[Sequence[Cell]]:
    return list(engine(store, limits).ask(sql).rows)


def test_runs_issues_and_deliveries_are_tables_of_newest_states(store: Store) -> None:
    rows = ask(
        store, "SELECT run_id, state, labels ->> 'team', started_at FROM runs ORDER BY run_id"
    )
    assert [row[:3] for row in rows] == [["run-1", "ended", "vision"], ["run-2", "ended", "vision"]]
    assert str(rows[0][3]).startswith("20")
    assert str(rows[0][3]).endswith("Z")
    joined = ask(
        store,
        "SELECT issues.rule, deliveries.state FROM issues JOIN deliveries USING (issue_id) "
        "WHERE issues.run_id = 'run-1'",
    )
    assert joined == [["nonfinite", "delivered"]]


def test_scalars_have_a_row_for_each_number(store: Store) -> None:
    rows = ask(
        store,
        "SELECT run_id, rank, count(*), max(value) FROM steps WHERE name = 'loss' "
        "AND mode = 'train' GROUP BY ALL ORDER BY ALL",
    )
    assert rows == [
        ["run-1", 0, 4, 1.0],
        ["run-1", 1, 4, 10.0],
        ["run-2", 0, 5, 1.0],
        ["run-2", 1, 5, 10.0],
    ]


def test_tensors_have_a_column_for_each_statistic_and_nan_stays_nan(store: Store) -> None:
    ((value, nans),) = ask(
        store,
        f"SELECT l2, nans FROM tensors WHERE tensor = '{LAYERS[2]}' AND run_id = 'run-1' "
        "AND collection = 'gradients'",
    )
    assert isinstance(value, float)
    assert math.isnan(value)
    assert nans == 0
    assert ask(store, "SELECT update_l2 FROM tensors WHERE update_l2 IS NOT NULL") == [[0.0]] * 2


def test_samples_of_nodes(store: Store) -> None:
    rows = ask(
        store,
        "SELECT DISTINCT name FROM system WHERE node = 'node' OR true ORDER BY name",
    )
    assert ["cpu.percent"] in rows
    assert ["gpu.0.utilization_percent"] in rows


@pytest.mark.parametrize("table", TABLES)
def test_each_table_is_there_even_in_an_empty_store(table: str, tmp_path: Path) -> None:
    empty = Engine([], facts_of(RunsView()))
    assert list(empty.ask(f"SELECT * FROM {table}").rows) == []
    assert list(empty.ask(f"DESCRIBE {table}").rows)
    names = {row[0] for row in empty.ask("SHOW TABLES").rows}
    assert set(TABLES) <= names


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_csv('{secret}')",
        "SELECT * FROM '{secret}'",
        "SELECT * FROM read_text('{secret}')",
        "SELECT * FROM read_blob('{secret}')",
        "SELECT * FROM sniff_csv('{secret}')",
        "SELECT * FROM glob('{folder}/*')",
        "SELECT * FROM read_parquet('{folder}/**/*.parquet')",
        "SELECT * FROM parquet_metadata('{folder}/x.parquet')",
        "SELECT * FROM read_parquet('https://example.com/x.parquet')",
        "SELECT * FROM read_parquet('s3://bucket/x.parquet')",
        "SELECT * FROM duckdb_secrets()",
        "SELECT getenv('HOME')",
        "SELECT * FROM sql",
        "SELECT * FROM query('COPY steps TO ''{folder}/out.csv''')",
        "COPY steps TO '{folder}/out.csv'",
        "COPY (SELECT 1) TO '{folder}/out.parquet'",
        "COPY steps FROM '{secret}'",
        "EXPORT DATABASE '{folder}/out'",
        "IMPORT DATABASE '{folder}'",
        "ATTACH '{folder}/out.db'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "FORCE INSTALL httpfs FROM community",
        "CREATE TABLE mine AS SELECT 1",
        "CREATE MACRO m() AS TABLE SELECT * FROM read_csv('{secret}')",
        "INSERT INTO runs (run_id) VALUES ('x')",
        "DELETE FROM runs",
        "DROP VIEW steps",
        "SET enable_external_access = true",
        "SET memory_limit = '100GB'",
        "PRAGMA enable_profiling",
        "CALL pragma_version()",
        "CREATE SECRET (TYPE s3)",
        "EXPLAIN ANALYZE COPY steps TO '{folder}/out.csv'",
        "EXPLAIN ANALYZE DELETE FROM runs",
        "PREPARE p AS COPY steps TO '{folder}/out.csv'",
        "VACUUM",
        "CHECKPOINT",
        "BEGIN",
        "SELECT 1; COPY steps TO '{folder}/out.csv'",
        "SELECT 1; SELECT 2",
        "",
        ";",
    ],
)
def test_a_question_reads_nothing_else_and_changes_nothing(store: Store, sql: str) -> None:
    folder = Path(store.url).parent
    before = sorted(folder.rglob("*"))
    text = sql.format(folder=str(folder).replace("'", "''"), secret="../secret.csv")
    with pytest.raises(WrongQuery):
        ask(store, text)
    assert sorted(folder.rglob("*")) == before


def test_an_error_shows_where_it_is(store: Store) -> None:
    with pytest.raises(WrongQuery) as caught:
        ask(store, "SELECT lss FROM steps")
    lines = str(caught.value).splitlines()
    assert 'Referenced column "lss" not found' in lines[0]
    assert lines[-1].index("^") == lines[-2].index("lss")
    with pytest.raises(WrongQuery, match=r'Did you mean "steps"'):
        ask(store, "SELECT * FROM stps")
    with pytest.raises(WrongQuery, match="tocsin query reads the tables runs, steps"):
        ask(store, "SELECT * FROM read_csv('x.csv')")
    with pytest.raises(WrongQuery, match="found 2 statements"):
        ask(store, "SELECT 1; SELECT 2")


def test_time_and_memory_are_limited(store: Store) -> None:
    long = "SELECT sum(a.range * b.range) FROM range(10000000) a, range(1000000) b"
    with pytest.raises(QueryTooLarge, match=r"longer than 0\.2 s"):
        ask(store, long, Limits(timeout_s=0.2))
    with pytest.raises(QueryTooLarge, match="more than 64 MB"):
        ask(store, "SELECT * FROM range(20000000) ORDER BY random()", Limits(memory_mb=64))


def test_progress_is_reported_while_a_question_runs(store: Store) -> None:
    seen: list[float | None] = []
    with pytest.raises(QueryTooLarge):
        engine(store, Limits(timeout_s=0.5)).ask(
            "SELECT sum(a.range * b.range) FROM range(10000000) a, range(1000000) b", seen.append
        )
    assert seen


def test_values_are_what_json_can_hold(store: Store) -> None:
    ((row),) = ask(
        store,
        "SELECT DATE '2026-01-02', TIMESTAMP '2026-01-02 03:04:05', [1, 2], {'a': 1}, NULL, true, "
        "1.5::DECIMAL(4, 2), 'x'::BLOB, 170141183460469231731687303715884105727::HUGEINT",
    )
    assert row[:6] == [
        "2026-01-02",
        "2026-01-02T03:04:05.000000Z",
        "[1, 2]",
        '{"a": 1}',
        None,
        True,
    ]
    assert row[6] == "1.50"


def test_a_question_may_have_many_rows(store: Store) -> None:
    assert len(ask(store, "SELECT * FROM range(25000)")) == 25_000
    assert ask(store, "EXPLAIN SELECT * FROM steps")
