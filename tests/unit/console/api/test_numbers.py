"""Series, matrices and samples by the API, off a bus; and how they are made shorter."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from support.records.issues import NOW_MS
from support.records.made_runs import LAYERS, made_run
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import MissingBus
from tocsin.console.api.bus_source import BusSource, view_of
from tocsin.console.api.numbers import cells, evenly, kept
from tocsin.console.api.operations import OPERATIONS
from tocsin.console.api.problems import ProblemError
from tocsin.schemas.configuration.sections import PricesConfig
from tocsin.schemas.topics import Topics
from tocsin.store import Run, StoredRun, open_run

MADE = made_run()
BY_NAME = {operation.name: operation for operation in OPERATIONS}
OLD = StoredRun(
    run_id="old-run",
    incarnations=("i0", "i1"),
    started_ms=5,
    ended_ms=9,
    state="ended",
    outcome="completed",
    labels={"team": "vision"},
    last_step=7,
    size_bytes=100,
)


class Asking:
    """A source over a bus, as a server has it, and the loop in which it lives."""

    def __init__(self, path: Path, loop: asyncio.AbstractEventLoop) -> None:
        self.path = path
        self.loop = loop
        self.opened: list[str] = []
        self.folded: list[str] = []
        self.stored: list[StoredRun] = [OLD]
        self.source = BusSource(
            lambda: EmbeddedBus(path, create=False),
            Topics(),
            open_run=self._open,
            stored=lambda: self.stored,
            fold_stored=lambda view, runs: self.folded.extend(runs),
            prices=PricesConfig(),
        )

    def _open(self, run_id: str, incarnation: str | None) -> Run:
        self.opened.append(run_id)
        return open_run(run_id, bus=self.path, incarnation=incarnation)

    def __call__(self, name: str, about: str = "", /, **given: object) -> Any:
        """The answer of an operation, which fits its model."""
        operation = BY_NAME[name]
        asked = operation.request(self.source, given, NOW_MS, about)
        answer = self.loop.run_until_complete(operation.handler(asked))
        operation.answer.model_validate(answer)
        return answer

    def refused(self, name: str, about: str = "", /, **given: object) -> str:
        """Why a request is refused."""
        with pytest.raises(ProblemError) as caught:
            self(name, about, **given)
        return str(caught.value)


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asking]:
    path = tmp_path_factory.mktemp("bus") / "bus.db"
    loop = asyncio.new_event_loop()

    async def fill() -> None:
        async with EmbeddedBus(path) as bus:
            await MADE.publish(bus)

    loop.run_until_complete(fill())
    asking = Asking(path, loop)
    loop.run_until_complete(asking.source.__aenter__())
    yield asking
    loop.run_until_complete(asking.source.__aexit__(None, None, None))
    loop.close()


def test_names_of_what_was_captured(ask: Asking) -> None:
    found = ask("get_captured", "run-1")
    assert found["ranks"] == [0, 1]
    assert found["scalars"]["train"] == ["loss", "lr.0", "log.Loss"]
    assert {one["name"]: one["tensors"] for one in found["collections"]} == {
        "gradients": 3,
        "updates": 1,
    }


def test_tensors_are_found_by_a_part_of_their_name(ask: Asking) -> None:
    assert ask("find_tensors", "run-1")["tensors"] == list(LAYERS)
    assert ask("find_tensors", "run-1", pattern="1.w")["tensors"] == [LAYERS[2]]
    assert ask("find_tensors", "run-1", pattern="layers.?.bias")["tensors"] == [LAYERS[1]]
    assert ask("find_tensors", "run-1", pattern="[01]")["total"] == 0
    assert ask("find_tensors", "run-1", limit=1) | {"tensors": []} == {
        **ask("find_tensors", "run-1"),
        "tensors": [],
    }


def test_a_series_of_a_scalar(ask: Asking) -> None:
    found = ask("read_series", "run-1", name="loss", rank=1, from_step=2, to_step=4)
    assert found["steps"] == [2, 3, 4]
    assert found["values"] == pytest.approx([10 / 3, 10 / 4, 10 / 5])
    assert (found["points"], found["reduced"]) == (3, False)
    assert all(at > 10**12 for at in found["at_ms"])


def test_a_series_of_a_tensor_keeps_its_nan(ask: Asking) -> None:
    found = ask("read_series", "run-1", tensor=LAYERS[2], statistic="l2")
    assert found["values"] == [200.0, 205.0, 210.0, "NaN"]
    assert found["name"] == f"{LAYERS[2]}/l2"
    assert found["collection"] == "gradients", "which of its collections was read"
    of_updates = ask(
        "read_series",
        "run-1",
        tensor=LAYERS[0],
        collection="updates",
        statistic="update_l2",
    )
    assert of_updates["collection"] == "updates"
    assert ask("read_series", "run-1", name="loss").get("collection") is None
    short = ask("read_series", "run-1", name="loss", points=4)
    assert (short["reduced"], short["points"], len(short["steps"])) == (True, 20, 4)


def test_a_matrix_knows_what_was_not_captured_from_nan(ask: Asking) -> None:
    found = ask("read_matrix", "run-1", rows=3, steps=2)
    assert found["rows"] == list(LAYERS)
    assert (found["total_rows"], found["total_steps"], found["steps"]) == (3, 4, [0, 15])
    assert found["values"] == [[0.0, 15.0], [100.0, 115.0], [200.0, "NaN"]]


def test_samples_of_a_node(ask: Asking) -> None:
    found = ask("read_system", "run-1", column="cpu")
    assert set(found["columns"]) == {"cpu.percent"}
    assert found["columns"]["cpu.percent"] == [50.0, 60.0] or found["nodes"]
    whole = ask("read_system", "run-1", node="node")
    assert None in whole["columns"]["gpu.0.utilization_percent"] or whole["points"] == 1


def test_a_node_of_many_columns_is_read_with_fewer_points(
    ask: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tocsin.console.api.readings.MAX_POINTS", 1)
    assert ask("read_system", "run-1", node="node")["columns"]


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("read_series", {"name": "lss"}, "did you mean 'loss'?"),
        ("read_series", {"name": "loss", "rank": 7}, "of rank 7"),
        ("read_series", {"tensor": "layers.9"}, "no tensor 'layers.9'"),
        ("read_matrix", {"collection": "weights"}, "no collection 'weights'"),
        ("read_matrix", {"statistic": "l3"}, "no statistic of gradients"),
        ("read_system", {"node": "other"}, "no node 'other'"),
        ("find_tensors", {"collection": "weights"}, "no collection 'weights'"),
        ("get_captured", {"incarnation": "other"}, "no training 'other'; its newest: made-1"),
    ],
)
def test_what_was_not_captured_is_told_with_what_was(
    ask: Asking, name: str, given: dict[str, object], told: str
) -> None:
    assert told in ask.refused(name, "run-1", **given)


def test_a_question_that_names_no_series_is_answered_without_names_of_operations(
    ask: Asking,
) -> None:
    # An agent reads it, too, whose tools have other names.
    told = ask.refused("read_series", "run-1")
    assert "expected one of: name, for a scalar; tensor, with its statistic" in told
    assert "`" not in told


def test_a_run_is_opened_once_for_many_questions(ask: Asking) -> None:
    ask("get_captured", "run-1")
    before = len(ask.opened)
    for name in ("loss", "lr.0"):
        ask("read_series", "run-1", name=name)
    assert len(ask.opened) == before


def test_what_comes_is_in_the_next_answer_and_stored_runs_are_listed(ask: Asking) -> None:
    assert [one["run_id"] for one in ask("list_runs")["runs"]] == ["run-1", "old-run"]
    assert ask("get_run", "old-run") | {"run": 0, "stop": 0} == {
        "version": 1,
        "run": 0,
        "stop": 0,
        "incarnations": ["i1"],
        "archived": True,
    }

    async def more() -> None:
        async with EmbeddedBus(ask.path) as bus:
            await made_run("run-9", steps=2).publish(bus)

    ask.loop.run_until_complete(more())
    assert "run-9" in [one["run_id"] for one in ask("list_runs")["runs"]]
    assert len(ask("list_issues")["issues"]) == 2


def test_a_store_alone_is_enough(tmp_path: Path, ask: Asking) -> None:
    alone = Asking(tmp_path / "none.db", ask.loop)
    ask.loop.run_until_complete(alone.source.__aenter__())
    assert [one["run_id"] for one in alone("list_runs")["runs"]] == ["old-run"]
    alone.stored = []
    with pytest.raises(MissingBus):
        ask.loop.run_until_complete(_enter(alone))


async def _enter(asking: Asking) -> None:
    await asking.source.__aenter__()


def test_a_manifest_becomes_a_run() -> None:
    run = view_of(OLD)
    assert (run.state, run.outcome, run.last_step, run.incarnation) == (
        "ended",
        "completed",
        7,
        "i1",
    )


@given(
    arrays(np.float64, st.integers(0, 300), elements=st.floats(allow_nan=True)),
    st.integers(4, 50),
)
def test_no_extreme_and_no_gap_is_lost_when_a_series_is_reduced(values: Any, most: int) -> None:
    places = kept(values, most)
    assert places.size <= most
    assert np.all(np.diff(places) > 0)
    finite = np.isfinite(values)
    if finite.any():
        chosen = values[places][np.isfinite(values[places])]
        assert chosen.max() == values[finite].max()
        assert chosen.min() == values[finite].min()
    if (~finite).any():
        assert (~np.isfinite(values[places])).any()


def test_places_are_spread_evenly_to_the_last() -> None:
    assert evenly(10, 4).tolist() == [0, 3, 6, 9]
    assert evenly(3, 4).tolist() == [0, 1, 2]
    assert cells([1.0, float("nan")]) == (1.0, None)
    assert evenly(5, 1).tolist() == [0] or evenly(5, 1).tolist() == [4]
