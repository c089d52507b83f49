"""The gradient norm of a model in parts: nobody's until every rank has said its part."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tocsin.schemas.records.frames import RecordOrigin, StepFrame
from tocsin.stream_rules.reading.sharded_norms import WAITING, ShardedNorms
from tocsin.stream_rules.reading.state_codec import dump_state, load_state
from tocsin.stream_rules.testing import RunBuilder, assert_fires, assert_quiet, only

SPECS = only("exploding_gradient")


def frame(rank: int, parts: dict[int, float]) -> StepFrame:
    return StepFrame(
        origin=RecordOrigin(run_id="r1", incarnation="i1", rank=rank, world_size=2),
        steps=np.array(list(parts), np.uint64),
        at_us=np.zeros(len(parts), np.uint64),
        columns=("gradient_norm_local_part",),
        values=np.array([[part] for part in parts.values()], np.float32),
    )


def test_a_step_is_known_once_each_rank_has_added_its_part() -> None:
    norms = ShardedNorms()
    assert list(norms.complete(frame(1, {0: 3.0, 1: 1.0}), 2)) == []
    assert list(norms.complete(frame(1, {0: 3.0}), 2)) == []
    assert list(norms.complete(frame(0, {0: 4.0, 1: math.nan}), 2)) == [
        (0, 5.0),
        (1, pytest.approx(math.nan, nan_ok=True)),
    ]
    assert list(norms.complete(frame(0, {1: 1.0}), 2)) == []
    assert norms.steps == {}


def test_what_never_becomes_complete_is_given_up() -> None:
    norms = ShardedNorms()
    for step in range(3 * WAITING):
        assert list(norms.complete(frame(0, {step: 1.0}), 2)) == []
    assert len(norms.steps) == WAITING
    again = load_state(ShardedNorms, dump_state(norms))
    last = 3 * WAITING - 1
    ((step, norm),) = again.complete(frame(1, {0: 1.0, last: 3.0**0.5}), 2)
    assert (step, round(norm, 6)) == (last, 2.0)


def test_parts_whose_square_no_float32_holds_are_a_number() -> None:
    norms = ShardedNorms()
    assert list(norms.complete(frame(0, {0: 3e30}), 2)) == []
    ((step, norm),) = norms.complete(frame(1, {0: 4e30}), 2)
    assert step == 0
    assert norm == pytest.approx(5e30)


def parted(norms: list[float], *, world_size: int = 4) -> RunBuilder:
    run = RunBuilder(world_size=world_size)
    for rank in range(world_size):
        run.started(rank=rank)
    for step, norm in enumerate(norms):
        for rank in range(world_size):
            # One rank has nearly all of it, another at each step.
            share = 0.91 if rank == step % world_size else 0.03
            run.steps([step], rank=rank, loss=2.0, gradient_norm_local_part=share**0.5 * norm)
    return run


def test_a_norm_in_parts_that_moves_between_the_ranks_is_no_outlier() -> None:
    assert_quiet(parted([1.0] * 100).records, specs=SPECS)


def test_a_norm_in_parts_that_explodes_is_found() -> None:
    run = parted([1.0] * 50 + [30.0, 30.0])
    issue = assert_fires(run.records, "exploding_gradient", first_step=50, specs=SPECS)
    (norm,) = [fact.value for fact in issue.evidence.facts if fact.name == "gradient_norm"]
    assert norm == pytest.approx(30.0)
