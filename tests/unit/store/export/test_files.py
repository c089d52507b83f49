"""A run as CSV, JSON lines and Parquet, read back by pandas and DuckDB."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import get_args

import duckdb
import pandas as pd
import pytest

from tocsin.store import Run
from tocsin.store.errors import StoreUnavailable
from tocsin.store.export.files import Format, export_files

TABLES = {"runs", "issues", "deliveries", "steps", "tensors", "system"}


@pytest.mark.parametrize("form", get_args(Format))
def test_each_table_is_a_file_with_all_rows(run: Run, tmp_path: Path, form: Format) -> None:
    counts = export_files(run, tmp_path / "new", form)
    assert {path.name for path in counts} == {f"{table}.{form}" for table in TABLES}
    assert {path.name for path in (tmp_path / "new").iterdir()} == {path.name for path in counts}
    rows = {path.stem: count for path, count in counts.items()}
    assert rows["runs"] == rows["issues"] == 1
    assert rows["deliveries"] == 0
    assert rows["steps"] == 19
    assert rows["system"] == 2


def test_csv_is_what_pandas_reads(run: Run, tmp_path: Path) -> None:
    export_files(run, tmp_path, "csv")
    steps = pd.read_csv(tmp_path / "steps.csv")
    loss = steps[(steps["name"] == "loss") & (steps["mode"] == "train") & (steps["rank"] == 0)]
    assert loss["step"].tolist() == [0, 1, 2, 3, 4, 5]
    assert loss["value"][loss["step"] == 1].item() == 0.5
    assert math.isnan(loss["value"][loss["step"] == 3].item())
    assert pd.read_csv(tmp_path / "runs.csv")["outcome"].tolist() == ["failed"]
    with (tmp_path / "tensors.csv").open() as file:
        names = {row["tensor"] for row in csv.DictReader(file)}
    assert "w" in names
    assert len(names) == 2


def test_json_lines_have_words_for_what_is_not_finite(run: Run, tmp_path: Path) -> None:
    export_files(run, tmp_path, "jsonl")
    rows = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [one["value"] for one in rows if one["name"] == "loss" and one["step"] == 3] == [
        "NaN"
    ] * 2
    (issue,) = [json.loads(line) for line in (tmp_path / "issues.jsonl").read_text().splitlines()]
    assert issue["changed_at"].endswith("Z")
    assert issue["started_at"] is None


def test_parquet_has_types_and_keeps_nan(run: Run, tmp_path: Path) -> None:
    export_files(run, tmp_path, "parquet")
    connection = duckdb.connect()
    rows = connection.execute(
        f"SELECT step, value FROM '{tmp_path}/steps.parquet' WHERE name = 'loss' AND rank = 0 "
        "AND mode = 'train' ORDER BY step"
    ).fetchall()
    assert rows[1] == (1, 0.5)
    assert math.isnan(rows[3][1])
    kinds = dict(
        connection.execute(
            "SELECT column_name, column_type "
            f"FROM (DESCRIBE SELECT * FROM '{tmp_path}/runs.parquet')"
        ).fetchall()
    )
    assert kinds["started_at"] == "TIMESTAMP"
    assert connection.execute(
        f"SELECT count(*) FROM '{tmp_path}/deliveries.parquet'"
    ).fetchone() == (0,)
    connection.close()


def test_a_file_that_is_there_is_whole(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_files(run, tmp_path, "csv")
    before = (tmp_path / "steps.csv").read_text()

    def broken(*arguments: object) -> object:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Run, "series", broken)
    with pytest.raises(StoreUnavailable, match="No space left"):
        export_files(run, tmp_path, "csv")
    assert (tmp_path / "steps.csv").read_text() == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
