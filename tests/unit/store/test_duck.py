"""DuckDB as the store uses it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from tocsin.store.parquet.duck import Duck
from tocsin.store.parquet.tables import Table


def test_its_folder_may_be_deleted_between_two_merges(tmp_path: Path) -> None:
    duck, spill = Duck(threads=1, memory_mb=40), tmp_path / "spill"
    rows = np.random.default_rng(0).integers(0, 2**62, 300_000)
    source = tmp_path / "source.parquet"
    table = Table({f"c{number}": rows + number for number in range(12)})
    Duck().write([table], source, order="c0", spill=tmp_path / "other")

    for name in ("one", "two"):
        duck.merge([source], tmp_path / name, order="c1 DESC", spill=spill)
        shutil.rmtree(spill, ignore_errors=True)

    assert (tmp_path / "two").stat().st_size == (tmp_path / "one").stat().st_size
