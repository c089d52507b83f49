"""Where the time of a run went: over killed and resumed runs, and over any made timeline."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tocsin.bus.port import Record
from tocsin.schemas.records.goodput import PARTS, Goodput
from tocsin.schemas.records.program_facts import TrainingPlanned
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.records.runs import RunStarted
from tocsin.schemas.records.snapshots import Snapshot
from tocsin.stream_rules.engine.partitions import PartitionEngine
from tocsin.stream_rules.engine.run_view import run_view
from tocsin.stream_rules.reading import goodput_ledger
from tocsin.stream_rules.testing import RunBuilder


def view_of(records: Sequence[Record]) -> RunView:
    """The view of a run after its records, without rules."""
    engine = PartitionEngine(())
    for record in records:
        engine.apply(record)
    ((_, state, run),) = engine.runs()
    return run_view(run, next_offset=state.next_offset)


def accounts(run: RunBuilder) -> Goodput:
    found = view_of(run.records).goodput
    assert found is not None
    return found


def parts(found: Goodput) -> dict[str, float]:
    """Those that are not zero, in tenths of a second."""
    return {name: round(found.part(name), 1) for name in PARTS if round(found.part(name), 1)}


def whole(found: Goodput) -> float:
    return sum(found.part(name) for name in PARTS)


def begins(run: RunBuilder, *loaded: str, after_s: float = 2.0) -> None:
    """A job starts, and makes its first step `after_s` later."""
    run.started(role="launcher")
    run.wait(after_s)
    run.event(
        RunStarted(
            run_id=run.run_id, incarnation=run.incarnation, job_id="job", loaded=tuple(loaded)
        )
    )
    run.now_ms -= run.step_ms
    run.steps([0], loss=1.0)


def trains(run: RunBuilder, steps: range, **scalars: float) -> None:
    run.steps(steps, columns={"loss": 1.0, "step_time_s": run.step_ms / 1000, **scalars})


def killed(run: RunBuilder, number: int, *, down_s: float = 30.0) -> None:
    """Nothing more is heard of the job, and some time later it is started again."""
    run.wait(down_s)
    run.incarnation, run.boot = f"made-{number}", f"boot-{number}"


def test_the_time_of_a_run_is_cut_at_its_steps() -> None:
    run = RunBuilder(step_ms=1000)
    begins(run)
    trains(run, range(1, 11), data_wait_s=0.25)
    run.wait(4.0)  # an evaluation and a checkpoint within a step
    run.steps([11], loss=1.0, step_time_s=5.0, data_wait_s=0.5, evaluation_s=3.0, checkpoint_s=1.0)
    run.wait(0.5)
    run.ended()
    run.ended(role="launcher")

    found = accounts(run)

    assert parts(found) == {
        "starting": 2.0,
        "productive": 10 * 0.75 + 0.5,
        "data_wait": 10 * 0.25 + 0.5,
        "evaluation": 3.0,
        "checkpoint": 1.0,
        "ending": 0.5,
    }
    assert found.wall_s == pytest.approx(17.5)
    assert whole(found) == pytest.approx(found.wall_s)
    assert found.incarnations == 1


def test_steps_that_were_passed_over_waited_as_the_one_that_was_looked_at() -> None:
    run = RunBuilder(step_ms=1000)
    begins(run)
    run.wait(9.0)  # ten steps, of which only the last was looked at
    run.steps([10], loss=1.0, step_time_s=1.0, data_wait_s=0.4)

    assert parts(accounts(run)) == {"starting": 2.0, "productive": 6.0, "data_wait": 4.0}


def test_what_takes_far_longer_than_a_step_is_a_stall() -> None:
    run = RunBuilder(step_ms=1000)
    begins(run)
    trains(run, range(1, 11))
    run.wait(100.0)
    run.steps([11], loss=1.0, step_time_s=101.0)
    run.wait(60.0)
    run.heartbeat(last_step=11)

    assert parts(accounts(run)) == {"starting": 2.0, "productive": 11.0, "stalled": 160.0}


def test_a_phase_that_the_program_names_is_no_stall() -> None:
    run = RunBuilder(step_ms=1000)
    begins(run)
    run.phase("epoch", "begin")  # what holds steps is no pause
    trains(run, range(1, 11))
    run.phase("epoch", "end")
    run.phase("generation", "begin")
    run.wait(100.0)
    run.phase("generation", "end")
    run.steps([11], loss=1.0, step_time_s=101.0)
    run.phase("evaluation", "begin")
    run.wait(60.0)
    run.heartbeat(last_step=11)

    assert parts(accounts(run)) == {
        "starting": 2.0,
        "productive": 11.0,
        "other": 100.0,
        "evaluation": 60.0,
    }


def test_a_loop_that_says_no_step_times_has_its_phases() -> None:
    run = RunBuilder(step_ms=1000)
    run.started()
    run.steps([0, 1, 2], loss=1.0)
    run.phase("checkpoint", "begin")
    run.wait(5.0)
    run.phase("checkpoint", "end")
    run.steps([3], loss=1.0)

    assert parts(accounts(run)) == {"starting": 1.0, "productive": 3.0, "checkpoint": 5.0}


def test_steps_after_the_checkpoint_that_was_loaded_are_redone() -> None:
    run = RunBuilder(step_ms=1000)
    begins(run)
    trains(run, range(1, 11))
    run.checkpoint(10, path="/runs/a.pt")
    trains(run, range(11, 31))
    killed(run, 2)
    begins(run, "/data/other.pt", "/runs/a.pt")
    trains(run, range(1, 6))

    found = accounts(run)

    assert parts(found) == {
        "productive": 10.0 + 5.0,
        "redone": 20.0,
        "starting": 4.0,
        "down": 30.0,
    }
    assert whole(found) == pytest.approx(found.wall_s)
    assert found.incarnations == 2


def test_a_file_in_a_folder_that_was_saved_is_its_checkpoint() -> None:
    run = RunBuilder(step_ms=1000)
    begins(run)
    trains(run, range(1, 11))
    run.checkpoint(5, path="/runs/checkpoint-6")
    killed(run, 2)
    begins(run, "/runs/checkpoint-60/optimizer.pt", "/runs/checkpoint-6/optimizer.pt")

    assert parts(accounts(run))["redone"] == 5.0


def test_an_older_checkpoint_loses_all_incarnations_since() -> None:
    run = RunBuilder(step_ms=1000)
    begins(run)
    trains(run, range(1, 11))
    run.checkpoint(10, path="/a.pt")
    killed(run, 2)
    begins(run, "/a.pt")
    trains(run, range(1, 6))
    run.checkpoint(5, path="/b.pt")
    killed(run, 3)
    begins(run, "/a.pt")
    trains(run, range(1, 4))

    assert parts(accounts(run)) == {
        "productive": 10.0 + 3.0,
        "redone": 5.0,
        "starting": 6.0,
        "down": 60.0,
    }


def test_what_a_restart_goes_on_from_is_unknown_if_nothing_tells() -> None:
    run = RunBuilder(step_ms=1000)
    begins(run)
    trains(run, range(1, 11))
    run.checkpoint(4, path="/a.pt")
    killed(run, 2)
    run.started(role="launcher")
    assert parts(accounts(run))["productive"] == 10.0  # it may still go on from there
    run.wait(2.0)
    begins(run, after_s=0.0)
    trains(run, range(1, 6))

    # After the last checkpoint there is nothing to go on from.
    found = parts(accounts(run))
    assert (found["unknown"], found["redone"], found["productive"]) == (4.0, 6.0, 5.0)


def test_a_framework_tells_from_which_step_it_goes_on() -> None:
    run = RunBuilder(step_ms=1000)
    begins(run)
    told(run, done=0)
    trains(run, range(1, 20))
    killed(run, 2)
    begins(run)
    told(run, done=15)
    trains(run, range(1, 6))
    view = view_of(run.records)

    assert view.goodput is not None
    assert parts(view.goodput)["redone"] == pytest.approx(19 * 5 / 20, abs=0.05)
    assert view.outlook is not None
    assert (view.outlook.total_steps, view.outlook.done_steps) == (100, 15)
    assert view.outlook.step_s == pytest.approx(1.0)

    killed(run, 3)
    begins(run)
    told(run, done=0)

    assert parts(accounts(run))["redone"] == 19.0 + 5.0


def told(run: RunBuilder, *, done: int) -> None:
    run.event(
        TrainingPlanned(
            run_id=run.run_id,
            incarnation=run.incarnation,
            total_steps=100,
            done_steps=done,
            source="transformers",
        )
    )


def test_an_incarnation_that_completed_keeps_what_it_did() -> None:
    run = RunBuilder(step_ms=1000)
    begins(run)
    trains(run, range(1, 11))
    run.ended()
    run.ended(role="launcher")
    killed(run, 2)
    begins(run)
    trains(run, range(1, 6))

    assert parts(accounts(run)) == {"productive": 15.0, "starting": 4.0, "down": 30.0}


def test_a_second_training_of_one_job_is_not_down_before() -> None:
    run = RunBuilder(step_ms=1000)
    begins(run)
    trains(run, range(1, 11))
    run.ended()
    run.wait(7.0)  # the script imports, and loads its data
    run.incarnation, run.boot = "made-2", "boot-2"
    run.started()
    run.steps([0], loss=1.0)

    assert parts(accounts(run)) == {"productive": 10.0, "starting": 2.0 + 8.0}


def test_launchers_on_several_nodes_are_one_start() -> None:
    run = RunBuilder(step_ms=1000)
    run.started(role="launcher")
    run.wait(5.0)
    run.incarnation, run.boot = "made-2", "boot-2"
    run.started(role="launcher")
    run.wait(5.0)
    run.started()
    run.steps([0], loss=1.0)

    found = accounts(run)
    assert (found.incarnations, parts(found)) == (1, {"starting": 11.0})


def test_a_rank_with_a_clock_of_its_own_is_moved_to_that_of_the_bus() -> None:
    run = RunBuilder(step_ms=1000)
    begins(run)
    run.now_ms += 3_600_000  # the rank's clock is an hour ahead of the bus's
    trains(run, range(1, 11))
    ahead = [one if i < 3 else back(one, 3_600_000) for i, one in enumerate(run.records)]

    found = view_of(ahead).goodput

    assert found is not None
    assert whole(found) == pytest.approx(found.wall_s)
    assert found.wall_s == pytest.approx(12.0)


def back(record: Record, ms: int) -> Record:
    return Record(
        record.partition,
        record.offset,
        record.append_ms - ms,
        record.key,
        record.value,
        record.headers,
    )


def test_the_accounts_outlive_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goodput_ledger, "MAX_LAPS", 2)
    run = RunBuilder(step_ms=1000)
    for number in range(2, 7):
        begins(run, f"/{number - 1}.pt")
        trains(run, range(1, 11))
        run.checkpoint(8, path=f"/{number}.pt")
        killed(run, number)
    begins(run, "/6.pt")
    engine = PartitionEngine(())
    for at, record in enumerate(run.records, 1):
        engine.apply(record)
        ((number, _, of),) = engine.runs()
        saved = of.snapshots(next_offset=at, clock_ms=record.append_ms, software="")
        engine = PartitionEngine(())
        read = {one.rule: Snapshot.decode(one.encode()) for one in saved}
        engine.adopt(number, run.run_id, read, next_offset=at)
    ((_, state, of),) = engine.runs()

    found = run_view(of, next_offset=state.next_offset).goodput

    assert found == accounts(run)
    assert found is not None
    assert parts(found) == {
        "productive": 5 * 8.0,
        "redone": 5 * 2.0,
        "starting": 6 * 2.0,
        "down": 5 * 30.0,
    }


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["step", "skip", "wait", "phase", "checkpoint", "heartbeat", "kill", "end", "again"]
        ),
        st.floats(0, 200),
        st.floats(0, 5),
    ),
    max_size=40,
)


@settings(max_examples=40, deadline=None)
@given(EVENTS)
def test_all_parts_add_up_to_the_time_that_passed(events: list[tuple[str, float, float]]) -> None:
    run = RunBuilder(step_ms=700)
    run.started(role="launcher")
    step, number, phase = 0, 1, False
    for what, seconds, share in events:
        if what == "step":
            times = {"evaluation_s": seconds * share, "data_wait_s": share, "checkpoint_s": share}
            run.wait(seconds)
            run.steps([step], columns={"loss": 1.0, "step_time_s": 0.7 + seconds, **times})
            step += 1
        elif what == "skip":
            step += 1 + int(seconds)
        elif what == "wait":
            run.wait(seconds)
        elif what == "phase":
            run.phase("evaluation" if share > 2 else "other", "end" if phase else "begin")
            phase = not phase
        elif what == "checkpoint":
            run.checkpoint(int(share), path=f"/{int(seconds)}.pt")
        elif what == "heartbeat":
            run.heartbeat(rank=int(share))
        elif what == "end":
            run.ended(role="launcher", outcome="failed" if share > 2 else "completed")
        else:
            number, step = number + 1, 0
            killed(run, number, down_s=seconds)
            if what == "kill":
                run.started(role="launcher")
            begins(run, f"/{int(seconds)}.pt", after_s=share)

    found = accounts(run)

    assert whole(found) == pytest.approx(found.wall_s, rel=0.01, abs=0.01)
    assert all(found.part(name) >= 0 for name in PARTS)
    ended = [r for r in run.records if b"tocsin.run.ended" in (r.value or b"")]
    if not ended:
        passed = run.records[-1].append_ms - run.records[0].append_ms
        assert found.wall_s == pytest.approx(passed / 1000, rel=0.01, abs=1.0)
    json.loads(found.model_dump_json())
