"""Where the time of a step goes: the marks of hooks, in order, and what they add up to."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tocsin.emitter.probes.cuda_timing import COLUMNS, CudaTiming, Event
from tocsin.emitter.probes.step_phases import StepPhases
from tocsin.emitter.process.isolation import Isolation


def taken(phases: StepPhases) -> dict[str, float]:
    return dict(zip(*phases.drain(), strict=True))


def test_one_step_with_two_micro_batches() -> None:
    phases = StepPhases()
    phases.step_ends(0.0)
    taken(phases)
    for at in (1.0, 11.0):
        phases.loaded(at, at + 2)  # waits 2 s
        phases.backward_begins(at + 5)  # forward 3 s
        phases.backward_ends(at + 9)  # backward 4 s
    phases.step_begins(21.5)  # clipping before it
    phases.step_ends(22.0)
    assert taken(phases) == {
        "data_wait_s": 4.0,
        "forward_s": 6.0,
        "backward_s": 8.0,
        "optimizer_s": 0.5,
    }
    assert taken(phases)["forward_s"] == 0


def test_a_step_without_a_loader_says_nothing_of_waiting() -> None:
    phases = StepPhases()
    phases.step_ends(1.0)
    phases.backward_begins(3.0)
    phases.backward_ends(4.0)
    phases.step_begins(4.0)
    phases.step_ends(5.0)
    assert taken(phases) == {"forward_s": 2.0, "backward_s": 1.0, "optimizer_s": 1.0}


def test_a_closure_and_a_nested_backward_are_counted_once() -> None:
    phases = StepPhases()
    phases.step_begins(0.0)
    phases.backward_begins(2.0)
    phases.backward_begins(2.5)
    phases.backward_ends(3.0)
    phases.backward_ends(5.0)
    phases.step_ends(6.0)
    assert taken(phases) == {"forward_s": 2.0, "backward_s": 3.0, "optimizer_s": 1.0}


def test_steps_in_the_middle_of_a_backward_call() -> None:
    phases = StepPhases()
    phases.backward_begins(0.0)
    phases.step_begins(2.0)
    phases.step_ends(3.0)
    phases.backward_ends(7.0)
    assert taken(phases) == {"forward_s": 0.0, "backward_s": 6.0, "optimizer_s": 1.0}


def test_steps_of_two_optimizers_are_added() -> None:
    phases = StepPhases()
    for at in (0.0, 10.0):
        phases.loaded(at, at + 1)
        phases.backward_begins(at + 2)
        phases.backward_ends(at + 4)
        phases.step_begins(at + 4)
        phases.step_ends(at + 5)
    assert taken(phases) == {
        "data_wait_s": 2.0,
        "forward_s": 2.0,
        "backward_s": 4.0,
        "optimizer_s": 2.0,
    }


def test_an_evaluation_is_marked_once_and_its_checkpoint_is_none_of_it() -> None:
    said: list[tuple[str, float | None]] = []

    def report(edge: str, duration_s: float | None) -> bool:
        said.append((edge, duration_s))
        return True

    phases = StepPhases()
    phases.report = report
    phases.step_ends(0.0)
    phases.evaluated(1.0, 1.05)
    assert said == []
    phases.evaluated(1.05, 4.0)
    phases.evaluated(4.0, 9.0)
    phases.wrote(10.0, 12.0)
    phases.loaded(13.0, 13.5)
    phases.backward_begins(14.5)
    phases.backward_ends(15.5)
    found = taken(phases)
    assert said == [("begin", None), ("end", 12.0)]
    assert (found["evaluation_s"], found["checkpoint_s"]) == (10.0, 2.0)
    assert (found["data_wait_s"], found["forward_s"]) == (0.5, 1.0)
    # A short one, without loaders, ends with its last loss.
    phases.evaluated(16.0, 16.01)
    phases.backward_begins(20.0)
    found = taken(phases)
    assert found["evaluation_s"] == pytest.approx(0.01)
    assert found["forward_s"] == pytest.approx(3.99)
    assert len(said) == 2


def test_what_the_user_calls_an_evaluation_is_one() -> None:
    said: list[str] = []
    marks = [True]

    def report(edge: str, duration_s: float | None) -> bool:
        said.append(edge)
        return marks[0]

    phases = StepPhases()
    phases.report = report
    phases.named("evaluation", "begin", 1.0)
    phases.evaluated(2.0, 7.0)
    phases.named("evaluation", "end", 8.0)
    phases.named("export", "begin", 8.0)
    phases.named("export", "end", 9.0)
    phases.named("never begun", "end", 9.0)
    found = taken(phases)
    assert (found["evaluation_s"], said) == (7.0, [])
    phases.evaluated(9.0, 10.0)
    phases.end_evaluation()
    assert said == ["begin", "end"]
    # Somebody else marks this one: its end is not said, either.
    marks[0] = False
    phases.evaluated(11.0, 12.0)
    phases.evaluated(12.0, 13.0)
    phases.end_evaluation()
    assert said == ["begin", "end", "begin"]


@dataclass
class Clock:
    """A GPU that has worked up to `now_ms`; what it is given takes until `last_ms`."""

    now_ms: float = 0.0
    last_ms: float = 0.0

    def put(self) -> Mark:
        return Mark(self, self.last_ms)


@dataclass
class Mark:
    clock: Clock
    at_ms: float

    def query(self) -> bool:
        return self.clock.now_ms >= self.at_ms

    def elapsed_time(self, end_event: Event, /) -> float:
        assert isinstance(end_event, Mark)
        assert end_event.query()
        return end_event.at_ms - self.at_ms


def test_a_gpus_own_time_is_read_when_it_has_come_by() -> None:
    clock, told = Clock(), []
    phases = StepPhases()
    phases.timer = CudaTiming(
        lambda *row: told.append(row), clock.put, isolation=Isolation(), is_recording=lambda: False
    )
    phases.after_step(8)
    assert phases.device is None
    phases.after_step(9)
    assert phases.device is not None
    for micro in range(2):
        clock.last_ms += 5  # something between the batches
        phases.loaded(0, 0)
        clock.last_ms += 20
        phases.backward_begins(0)
        clock.last_ms += 40 + micro
        phases.backward_ends(0)
    clock.last_ms += 3  # clipping
    phases.step_begins(0)
    clock.last_ms += 10
    phases.step_ends(0)
    phases.after_step(10)
    phases.after_step(11)
    assert told == []
    clock.now_ms = clock.last_ms
    phases.after_step(12)
    (row,) = told
    assert row[:2] == (10, COLUMNS)
    assert row[2] == pytest.approx((0.040, 0.081, 0.010))


def test_a_step_with_too_many_marks_or_in_a_cuda_graph_is_not_timed() -> None:
    clock, told = Clock(), []
    recording = [False]
    timer = CudaTiming(
        lambda *row: told.append(row),
        clock.put,
        isolation=Isolation(),
        is_recording=lambda: recording[0],
    )
    for _ in range(300):
        timer.forward()
    timer.close_step(0)
    timer.forward()
    recording[0] = True
    timer.backward()
    timer.close_step(1)
    recording[0] = False
    assert not timer.waiting
    for step in range(20):
        timer.forward()
        timer.optimizer()
        timer.close_step(step)
    timer.poll()
    assert [row[0] for row in told] == list(range(12, 20))
