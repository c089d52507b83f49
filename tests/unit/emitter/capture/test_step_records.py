"""From readings to a step's scalars: what was not read is not said; what is odd is looked at."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from support.trainings.captured import captured, said
from tocsin.emitter.capture.step_records import AT_ONCE, Draft, Reporter
from tocsin.emitter.model.optimizers import Optimizers
from tocsin.emitter.plan.schedule import CLOSER_STEPS, EXACT_AFTER_ALARM, NORMS, CaptureSchedule
from tocsin.emitter.plan.settings import CaptureSettings
from tocsin.emitter.probes.gradient_blocks import Blocks
from tocsin.emitter.probes.gradients import GradientReader, Norms, Reading
from tocsin.emitter.probes.local_gradients import LocalReading
from tocsin.emitter.probes.losses import on_host
from tocsin.emitter.probes.weight_updates import SAMPLE, UpdateProbe
from tocsin.emitter.send.outbox import StepRow
from tocsin.emitter.statistics.async_copy import HostCopy
from tocsin.emitter.statistics.tables import Table
from tocsin.schemas.records.frames import RecordOrigin, TensorFrame

NAN = math.nan


class Sink:
    """A training of which only what it sends is kept."""

    def __init__(self) -> None:
        self.settings = CaptureSettings()
        self.origin = RecordOrigin(run_id="r1", incarnation="i1")
        self.next_step = 0
        self.rows: list[dict[str, float]] = []
        self.frames: list[TensorFrame] = []

    def step_row(self, row: StepRow, *, urgent: bool) -> None:
        self.rows.append(dict(zip(row.columns, row.values, strict=True)))

    def frame(self, frame: TensorFrame, *, urgent: bool) -> None:
        self.frames.append(frame)


class Steps:
    """Steps of a reporter."""

    def __init__(self) -> None:
        self.sink = Sink()
        self.schedule = CaptureSchedule(CaptureSettings())
        self._reporter = Reporter(self.sink, self.schedule)  # type: ignore[arg-type]  # a stand-in

    def __call__(
        self,
        *readings: Reading,
        loss: float = 1.0,
        local: LocalReading | None = None,
        table: Table | None = None,
    ) -> dict[str, float]:
        """Finish one more; its scalars."""
        step = self.sink.next_step
        self.sink.next_step += 1
        draft = Draft(step, 0, [], [], [loss], list(readings), None, local)
        if table is not None:
            pending = SimpleNamespace(ready=True, tables=lambda: iter([table]))
            draft.probed.append((table.collection, pending))
        self._reporter.finish(draft)
        return self.sink.rows[-1]


def exact(*norms: float) -> Reading:
    n = len(norms)
    return Reading(names=["a"] * n, numel=[1] * n, norms=np.array(norms, np.float32))


def test_where_nothing_was_read_nothing_is_said_of_gradients() -> None:
    steps = Steps()
    assert set(steps(Reading())) == {"loss"}
    assert steps(exact(3.0, 4.0)) == {"loss": 1.0, "gradient_norm": 5.0, "gradient_nonfinite": 0.0}
    assert steps(Reading(blocks=Blocks(2.0, 0))) == {
        "loss": 1.0, "gradient_norm_sampled": 2.0, "gradient_nonfinite": 0.0,
    }  # fmt: skip


def test_the_norm_of_some_of_the_tensors_is_no_estimate() -> None:
    steps = Steps()
    for blocks in (Blocks(2.0, 1), Blocks(2.0, 0, complete=False)):
        row = steps(Reading(blocks=blocks))
        assert set(row) == {"loss", "gradient_nonfinite"}
        assert row["gradient_nonfinite"] == blocks.bad


def test_the_scale_of_a_loss_may_come_later_than_the_norms() -> None:
    reading = exact(3.0, 4.0)
    reading.scale = HostCopy(torch.tensor([4.0]))
    assert not reading.ready
    assert reading.ready
    assert Steps()(reading)["gradient_norm"] == 1.25


def test_other_optimizers_alone_have_no_norm_to_say() -> None:
    reading = exact(3.0)
    reading.primary = False
    assert "gradient_norm" not in Steps()(reading)


def test_a_part_of_a_huge_norm_is_finite() -> None:
    reading = exact(1e30)
    reading.parts = {"a": 1}
    assert Steps()(reading)["gradient_norm_local_part"] == pytest.approx(1e30)


@pytest.mark.parametrize("what", ["loss", "norms", "local"])
def test_whatever_is_odd_is_looked_at_closer(what: str) -> None:
    steps = Steps()
    steps(exact(1.0))
    steps.sink.next_step = 12
    assert not steps.schedule.due(12)
    if what == "loss":
        steps(loss=NAN)
    elif what == "norms":
        steps(exact(NAN))
    else:
        bad = (np.zeros(8, np.float32), np.array([1, 0, 1, 0], np.uint64))
        steps(local=LocalReading({"a": bad}, None, None, 0))
    assert all(steps.schedule.due(step) for step in range(13, 13 + CLOSER_STEPS))
    assert steps.schedule.exact_until == 12 + EXACT_AFTER_ALARM


def test_what_stays_odd_alarms_three_times_at_most() -> None:
    steps = Steps()
    for _ in range(3 * AT_ONCE):
        steps(loss=NAN)
    assert steps.schedule.exact_until == AT_ONCE - 1 + EXACT_AFTER_ALARM


def test_numbers_that_come_late_have_the_next_steps_looked_at() -> None:
    steps = Steps()
    steps.sink.next_step = 30
    late = Draft(12, 0, [], [], [NAN], [], None, None)
    steps._reporter.finish(late)
    assert steps.schedule.exact_until == 29 + EXACT_AFTER_ALARM


def test_frames_of_a_closer_look_say_the_interval_in_force() -> None:
    steps = Steps()
    steps.schedule.capture_closely(2, 2)
    values, counts = np.zeros((1, 1), np.float32), np.zeros((1, 1), np.uint64)
    for kind in ("gradients", "activations"):
        steps.sink.next_step = 0
        for _ in range(5):
            steps(table=Table(kind, ("a",), values, counts, ("l2",), ("numel",)))
    every = [frame.every for frame in steps.sink.frames]
    assert every == [10, 10, 1, 1, 10, 100, 100, 5, 5, 100]


# -- what readings are made of ---------------------------------------------------------------------


def test_norms_of_several_devices_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere:
        """A tensor that says that it is on another device."""

        device = torch.device("cuda")

        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    def norms(tensors: list[object]) -> torch.Tensor:
        assert len({type(tensor) for tensor in tensors}) == 1
        found = [t.tensor if isinstance(t, Elsewhere) else t for t in tensors]
        return torch.stack([torch.linalg.vector_norm(tensor) for tensor in found])

    monkeypatch.setattr("tocsin.emitter.probes.gradients.norms", norms)
    flat = [torch.ones(4), Elsewhere(torch.ones(9)), torch.ones(16), Elsewhere(torch.ones(25))]
    found = Norms(flat)
    while not found.ready:
        pass
    assert found.values().tolist() == [2.0, 3.0, 4.0, 5.0]


def test_gradients_on_the_cpu_are_read_though_the_first_is_elsewhere() -> None:
    class Elsewhere(torch.Tensor):  # type: ignore[misc]  # torch has no types here
        """A tensor of a device that would be waited for."""

        @property
        def is_cpu(self) -> bool:
            return False

    model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(3)) for _ in range(2)])
    here, there = model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizers, schedule = Optimizers(optimizer), CaptureSchedule(CaptureSettings())
    schedule.budget.shares[NORMS].interval = 1000
    reader, watched = GradientReader(schedule, optimizers), optimizers.watched(optimizer)
    there.grad = torch.full((3,), math.nan).as_subclass(Elsewhere)
    here.grad = torch.ones(3)
    reading = reader.read(watched, 1, nonfinite=False, at_once=True)
    assert reading is not None
    assert reading.blocks is not None
    assert (reading.blocks.bad, reading.blocks.estimate, reading.exact) == (0, None, None)
    here.grad[0] = math.nan
    reading = reader.read(watched, 2, nonfinite=False, at_once=True)
    assert reading is not None
    assert reading.bad == 2


def test_losses_of_both_devices_count() -> None:
    there = torch.tensor([2.0])
    found = on_host([1.0, there, 4.0])
    assert isinstance(found, HostCopy)
    assert sorted(found.values().tolist()) == [1.0, 2.0, 4.0]
    assert on_host([1.0, 4.0]) == [1.0, 4.0]


@pytest.mark.parametrize("n", [10, SAMPLE, SAMPLE + 5, 3 * SAMPLE])
def test_a_sample_of_a_weight_does_not_follow_it(n: int) -> None:
    weight, probe = torch.nn.Parameter(torch.zeros(n)), UpdateProbe()
    weight.grad = torch.ones(n)
    probe.before([("w", weight)])
    with torch.no_grad():
        weight += 1
    found = probe.after([("w", weight)])
    assert found is not None
    _, norms, _ = found.rows()
    assert norms[0, 1] == pytest.approx(math.sqrt(n), rel=1e-2)


def test_the_first_step_of_each_new_model_says_its_norm(tmp_path: Path) -> None:
    seen = []
    with captured(tmp_path):
        for width in (8, 4, 2):
            model = torch.nn.Linear(width, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(5, width)).square().mean().backward()
                parts = [p.grad.norm() for p in model.parameters() if p.grad is not None]
                seen.append(float(torch.stack(parts).norm()))
                optimizer.step()
            del model, optimizer
            gc.collect()
    found = said(tmp_path).steps()
    assert [found[i]["gradient_norm"] for i in sorted(found)] == pytest.approx(seen, rel=1e-5)
