"""Runs that only the store has, on a page that stays open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from support.buses import World
from support.configured_buses import context_on
from tocsin.console.page.stored import StoredRuns
from tocsin.console.watch.state import WatchState
from tocsin.schemas.topics import Topics
from tocsin.store import Store
from tocsin.store.values import StoredRun


class Manifests:
    """A store of which the events cannot be read."""

    def __init__(self, *runs: StoredRun) -> None:
        self.listed = list(runs)

    def runs(self) -> list[StoredRun]:
        return self.listed


async def test_a_run_that_goes_on_in_the_store_goes_on_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tocsin.store.query.stored_facts.fold_stored", lambda *_: None)
    running = StoredRun("past", ("i",), 1000, None, "running", "", {}, 500, 10, 2000)
    store, state = Manifests(running), WatchState(Topics("tocsin"), None, 100)
    context = context_on(World("embedded", f"embedded:{tmp_path / 'bus.db'}"), tmp_path)
    stored = StoredRuns(context, cast(Store, store), lambda: state, lambda: None)

    def shown() -> Mapping[str, object]:
        run = state.view.run("past")
        assert run is not None
        return {"state": run.state, "outcome": run.outcome, "step": run.last_step}

    await stored.read_once()
    assert shown() == {"state": "running", "outcome": None, "step": 500}
    store.listed = [
        replace(
            running, state="ended", outcome="failed", last_step=900, ended_ms=99, updated_ms=3000
        )
    ]
    await stored.read_once()
    assert shown() == {"state": "ended", "outcome": "failed", "step": 900}
