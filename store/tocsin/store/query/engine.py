"""Runs one question in a DuckDB that can read the store's files and nothing else.

What a person or an agent types is not trusted: it may be a single SELECT. Files beside those of the
store, the network, extensions, the variables of this process and its own settings are out of reach,
and there is a limit on time, memory and threads.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Final, TypeVar

import duckdb

from tocsin.schemas.errors import ConfigurationError
from tocsin.store.catalog import FileOfRun
from tocsin.store.errors import DamagedStore, StoreError
from tocsin.store.parquet.duck import is_gone
from tocsin.store.query.facts import Cell, Facts
from tocsin.store.query.tables import FILES, NUMBERS, view_of

TABLES: Final = ("runs", "steps", "tensors", "system", "issues", "deliveries")

_FETCH: Final = 10_000
_POLL_S: Final = 0.05

_EXPLAIN: Final = r"\s*EXPLAIN\s+(ANALYZE\s+)?(SELECT|FROM|WITH)\b"

T = TypeVar("T")
Progress = Callable[[float | None], None]
"""Called a few times a second with the percentage that is done; None: not known."""


class WrongQuery(StoreError, ConfigurationError):
    """The SQL is wrong, or not allowed; the message says where and what was expected."""


class QueryTooLarge(StoreError):
    """The question needs more time or memory than it may have."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one question may take."""

    timeout_s: float = 60.0
    memory_mb: int = 1_024
    threads: int = 2


_DEFAULT: Final = Limits()


@dataclass(frozen=True, slots=True)
class Answer:
    """The columns with their SQL types, and the rows, which are read as they are asked for."""

    columns: Sequence[tuple[str, str]]
    rows: Iterator[Sequence[Cell]]


class Engine:
    """One connection for one question. Blocks.

    Args:
        files: those of the store that count.
        facts: the tables that are in memory.

    Raises:
        DamagedStore: a file cannot be read.
    """

    def __init__(
        self,
        files: Sequence[FileOfRun],
        facts: Mapping[str, Facts],
        limits: Limits = _DEFAULT,
    ) -> None:
        self._files = files
        self._facts = facts
        self._limits = limits

    def ask(self, sql: str, progress: Progress | None = None) -> Answer:
        """The answer to one SELECT. The time limit is also that of reading its rows.

        Raises:
            WrongQuery: it is no single SELECT, it has an error, or it reaches for something else.
            QueryTooLarge: it takes more time or memory than it may.
            FileNotFoundError: a file was merged into another one meanwhile.
        """
        connection = self._connect()
        started_s = time.monotonic()
        try:
            self._define(connection, sql)
            _check(connection, sql)
            cursor = self._within(
                connection, lambda: connection.execute(sql), started_s, progress or _silent
            )
        except BaseException:
            connection.close()
            raise
        columns = [(str(one[0]), str(one[1])) for one in cursor.description or ()]

        def rows() -> Iterator[Sequence[Cell]]:
            try:
                while some := self._within(
                    connection, lambda: cursor.fetchmany(_FETCH), started_s, _silent
                ):
                    for row in some:
                        yield [_cell(value) for value in row]
            except FileNotFoundError as error:
                raise DamagedStore(
                    "a file was merged into another one while the answer was read; ask again"
                ) from error
            finally:
                connection.close()

        return Answer(columns, rows())

    def _connect(self) -> duckdb.DuckDBPyConnection:
        limits = self._limits
        return duckdb.connect(
            ":memory:",
            config={
                "threads": limits.threads,
                "memory_limit": f"{limits.memory_mb}MB",
                "autoinstall_known_extensions": False,
                "autoload_known_extensions": False,
                "allow_community_extensions": False,
                # A query that needs more memory than it may have ends; it does not fill the disk.
                "temp_directory": "",
                "python_enable_replacements": False,
            },
        )

    def _define(self, connection: duckdb.DuckDBPyConnection, sql: str) -> None:
        """Make the tables that the text may mean, then shut the door."""
        wanted = {name for name in TABLES if re.search(rf"\b{name}\b", sql, re.IGNORECASE)}
        chosen: list[Path] = []
        connection.execute(
            f"CREATE TABLE {FILES} (path VARCHAR, run_id VARCHAR, incarnation VARCHAR, "
            "collection VARCHAR)"
        )
        by_table: dict[str, list[FileOfRun]] = {
            table: [one for one in self._files if one.file.kind == kind and table in wanted]
            for table, kind in NUMBERS.items()
        }
        rows = [
            [str(one.path), one.run_id, one.file.incarnation, one.file.collection]
            for files in by_table.values()
            for one in files
        ]
        _insert(
            connection, FILES, ["VARCHAR"] * 4, [list(column) for column in zip(*rows, strict=True)]
        )
        for table, files in by_table.items():
            paths = [one.path for one in files]
            chosen += paths
            connection.execute(f"CREATE VIEW {table} AS {view_of(table, paths)}")
        for table, facts in self._facts.items():
            types = ", ".join(f'"{name}" {kind}' for name, kind, _ in facts.columns)
            connection.execute(f"CREATE TABLE {table} ({types})")
            if table in wanted:
                _insert(connection, table, [kind for _, kind, _ in facts.columns], facts.values)
        listed = ", ".join("'" + str(path).replace("'", "''") + "'" for path in chosen)
        # Times are in UTC without a zone; `now()` is compared with them by the zone of the session.
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute(f"SET allowed_paths = [{listed}]")
        connection.execute("SET enable_external_access = false")
        connection.execute("SET lock_configuration = true")

    def _within(
        self,
        connection: duckdb.DuckDBPyConnection,
        work: Callable[[], T],
        started_s: float,
        progress: Progress,
    ) -> T:
        """What `work` returns, if it does within the limits."""
        over, late = threading.Event(), threading.Event()

        def watch() -> None:
            while not over.wait(_POLL_S):
                if time.monotonic() - started_s > self._limits.timeout_s:
                    late.set()
                    connection.interrupt()
                    return
                percent = connection.query_progress()
                progress(percent if percent >= 0 else None)

        watcher = threading.Thread(target=watch, name="tocsin-query", daemon=True)
        watcher.start()
        try:
            return work()
        except duckdb.InterruptException:
            if not late.is_set():
                raise KeyboardInterrupt from None
            raise QueryTooLarge(
                f"it took longer than {self._limits.timeout_s:g} s: ask for fewer runs or steps, "
                "or give it more time"
            ) from None
        except duckdb.OutOfMemoryException:
            raise QueryTooLarge(
                f"it needs more than {self._limits.memory_mb:,} MB of memory: ask for fewer runs "
                "or steps, or give it more memory"
            ) from None
        except duckdb.IOException as error:
            if is_gone(str(error)):
                raise FileNotFoundError(str(error)) from error
            raise DamagedStore(f"a file of the store cannot be read: {error}") from error
        except duckdb.Error as error:
            raise WrongQuery(_message(str(error))) from None
        finally:
            over.set()
            watcher.join()


def _silent(percent: float | None) -> None:
    """For who does not look."""


def _check(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    try:
        statements = connection.extract_statements(sql)
    except duckdb.Error as error:
        raise WrongQuery(_message(str(error))) from None
    if len(statements) != 1:
        raise WrongQuery(f"expected one SELECT, found {len(statements)} statements")
    kind = statements[0].type.name
    if kind == "MULTI":
        # A PIVOT whose columns come from the data is one: a table is made for them first.
        raise WrongQuery("write the values out that PIVOT makes columns of: PIVOT … ON x IN (…)")
    if kind not in ("SELECT", "EXPLAIN"):
        raise WrongQuery(
            f"expected a SELECT, found {kind}: tocsin query reads, and changes nothing"
        )
    # EXPLAIN ANALYZE of anything else would run it.
    if kind == "EXPLAIN" and not re.match(_EXPLAIN, sql, re.IGNORECASE):
        raise WrongQuery("expected EXPLAIN of a SELECT")


def _insert(
    connection: duckdb.DuckDBPyConnection,
    table: str,
    types: Sequence[str],
    columns: Sequence[Sequence[Cell]],
) -> None:
    """Fill a table from columns, each as one list."""
    if not columns or not columns[0]:
        return
    chosen = []
    for number, kind in enumerate(types):
        listed = "BIGINT" if kind == "TIMESTAMP" else kind
        text = f"unnest(CAST(${number + 1} AS {listed}[]))"
        chosen.append(f"epoch_ms({text})" if kind == "TIMESTAMP" else text)
    connection.execute(
        f"INSERT INTO {table} SELECT {', '.join(chosen)}", [list(column) for column in columns]
    )


def _message(text: str) -> str:
    """The message of DuckDB, without its hints at settings that are out of reach."""
    kept = [line.rstrip() for line in text.splitlines()]
    found = "\n".join(kept).strip()
    if "disabled by configuration" in found or "disabled through configuration" in found:
        return (
            f"{found}\ntocsin query reads the tables {', '.join(TABLES)}, and no other file or "
            "address"
        )
    return found


def _cell(value: object) -> Cell:
    """A value as Python and JSON know it: times as RFC 3339 in UTC, the rest as text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, datetime):
        return value.isoformat(timespec="microseconds") + ("" if value.tzinfo else "Z")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, list | dict | tuple):
        return json.dumps(value, default=str, ensure_ascii=False)
    return str(value)
