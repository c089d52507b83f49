"""The events of many runs of a store, folded into one view: one question for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tocsin.schemas.records.runs_fold import RunsView
from tocsin.schemas.records.wire import Meta
from tocsin.schemas.topics import Topics
from tocsin.store.catalog import Store, despite_merges
from tocsin.store.stored import StoredRecord


def fold_stored(store: Store, view: RunsView, topics: Topics, runs: Sequence[str]) -> None:
    """Add what the store has of the states, issues and deliveries of these runs to a view. Blocks.

    Raises:
        StoreUnavailable, DamagedStore: the store cannot be read.
        MissingExtra: the extra `store` is not installed.
    """
    known = RunsView()
    rows = despite_merges(partial(_rows, store, topics, runs), of="the store")
    for offset, append_ms, key, kind, version, rank, value in rows:
        known.apply(
            StoredRecord(
                int(str(offset)),
                int(str(append_ms)),
                str(key).encode(),
                None if value is None else str(value).encode(),
                Meta(str(kind), int(str(version)), int(str(rank))).headers(),
            )
        )
    view.fold(known)


def _rows(store: Store, topics: Topics, runs: Sequence[str]) -> Sequence[tuple[object, ...]]:
    """Raises FileNotFoundError: a file is gone."""
    paths = [one.path for run_id in runs for one in store.files(run_id, "events")]
    if not paths:
        return []
    duck = store.duck
    from tocsin.store.parquet.duck import reading

    return duck.rows(
        f"SELECT bus_offset, append_ms, key, type, version, rank, value FROM {reading(paths)} "
        "WHERE topic IN (SELECT unnest(CAST($topics AS VARCHAR[]))) "
        "ORDER BY topic = $runs DESC, append_ms, bus_offset",
        {
            "topics": [topics.runs, topics.issues, topics.actions, topics.control],
            "runs": topics.runs,
        },
    )
