"""`checkpoint_unhealthy`, condition by condition, on made runs."""

from __future__ import annotations

import math
from typing import Any

from tocsin.schemas.records.checkpoints import Checkpoint, CheckpointRead, CheckpointWritten
from tocsin.schemas.records.issues import IssueFiring
from tocsin.stream_rules.testing import RunBuilder, issues_of, only

NAN = math.nan


def healthy(run: RunBuilder, first: int, last: int) -> None:
    for step in range(first, last):
        run.steps([step], loss=1.0, gradient_norm=1.0, gradient_nonfinite=0)


def saved(run: RunBuilder, step: int, size: int | None = 1000, path: str = "") -> None:
    checkpoint = Checkpoint(path=path or f"/c/step-{step}.pt", step=step, size_bytes=size)
    run.event(
        CheckpointWritten(run_id=run.run_id, incarnation=run.incarnation, checkpoint=checkpoint)
    )


def read(run: RunBuilder, step: int, path: str = "", **found: Any) -> None:
    checkpoint = Checkpoint(path=path or f"/c/step-{step}.pt", step=step)
    run.event(
        CheckpointRead(
            run_id=run.run_id,
            incarnation=run.incarnation,
            checkpoint=checkpoint,
            **{"tensors": 20, "matrices": 10, **found},
        )
    )


def found(run: RunBuilder, *beside: str) -> list[IssueFiring]:
    rules = ("checkpoint_unhealthy", *beside)
    specs = [spec for rule in rules for spec in only(rule)]
    return issues_of(run.records, "checkpoint_unhealthy", specs=specs)


def states(issues: list[IssueFiring]) -> list[tuple[str, str]]:
    return [(issue.branch, issue.state) for issue in issues]


def begun() -> RunBuilder:
    run = RunBuilder()
    run.started()
    healthy(run, 0, 10)
    return run


def test_healthy_checkpoints_are_quiet() -> None:
    run = begun()
    for step in range(10, 100, 10):
        healthy(run, step, step + 10)
        saved(run, step, 1000 + step)
        read(run, step, zeros=("lora.b",), zero_tensors=1)
    assert found(run, "nonfinite") == []


def nan_from(run: RunBuilder, step: int) -> None:
    run.steps([step], loss=NAN, gradient_norm=NAN, gradient_nonfinite=1)
    run.tensors(step, "gradients", ["a"], nans={"a": 1})


def test_after_the_onset_whichever_is_known_first() -> None:
    run = begun()
    saved(run, 9)
    saved(run, 10)
    nan_from(run, 10)
    saved(run, 11)
    saved(run, 12)

    issues = found(run, "nonfinite")

    assert states(issues)[0] == ("after_onset", "firing")
    assert issues[0].first_step == 10
    assert issues[0].severity == "warning"
    assert not issues[0].stop_worthy
    assert "step-10.pt was saved at step 10, and nonfinite began at step 10" in issues[0].reason


def test_before_the_onset_is_healthy() -> None:
    run = begun()
    saved(run, 9)
    nan_from(run, 10)
    run.ended()
    assert found(run, "nonfinite") == []


def test_a_fault_that_spoils_no_weights_is_no_onset() -> None:
    run = begun()
    saved(run, 9)
    run.ended(outcome="failed")
    saved(run, 12)
    assert found(run) == []


def test_a_torn_one_until_one_is_whole() -> None:
    run = begun()
    saved(run, 10)
    read(run, 10, torn="step-10.pt is cut off in model.weight")
    read(run, 20)

    issues = found(run)

    assert states(issues) == [("torn", "firing"), ("torn", "resolved")]
    assert "c/step-10.pt is not whole: step-10.pt is cut off" in issues[0].reason


def test_what_was_not_read_says_nothing() -> None:
    run = begun()
    read(run, 10, unread="no such file", torn="x", nonfinite_tensors=1)
    read(run, 20, changed=True, torn="x", nonfinite_tensors=1)
    read(run, 30, complete=False, zero_tensors=9, zeros=("a",))
    assert found(run) == []


def test_numbers_that_are_not_finite() -> None:
    run = begun()
    read(run, 10, nonfinite=("model.a", "model.b"), nonfinite_tensors=2)

    (issue,) = found(run)

    assert issue.branch == "nonfinite"
    assert "has NaN or Inf in model.a (2 of 20 tensors)" in issue.reason
    assert issue.evidence.also == ("model.a", "model.b")


def test_matrices_that_became_zero_and_one_that_is_zero_as_a_whole() -> None:
    run = begun()
    read(run, 10, zeros=("lora.b",), zero_tensors=1)
    read(run, 20, zeros=("lora.b", "head"), zero_tensors=2)
    issues = found(run)
    assert states(issues) == [("zeros", "firing")]
    assert "only zeros in head" in issues[0].reason

    run = begun()
    read(run, 10, zeros=("a",) * 5, zero_tensors=5)
    assert states(found(run)) == [("zeros", "firing")]

    run = begun()
    read(run, 10, matrices=2, zeros=("a",), zero_tensors=1)
    assert found(run) == []


def test_one_that_is_smaller_than_its_kind() -> None:
    run = begun()
    for step, size in ((10, 1000), (20, 1010), (30, 1000), (40, 800), (50, 805), (60, 1005)):
        saved(run, step, size)
        saved(run, step, 10, path=f"/c/best-{step}.pt")
    saved(run, 70, None)

    issues = found(run)

    assert [state for state in states(issues) if state[1] != "ongoing"] == [
        ("smaller", "firing"),
        ("smaller", "resolved"),
    ]
    assert "c/step-40.pt has 800 bytes, and those before of its kind 1,000" in issues[0].reason


SHARDS = {
    "/c/global_step{step}/layer_00-model_00-model_states.pt": 5000,
    "/c/global_step{step}/layer_01-model_00-model_states.pt": 700,
    "/c/global_step{step}/layer_01-model_01-model_states.pt": 300,
    "/c/iter_{step:07d}/mp_rank_00_000/model_optim_rng.pt": 900,
    "/c/iter_{step:07d}/mp_rank_00_001/model_optim_rng.pt": 400,
}


def test_the_files_of_one_checkpoint_are_each_of_a_kind_of_its_own() -> None:
    run = begun()
    for step in range(10, 80, 10):
        for number, (path, size) in enumerate(SHARDS.items()):
            zeros = (f"layer.{number}.bias",)
            saved(run, step, size, path=path.format(step=step))
            read(run, step, path=path.format(step=step), zeros=zeros, zero_tensors=1)
    assert found(run) == []

    paths = [path.format(step=80) for path in SHARDS]
    saved(run, 80, 5000, path=paths[0])
    saved(run, 80, 600, path=paths[1])
    read(run, 80, path=paths[1], zeros=("layer.1.bias", "head"), zero_tensors=2)
    saved(run, 80, 300, path=paths[2])
    read(run, 80, path=paths[2], zeros=("layer.2.bias",), zero_tensors=1)
    issues = found(run)
    assert states(issues) == [("smaller", "firing"), ("zeros", "firing")]
    assert "layer_01-model_00-model_states.pt has 600 bytes" in issues[0].reason


def test_a_rank_far_behind_that_writes_the_other_shard() -> None:
    run = begun()
    for rank, size in enumerate((1000, 500)):
        for step in range(10, 60, 10):
            saved(run, step, size, path=f"/c/{step}/rank_{rank}.pt")
    assert found(run) == []


def test_numbers_that_change_with_the_step_are_of_one_kind() -> None:
    run = begun()
    for step in range(10, 60, 10):
        saved(run, step, 1000, path=f"/c/epoch={step // 10}-step={step + 1}/rank_0.pt")
        saved(run, step, 500, path=f"/c/epoch={step // 10}-step={step + 1}/rank_1.pt")
    saved(run, 60, 1000, path="/c/epoch=6-step=61/rank_0.pt")
    saved(run, 60, 400, path="/c/epoch=6-step=61/rank_1.pt")
    assert states(found(run)) == [("smaller", "firing")]


def test_too_few_to_compare() -> None:
    run = begun()
    for step, size in ((10, 1000), (20, 1000), (30, 10)):
        saved(run, step, size)
    assert found(run) == []


def test_the_checkpoint_to_go_back_to_is_sound() -> None:
    run = begun()
    saved(run, 9)
    healthy(run, 10, 20)
    saved(run, 15)
    saved(run, 19)
    read(run, 19, torn="cut off")
    read(run, 15, nonfinite=("a",), nonfinite_tensors=1)
    healthy(run, 20, 100)
    nan_from(run, 100)

    (issue,) = issues_of(run.records, "nonfinite", specs=only("nonfinite"))[:1]

    assert issue.last_good_checkpoint is not None
    assert issue.last_good_checkpoint.step == 9
    assert issue.last_good_checkpoint.verified
