"""`straggler_rank`: made ranks that wait for each other, and two real ones, one of them slowed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from support.records.node_samples import restarted
from tocsin.schemas.records.issues import IssueFiring
from tocsin.stream_rules.testing import RunBuilder, assert_fires, issues_of, only

RULE = only("straggler_rank")
TESTS = Path(__file__).parents[4]
FORWARD_S, BACKWARD_S = 0.02, 0.04


def run(
    slow: Mapping[int, float],
    *,
    where: str = "forward_s",
    ranks: int = 4,
    steps: int = 60,
    first: int = 0,
    waiting: str | None = "backward_s",
    noise: float = 0.05,
    device: bool = False,
    more: Mapping[str, float] | None = None,
    made: RunBuilder | None = None,
) -> RunBuilder:
    """Ranks that make their steps together: the others wait for the slow ones (`slow` has seconds
    by rank) inside of `waiting`."""
    made = _started(ranks) if made is None else made
    chance = np.random.default_rng(0)
    for begin in range(first, first + steps, 10):
        at = list(range(begin, begin + 10))
        own = {
            name: usual * (1 + noise * chance.standard_normal((ranks, 10)))
            for name, usual in (
                ("data_wait_s", 0.001),
                ("forward_s", FORWARD_S),
                ("backward_s", BACKWARD_S),
                ("optimizer_s", 0.003),
            )
        }
        for rank, seconds in slow.items():
            own[where][rank] += seconds
        whole = np.sum(list(own.values()), axis=0)
        longest = whole.max(0)
        if waiting is not None:
            own[waiting] += longest - whole
            whole = np.broadcast_to(longest, whole.shape)
        for rank in range(ranks):
            columns = {name: values[rank] for name, values in own.items()}
            if device:
                # The host hands over its work and waits where it likes.
                columns.update(forward_s=np.full(10, 0.001), backward_s=np.full(10, 0.001))
            made.steps(
                at, rank=rank, per_frame=10,
                columns={**columns, "step_time_s": whole[rank], **(more or {})},
            )  # fmt: skip
            if device:
                made.steps(
                    [at[-1]], rank=rank,
                    columns={
                        "forward_device_s": own["forward_s"][rank][-1],
                        "backward_device_s": own["backward_s"][rank][-1],
                    },
                )  # fmt: skip
    return made


def _started(ranks: int) -> RunBuilder:
    made = RunBuilder(world_size=ranks)
    for rank in range(ranks):
        made.started(rank=rank, node=f"node-{rank // 2}")
    return made


def firing(made: RunBuilder) -> IssueFiring:
    return assert_fires(made.records, "straggler_rank", specs=RULE)


def named(made: RunBuilder) -> list[str]:
    return [i.subject.name for i in issues_of(made.records, specs=RULE) if i.state == "firing"]


@pytest.mark.parametrize("ranks", [2, 3, 4, 40])
@pytest.mark.parametrize("slow", [0, 1])
def test_the_slowed_rank_is_named_and_not_those_that_wait(ranks: int, slow: int) -> None:
    issue = firing(run({slow: 0.015}, ranks=ranks))
    assert (issue.subject.kind, issue.subject.name) == ("rank", f"rank {slow}")
    assert (issue.severity, issue.branch, issue.first_rank) == ("warning", "compute", slow)
    assert issue.step is not None
    assert issue.step < 45


def test_a_rank_that_waits_for_its_data_is_another_branch() -> None:
    issue = firing(run({3: 0.03}, where="data_wait_s"))
    assert (issue.branch, issue.subject.name) == ("data", "rank 3")
    facts = {fact.name: fact.value for fact in issue.evidence.facts}
    assert (facts["node"], facts["local_rank"]) == ("node-1", 1.0)
    assert issue.reason.startswith("rank 3 on node-1 takes 30 ms longer than the others")
    # The others may wait where the first collective is: in a forward pass, for buffers.
    assert firing(run({3: 0.03}, where="data_wait_s", waiting="forward_s")).branch == "data"


def test_two_slow_ranks_of_eight_are_two_issues() -> None:
    assert named(run({2: 0.02, 5: 0.02}, ranks=8)) == ["rank 2", "rank 5"]


def test_it_is_resolved_when_the_rank_keeps_pace() -> None:
    made = run({}, steps=80, first=60, made=run({1: 0.02}))
    states = [i.state for i in issues_of(made.records, specs=RULE) if i.state != "ongoing"]
    assert states == ["firing", "resolved"]


def test_on_gpus_their_own_times_decide() -> None:
    assert named(run({2: 0.02}, device=True, steps=200)) == ["rank 2"]
    assert named(run({}, device=True, steps=200)) == []


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(run({}), id="even ranks"),
        pytest.param(run({}, noise=0.4), id="noisy ranks"),
        pytest.param(run({1: 0.002}), id="two milliseconds"),
        pytest.param(run({1: 0.03}, waiting=None), id="ranks that do not wait for each other"),
        pytest.param(run({1: 0.03}, where="backward_s"), id="cannot be told from waiting"),
        pytest.param(run({1: 0.03}, where="forward_s", steps=20), id="a short run"),
        pytest.param(run({0: 0.03}, ranks=1), id="one rank"),
        pytest.param(
            run({3: 0.05}, more={"gradient_norm_local_part": 1.0}), id="stages of a pipeline"
        ),
        pytest.param(
            run({0: 0.03}, where="optimizer_s", waiting="forward_s"), id="waits in a forward pass"
        ),
    ],
)
def test_ranks_that_are_not_named(made: RunBuilder) -> None:
    assert named(made) == []


def test_a_parted_model_has_stragglers_by_data_alone() -> None:
    made = run({3: 0.05}, where="data_wait_s", more={"gradient_norm_local_part": 1.0})
    assert named(made) == ["rank 3"]


@pytest.mark.parametrize("first", [0, 7000])
def test_restarts_repeats_losses_and_late_ranks(first: int) -> None:
    made = run({1: 0.02}, steps=70, first=first)
    plain = [issue.issue_id for issue in issues_of(made.records, specs=RULE)]
    assert len(plain) == 1
    assert [issue.issue_id for issue in issues_of(made.records, specs=restarted(RULE))] == plain
    # Rank 3 comes last, and some of its steps are lost; others come twice.
    late = run({1: 0.02}, steps=70, first=first)
    frames = late.records[4:]
    late.records = late.records[:4] + [r for i, r in enumerate(frames) if i % 4 != 3]
    for i, record in enumerate(frames):
        if i % 4 == 3 and i != 7:
            late.again(record)
            late.again(record)
    assert named(late) == ["rank 1"]


def test_steps_that_are_no_numbers_are_left_out() -> None:
    assert named(run({}, more={"forward_s": float("nan")})) == []


@pytest.mark.torture
def test_two_real_ranks_one_of_which_is_slowed(tmp_path: Path) -> None:
    from support.trainings.watched import records

    subprocess.run(
        [sys.executable, "-m", "support.ranks.slowed", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        check=True,
        timeout=240,
    )
    found = {
        folder.name: [
            (issue.subject.name, issue.branch)
            for issue in issues_of(records(folder), specs=RULE)
            if issue.state == "firing"
        ]
        for folder in sorted(tmp_path.iterdir())
    }
    assert found == {
        "compute": [("rank 1", "compute")],
        "data": [("rank 1", "data")],
        "data_of_rank_0": [("rank 0", "data")],
        "even": [],
    }
