"""What two gloo ranks say of their own gradients, of parts of a model, and of replicas."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest

from support.processes.children import python_path
from support.processes.launches import TESTS
from support.trainings.captured import Said, said
from support.trainings.watched import records
from tocsin.schemas.records.frames import StepFrame, TensorFrame
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.runs import CaptureDegraded
from tocsin.schemas.records.wire import decode, read_meta
from tocsin.stream_rules.testing import issues_of

RANKS = (0, 1)
BAD = 2
PLAIN = {f"{layer}.{kind}" for layer in ("big", "middle", "head") for kind in ("weight", "bias")}


@dataclass
class Scenario:
    """One training: what each rank computed itself, and what was captured."""

    folder: Path
    seen: list[dict[str, list[float]]]

    @cached_property
    def said(self) -> Said:
        return said(self.folder)

    @cached_property
    def issues(self) -> list[IssueFiring]:
        return issues_of(records(self.folder))

    def column(self, name: str) -> dict[int, dict[int, float]]:
        """A scalar by rank and step."""
        found: dict[int, dict[int, float]] = {rank: {} for rank in RANKS}
        for record in records(self.folder):
            assert record.value is not None
            frame = decode(read_meta(record.headers), record.value)
            if isinstance(frame, StepFrame) and (values := frame.column(name)) is not None:
                pairs = zip(frame.steps.tolist(), values.tolist(), strict=True)
                found[frame.origin.rank].update(pairs)
        return found

    def frames(self, collection: str) -> dict[tuple[int, int], TensorFrame]:
        """By rank and step."""
        return {(f.origin.rank, f.step): f for f in self.said.frames if f.collection == collection}


@dataclass
class Launch:
    folder: Path

    def __call__(self, name: str) -> Scenario:
        seen = [json.loads((self.folder / f"rank-{r}.json").read_text())[name] for r in RANKS]
        return Scenario(self.folder / name, seen)


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    folder = tmp_path_factory.mktemp("ranks")
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TOCSIN_")}
    done = subprocess.run(
        [sys.executable, "-m", "support.ranks.scenarios", str(folder)],
        env={**kept, "PYTHONPATH": python_path(TESTS), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Launch(folder)


@pytest.mark.parametrize(
    "name", ["buckets", "copied", "static", "unused", "compressed", "accumulating"]
)
def test_each_rank_says_the_norm_of_its_own_gradients(scenario: Launch, name: str) -> None:
    found = scenario(name)
    assert found.said.of(CaptureDegraded) == []
    own = found.column("local_gradient_norm")
    bad = name in ("buckets", "copied", "accumulating")
    for rank in RANKS:
        for step, norm in own[rank].items():
            assert norm == pytest.approx(found.seen[rank]["own"][step], rel=1e-4)
        good = range(BAD) if bad else range(len(found.seen[rank]["own"]))
        assert set(own[rank]) >= set(good)
    whole = found.column("gradient_norm")
    np.testing.assert_array_equal(list(whole[0].values()), list(whole[1].values()))


@pytest.mark.parametrize("name", ["buckets", "copied"])
def test_one_nan_beyond_the_first_block_is_its_ranks(scenario: Launch, name: str) -> None:
    found = scenario(name)
    local = found.frames("local_gradients")
    assert [rank for rank, step in local if step == BAD] == [1]
    frame = local[1, BAD]
    assert frame.rows == ("big.weight",)
    assert frame.counts.tolist() == [[36_000, 0, 1, 0]]
    assert {rank for rank, step in found.frames("gradients") if step == BAD} == {0, 1}
    # The other rank's own gradients were all finite in that step, and it says so.
    assert math.isfinite(found.column("local_gradient_norm")[0][BAD])
    (issue,) = [i for i in found.issues if i.rule == "nonfinite"]
    assert (issue.first_rank, issue.first_step, issue.subject.name) == (1, BAD, "big.weight")


def test_a_nan_that_an_average_brought_within_the_step_is_not_the_ranks_own(
    scenario: Launch,
) -> None:
    found = scenario("accumulating")
    local = found.frames("local_gradients")
    backward = {}
    for rank in RANKS:
        column = local[rank, BAD].column("backward")
        assert column is not None
        backward[rank] = column.tolist()
    assert backward == {0: [1.0], 1: [0.0]}
    (issue,) = [i for i in found.issues if i.rule == "nonfinite"]
    assert (issue.first_rank, issue.subject.name) == (1, "middle.weight")


def test_what_the_ranks_say_of_their_parts_makes_the_norm(scenario: Launch) -> None:
    for name, clipped in (("sharded", 1), ("tensor_parallel", 0)):
        found = scenario(name)
        assert found.said.of(CaptureDegraded) == []
        assert found.issues == []
        first, second = found.column("gradient_norm_local_part").values()
        whole = found.seen[0]["whole"]
        assert set(first) == set(second) == set(range(len(whole) - clipped))
        for step in first:
            assert math.hypot(first[step], second[step]) == pytest.approx(whole[step], rel=1e-4)
        # What `clip_grad_norm_` has computed over all ranks is taken as it is.
        norms = found.column("gradient_norm")
        for rank in RANKS:
            last = {len(whole) - 1: pytest.approx(whole[-1], rel=1e-4)} if clipped else {}
            assert norms[rank] == last
        assert found.column("local_gradient_norm") == {0: {}, 1: {}}
        assert found.frames("local_gradients") == {}


def test_names_say_which_part_a_rank_holds(scenario: Launch) -> None:
    sharded = scenario("sharded").frames("gradients")
    parted = scenario("tensor_parallel").frames("gradients")
    cut = {"big.weight", "big.bias", "middle.weight"}
    for rank in RANKS:
        assert set(sharded[rank, 0].rows) == {f"{name}@shard{rank}" for name in PLAIN}
        assert sum(sharded[rank, 0].counts[:, 0]) in (18_000 + 2 + 8 + 2 + 4 + 1,)
        want = {f"{name}@tp{rank}" if name in cut else name for name in PLAIN}
        assert set(parted[rank, 0].rows) == want


@pytest.mark.parametrize("name", ["flat", "flat_views"])
def test_flat_shards_are_named_and_make_the_norm(scenario: Launch, name: str) -> None:
    found = scenario(name)
    assert found.said.of(CaptureDegraded) == []
    assert found.issues == []
    parts = found.column("gradient_norm_local_part")
    whole = found.seen[0]["whole"]
    norms = [math.hypot(parts[0][step], parts[1][step]) for step in range(len(whole))]
    assert norms == pytest.approx(whole, rel=1e-4)
    frames = found.frames("gradients")
    for rank in RANKS:
        rows = frames[rank, 0].rows
        assert all(row.endswith(f"@shard{rank}") for row in rows)
        plain = [row.partition("@")[0] for row in rows]
        if name == "flat":
            assert sorted(plain) == ["_flat_param", "big._flat_param"]
        else:
            # What lies on the other rank altogether is no parameter of this one.
            assert ("big.bias" in plain, "head.bias" in plain) == (rank == 1, rank == 1)
            assert frames[rank, 0].counts[:, 0].all()


def test_a_nan_of_one_rank_is_named_with_flat_shards(scenario: Launch) -> None:
    found = scenario("flat_bad")
    (issue,) = [i for i in found.issues if i.rule == "nonfinite"]
    assert (issue.first_rank, issue.first_step) == (1, BAD)
    assert {i.rule for i in found.issues} == {"nonfinite"}


def test_stages_of_a_pipeline_add_up_and_are_named(scenario: Launch) -> None:
    found = scenario("pipeline")
    assert found.issues == []
    parts = found.column("gradient_norm_local_part")
    frames = found.frames("gradients")
    for rank in RANKS:
        assert frames[rank, 1].rows == (f"0.bias@pp{rank}", f"0.weight@pp{rank}")
        norms = [norm for _, norm in sorted(parts[rank].items())]
        assert norms == pytest.approx(found.seen[rank]["stage"], rel=1e-4)


def test_replicas_say_equal_checksums_at_the_same_steps(scenario: Launch) -> None:
    sums = scenario("static").frames("checksums")
    assert set(sums) == {(0, 0), (1, 0)}
    assert sums[0, 0].rows == sums[1, 0].rows
    assert set(sums[0, 0].rows) == PLAIN
    assert sums[0, 0].every == 100
    np.testing.assert_array_equal(sums[0, 0].counts, sums[1, 0].counts)
    parted = scenario("tensor_parallel").frames("checksums")
    one, other = (
        dict(zip(parted[rank, 0].rows, parted[rank, 0].counts[:, 0].tolist(), strict=True))
        for rank in RANKS
    )
    common = one.keys() & other.keys()
    assert common == {"middle.bias", "head.weight", "head.bias"}
    assert all(one[name] == other[name] for name in common)
