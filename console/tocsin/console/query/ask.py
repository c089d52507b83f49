"""From a command to an answer: which files and facts, within which limits, with its progress."""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tocsin.bus.port import BusError, MissingBus, UnknownTopic
from tocsin.console.context import CommandContext
from tocsin.console.run_lookup import store_of
from tocsin.console.views.bus_view import read_view
from tocsin.console.views.selection import choose_run
from tocsin.schemas.configuration.values import parse_duration
from tocsin.schemas.errors import ConfigurationError, require_extra
from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.records.runs_fold import RunsView

if TYPE_CHECKING:
    from tocsin.store.catalog import FileOfRun, Store
    from tocsin.store.query.engine import Answer
    from tocsin.store.query.facts import Cell
    from tocsin.store.query.live_files import Known

_NUMBERS: Final = re.compile(r"\b(steps|tensors|system)\b", re.IGNORECASE)
"""Tables whose rows may be on the bus alone."""

_QUIET_S: Final = 1.0
"""A question that is answered so soon shows no progress."""


@dataclass(frozen=True, slots=True)
class Question:
    """What was asked: SQL over these runs (none: all), and what it may take."""

    sql: str
    runs: Sequence[str]
    timeout: str
    memory_mb: int


def ask(context: CommandContext, question: Question, *, progress: bool) -> Answer:
    """The answer. Blocks.

    Raises:
        WrongQuery: the SQL is wrong, or not allowed. ConfigurationError: an option is.
        QueryTooLarge: it takes more time or memory than it may.
        MissingExtra: the extra `store` is not installed.
    """
    require_extra("store", "tocsin query", "duckdb")
    from tocsin.store.catalog import despite_merges

    return despite_merges(partial(_ask, context, question, progress), of="the store")


def _ask(context: CommandContext, question: Question, progress: bool) -> Answer:
    from tocsin.store.query.engine import Engine, Limits
    from tocsin.store.query.facts import facts_of
    from tocsin.store.query.stored_facts import fold_stored

    try:
        timeout_s = parse_duration(question.timeout) / timedelta(seconds=1)
    except ValueError as error:
        raise ConfigurationError(f"--timeout {question.timeout[:40]!r}: {error}") from None
    store = store_of(context)
    folder = tempfile.TemporaryDirectory(prefix="tocsin-query-")
    try:
        stored = [] if store is None else [run.run_id for run in store.runs()]
        view, live, known = asyncio.run(
            _read_bus(context, store, stored, question, Path(folder.name))
        )
        if not stored and not view.runs:
            where = "" if store is None else f"in the store {store.url} or "
            raise ConfigurationError(
                f"no runs {where}on {context.settings.bus.url}; try: tocsin run -- python train.py"
            )
        files = list(live)
        wanted = {_chosen(view, stored, text) for text in question.runs}
        if store is not None:
            # And those that were archived for the first time since they were listed.
            there = dict.fromkeys([*stored, *known])
            chosen = [one for one in there if not wanted or one in wanted]
            # Those on the bus, too: of a long run its first issues have expired there.
            fold_stored(store, view, context.topics, chosen)
            for run_id in chosen:
                manifests = known[run_id] if run_id in known else store.manifests(run_id)
                files += store.files_of(manifests.values())
        engine = Engine(
            files,
            facts_of(view, frozenset(wanted) or None),
            Limits(timeout_s=timeout_s, memory_mb=question.memory_mb),
        )
        line = _Progress() if progress else None
        try:
            answer = engine.ask(question.sql, line)
        finally:
            if line is not None:
                line.clear()
    except BaseException:
        folder.cleanup()
        raise

    def rows() -> Iterator[Sequence[Cell]]:
        with folder:
            yield from answer.rows

    return replace(answer, rows=rows())


async def _read_bus(
    context: CommandContext,
    store: Store | None,
    stored: Sequence[str],
    question: Question,
    folder: Path,
) -> tuple[RunsView, Sequence[FileOfRun], Known]:
    """What is on the bus, numbers of it that the store has not, and what the store has of these
    runs; nothing, and a line on stderr, if the bus is away: the store is there."""
    from tocsin.store.query.live_files import MAX_RUNS, behind, live_files

    view, topics = RunsView(), context.topics
    known: Known = {}
    try:
        async with context.open_bus(create=False) as bus:
            view = await read_view(bus, topics)
            if not _NUMBERS.search(question.sql):
                return view, (), known
            wanted = {_chosen(view, stored, one) for one in question.runs}
            views = [run for run in view.runs if not wanted or run.run_id in wanted]
            if store is not None:
                known = {one.run_id: store.manifests(one.run_id) for one in views}
            runs = behind(known, views, topics)
            if len(runs) > MAX_RUNS:
                print(
                    f"tocsin: of {len(runs) - MAX_RUNS:,} more runs the newest numbers are on the "
                    "bus alone and not read; --run names a run, `tocsin archive` stores all",
                    file=sys.stderr,
                )
            live = await live_files(
                bus, known, runs[:MAX_RUNS], folder, topics=topics, now_ms=unix_ms
            )
            return view, live, known
    except (MissingBus, UnknownTopic):
        pass
    except BusError as error:
        print(f"tocsin: only the store is read: {error}", file=sys.stderr)
    return view, (), {}


def _chosen(view: RunsView, stored: Sequence[str], text: str) -> str:
    if text in stored:
        return text
    runs = [*view.runs]
    known = {run.run_id for run in runs}
    runs += [
        RunView(run_id=one, incarnation="", state="ended") for one in stored if one not in known
    ]
    return choose_run(runs, text).run_id


class _Progress:
    """A line on the terminal's stderr, written over and over."""

    def __init__(self) -> None:
        self._calls = 0
        self._shown = False

    def __call__(self, percent: float | None) -> None:
        self._calls += 1
        if self._calls * 0.05 < _QUIET_S:
            return
        self._shown = True
        known = "" if percent is None else f" {percent:.0f} %"
        print(f"\rtocsin: reading{known} ", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Take the line away."""
        if self._shown:
            print("\r" + " " * 30 + "\r", end="", file=sys.stderr, flush=True)
