"""DuckDB: tables into Parquet files, several files into one, and questions to them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import duckdb
import numpy as np
import numpy.typing as npt

from tocsin.schemas.records.fields import readable
from tocsin.store.errors import DamagedStore, StoreError, StoreUnavailable
from tocsin.store.parquet.column_names import identifier
from tocsin.store.parquet.tables import Array, Names, Table

ROW_GROUP: Final = 100_000
"""Rows of a row group: what is read at least of a column."""

_FORMAT: Final = (
    f"(FORMAT parquet, COMPRESSION zstd, PARQUET_VERSION v2, ROW_GROUP_SIZE {ROW_GROUP})"
)

Value = str | int | float | None | Sequence[str]

Columns = Mapping[str, np.ma.MaskedArray[tuple[int], np.dtype[np.generic]] | Array]
"""Columns of an answer by name; NULL is masked."""


class Duck:
    """A DuckDB of its own, without a file and without the network. From any thread; one at a time.

    Args:
        threads: what it may use.
        memory_mb: of memory; a merge that needs more writes to its folder for that.
    """

    def __init__(self, *, threads: int = 2, memory_mb: int = 1_024) -> None:
        config: dict[str, str | bool | int | float | list[str]] = {
            "threads": threads,
            "memory_limit": f"{memory_mb}MB",
            # Not into the working folder of whoever reads.
            "temp_directory": "",
            # Never fetch code from the internet.
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        }
        self._connection = duckdb.connect(":memory:", config=config)
        self._lock = threading.Lock()
        self._spill: Path | None = None

    def close(self) -> None:
        """Let go of its memory."""
        self._connection.close()

    def write(self, tables: Sequence[Table], target: Path, *, order: str, spill: Path) -> None:
        """Write tables of one kind into one file, in that order; a column that a table lacks is
        NULL there. What memory does not hold goes to `spill` meanwhile.

        Raises:
            StoreUnavailable: the disk is full.
        """
        parts: list[str] = []
        names: dict[str, list[str]] = {}
        with self._lock, self._spilling(spill):
            try:
                for number, table in enumerate(tables):
                    self._connection.register(f"t{number}", _plain(table))
                    chosen = []
                    for column, values in table.columns.items():
                        if isinstance(values, Names):
                            key = f"n{number}_{len(names)}"
                            names[key] = [readable(name) for name in values.names]
                            text = f"(CAST(${key} AS VARCHAR[]))[{identifier(column)} + 1]"
                            chosen.append(f"{text} AS {identifier(column)}")
                        elif values.dtype.kind == "f":
                            # DuckDB takes a NaN of numpy for NULL. All cells of a table are there.
                            kind = "FLOAT" if values.dtype.itemsize == 4 else "DOUBLE"
                            name = identifier(column)
                            chosen.append(f"coalesce({name}, 'NaN'::{kind}) AS {name}")
                        else:
                            chosen.append(identifier(column))
                    parts.append(f"SELECT {', '.join(chosen)} FROM t{number}")
                rows = " UNION ALL BY NAME ".join(parts) + f" ORDER BY {order}"
                with _errors(writing=True):
                    self._connection.execute(f"COPY ({rows}) TO {_text(target)} {_FORMAT}", names)
            finally:
                for number in range(len(tables)):
                    self._connection.unregister(f"t{number}")

    def merge(self, sources: Sequence[Path], target: Path, *, order: str, spill: Path) -> None:
        """All rows of some files into one, in that order; what memory does not hold goes to `spill`
        meanwhile.

        Raises:
            StoreUnavailable: the disk is full. DamagedStore: a file cannot be read.
        """
        with self._lock, self._spilling(spill), _errors(writing=True):
            self._connection.execute(
                f"COPY (SELECT * FROM {reading(sources)} ORDER BY {order}) "
                f"TO {_text(target)} {_FORMAT}"
            )

    @contextlib.contextmanager
    def _spilling(self, folder: Path) -> Iterator[None]:
        if self._spill is None:
            self._connection.execute(f"SET temp_directory = {_text(folder)}")
            self._spill = folder
        # DuckDB makes it once. Whoever tidies up deletes it when it was not used for a day.
        self._spill.mkdir(parents=True, exist_ok=True)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                self._spill.rmdir()

    def ask(self, sql: str, values: Mapping[str, Value] | None = None) -> dict[str, Array]:
        """The columns of the answer: numbers, and objects for text.

        Raises:
            DamagedStore: a file cannot be read. FileNotFoundError: it is gone.
        """
        return {name: np.ma.getdata(column) for name, column in self.columns(sql, values).items()}

    def columns(self, sql: str, values: Mapping[str, Value] | None = None) -> Columns:
        """The same, with NULL masked. Raises as `ask` does."""
        with self._lock, _errors(writing=False):
            found: Columns = self._connection.execute(sql, dict(values or {})).fetchnumpy()
        return found

    def ask_about(
        self, names: Sequence[str], sql: str, values: Mapping[str, Value] | None = None
    ) -> dict[str, Array]:
        """The same, with the table `names` of the columns `name` and `number`, from 0."""
        text: npt.NDArray[np.object_] = np.array([*names, None], object)[:-1]
        numbers = np.arange(len(names))
        with self._lock, _errors(writing=False):
            self._connection.register("names", {"name": text, "number": numbers})
            try:
                found = self._connection.execute(sql, dict(values or {})).fetchnumpy()
            finally:
                self._connection.unregister("names")
        return {name: np.ma.getdata(column) for name, column in found.items()}

    def rows(self, sql: str, values: Mapping[str, Value] | None = None) -> list[tuple[object, ...]]:
        """The rows of the answer, as Python values; NULL is None. Raises as `ask` does."""
        with self._lock, _errors(writing=False):
            found: list[tuple[object, ...]] = self._connection.execute(
                sql, dict(values or {})
            ).fetchall()
        return found


def reading(paths: Sequence[Path]) -> str:
    """Some files as one table, in SQL. A column that a file lacks is NULL there."""
    listed = ", ".join(_text(path) for path in paths)
    return f"read_parquet([{listed}], union_by_name = true, hive_partitioning = false)"


def is_gone(text: str) -> bool:
    """Whether DuckDB reports with this text that a file is gone."""
    return any(one in text for one in ("No files found", "No such file", "Cannot open file"))


def _plain(table: Table) -> dict[str, Array]:
    return {
        name: np.ascontiguousarray(values.codes if isinstance(values, Names) else values)
        for name, values in table.columns.items()
    }


def _text(path: Path) -> str:
    return "'" + str(path).replace("'", "''") + "'"


@contextlib.contextmanager
def _errors(*, writing: bool) -> Iterator[None]:
    try:
        yield
    except (duckdb.IOException, duckdb.OutOfMemoryException) as error:
        text = str(error).splitlines()[0]
        if is_gone(text):
            raise FileNotFoundError(text) from error
        if writing:
            raise StoreUnavailable(f"a file of the store could not be written: {text}") from error
        raise DamagedStore(f"a file of the store cannot be read: {text}") from error
    except duckdb.InvalidInputException as error:
        raise DamagedStore(f"a file of the store cannot be read: {error}") from error
    except duckdb.Error as error:
        raise StoreError(f"DuckDB could not do it: {error}") from error
