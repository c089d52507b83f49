"""A source of what is in Parquet files. See `tocsin.store.reading.source`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from tocsin.schemas.records.collections import Mode
from tocsin.store.manifest import Kind, StoredFile
from tocsin.store.parquet.column_names import column_of, identifier
from tocsin.store.parquet.duck import Duck, reading
from tocsin.store.reading.source import Cells, Contents, Points, Samples, no_points
from tocsin.store.values import Integers, Reals

_FIRST_SEEN: Final = "GROUP BY name ORDER BY min(bus_offset), name"


class ParquetSource:
    """The files of one incarnation.

    Args:
        locate: where a file is on this machine; raises FileNotFoundError.
    """

    def __init__(
        self, files: Sequence[StoredFile], duck: Duck, locate: Callable[[str], Path]
    ) -> None:
        self._files = files
        self._duck = duck
        self._locate = locate

    def steps(self, mode: Mode) -> Integers:
        """The steps that have a row of scalars; may repeat, in any order."""
        if (table := self._table("steps")) is None:
            return np.empty(0, np.int64)
        sql = f"SELECT DISTINCT step FROM {table} WHERE mode = $mode"
        return self._duck.ask(sql, {"mode": mode})["step"].astype(np.int64)

    def scalars(self, mode: Mode) -> Iterable[str]:
        """Names of the scalars of steps."""
        if (table := self._table("steps")) is None:
            return []
        sql = f"SELECT name FROM {table} WHERE mode = $mode {_FIRST_SEEN}"
        return [str(row[0]) for row in self._duck.rows(sql, {"mode": mode})]

    def scalar(self, name: str, mode: Mode, rank: int) -> Points:
        """One scalar; empty where there is none."""
        if (table := self._table("steps")) is None:
            return no_points()
        sql = (
            f"SELECT step, value, at_us FROM {table} "
            "WHERE name = $name AND mode = $mode AND rank = $rank ORDER BY step, bus_offset"
        )
        return self._points(sql, {"name": name, "mode": mode, "rank": rank})

    def ranks(self) -> frozenset[int]:
        """The ranks with a row of scalars or a summary."""
        found: set[int] = set()
        for kind in ("steps", "tensors"):
            if (table := self._table(kind)) is not None:
                rows = self._duck.ask(f"SELECT DISTINCT rank FROM {table}")["rank"]
                found.update(int(rank) for rank in rows)
        return frozenset(found)

    def collections(self) -> Mapping[str, Contents]:
        """What there is of tensors."""
        found = {}
        for name in dict.fromkeys(file.collection for file in self._files):
            files = self._files_of("tensors", name)
            if not files:
                continue
            table = self._read(files)
            names = self._duck.rows(
                f"SELECT tensor FROM {table} GROUP BY tensor ORDER BY min(bus_offset), min(place)"
            )
            steps = self._duck.ask(f"SELECT DISTINCT step FROM {table}")["step"]
            found[name] = Contents(
                tuple(str(row[0]) for row in names),
                tuple(dict.fromkeys(column for file in files for column in file.columns)),
                frozenset(int(step) for step in steps),
            )
        return found

    def statistic(
        self, collection: str, tensor: str, statistic: str, mode: Mode, rank: int
    ) -> Points:
        """One statistic or count of one tensor; empty where there is none."""
        files = self._with(collection, statistic)
        if not files:
            return no_points()
        column = identifier(column_of(statistic))
        sql = (
            f"SELECT step, {column} AS value, at_us FROM {self._read(files)} "
            f"WHERE tensor = $tensor AND mode = $mode AND rank = $rank AND {column} IS NOT NULL "
            "ORDER BY step, bus_offset"
        )
        return self._points(sql, {"tensor": tensor, "mode": mode, "rank": rank})

    def cells(self, collection: str, statistic: str, mode: Mode, rank: int) -> Cells:
        """One statistic or count of all tensors; empty where there is none."""
        files = self._with(collection, statistic)
        if not files:
            return Cells((), np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))
        column = identifier(column_of(statistic))
        table, values = self._read(files), {"mode": mode, "rank": rank}
        where = f"mode = $mode AND rank = $rank AND {column} IS NOT NULL"
        names = self._duck.rows(
            f"SELECT tensor FROM {table} WHERE {where} "
            "GROUP BY tensor ORDER BY min(bus_offset), min(place)",
            values,
        )
        known = [str(row[0]) for row in names]
        found = self._duck.ask_about(
            known,
            f"SELECT number, step, {column} AS value FROM {table} JOIN names ON tensor = name "
            f"WHERE {where} ORDER BY bus_offset, place",
            values,
        )
        return Cells(
            tuple(known),
            found["number"].astype(np.int64),
            found["step"].astype(np.int64),
            found["value"].astype(np.float64),
        )

    def nodes(self) -> frozenset[str]:
        """The nodes with samples."""
        if (table := self._table("system")) is None:
            return frozenset()
        rows = self._duck.rows(f"SELECT DISTINCT node FROM {table}")
        return frozenset(str(row[0]) for row in rows)

    def system(self, node: str) -> Samples:
        """All samples of a node; empty where there are none."""
        nothing = np.empty(0, np.int64)
        if (table := self._table("system")) is None:
            return Samples((), nothing, nothing, np.empty(0))
        rows = self._duck.rows(
            f"SELECT name FROM {table} WHERE node = $node {_FIRST_SEEN}", {"node": node}
        )
        columns = [str(row[0]) for row in rows]
        found = self._duck.ask_about(
            columns,
            f"SELECT number, at_us, value FROM {table} AS t JOIN names ON t.name = names.name "
            "WHERE node = $node ORDER BY bus_offset",
            {"node": node},
        )
        return Samples(
            tuple(columns),
            found["number"].astype(np.int64),
            found["at_us"].astype(np.int64),
            found["value"].astype(np.float64),
        )

    def _points(self, sql: str, values: Mapping[str, str | int]) -> Points:
        found = self._duck.ask(sql, values)
        reals: Reals = found["value"].astype(np.float64)
        return Points(found["step"].astype(np.int64), reals, found["at_us"].astype(np.int64))

    def _files_of(self, kind: Kind, collection: str = "") -> list[StoredFile]:
        return [one for one in self._files if (one.kind, one.collection) == (kind, collection)]

    def _with(self, collection: str, statistic: str) -> list[StoredFile]:
        return [one for one in self._files_of("tensors", collection) if statistic in one.columns]

    def _table(self, kind: Kind) -> str | None:
        files = [file for file in self._files if file.kind == kind]
        return self._read(files) if files else None

    def _read(self, files: Sequence[StoredFile]) -> str:
        return reading([self._locate(file.path) for file in files])
