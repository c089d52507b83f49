"""What is counted of labels, predictions, tokens and inputs, against counts by hand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import numpy as np
import pytest
import torch
from torch.nn import functional

from tocsin.emitter.model.optimizers import Optimizers
from tocsin.emitter.plan.schedule import CaptureSchedule
from tocsin.emitter.plan.settings import CaptureSettings, Pacing
from tocsin.emitter.probes.inputs import data
from tocsin.emitter.probes.inputs.data import DataProbe
from tocsin.emitter.probes.inputs.input_channels import InputChannels, sample_channels
from tocsin.emitter.probes.inputs.label_counts import LabelCounts
from tocsin.emitter.probes.inputs.named_data import check_data
from tocsin.emitter.probes.inputs.token_counts import TokenCounts
from tocsin.emitter.process.isolation import Isolation
from tocsin.emitter.training.training import Training
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.frames import RecordOrigin, TensorFrame


class Sink:
    """Stands for a training: keeps the frames that it is given."""

    def __init__(self, pacing: Pacing = "time") -> None:
        self.origin = RecordOrigin(run_id="r", incarnation="0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11")
        self.last_step = 7
        self.settings = CaptureSettings(pacing=pacing)
        self.schedule = CaptureSchedule(self.settings)
        self.isolation = Isolation()
        self.frames: list[TensorFrame] = []

    def frame(self, frame: TensorFrame) -> None:
        assert TensorFrame.decode(frame.encode()).rows == frame.rows
        self.frames.append(frame)

    def counts(self, collection: str, mode: str = "train") -> dict[str, list[int]]:
        (frame,) = [f for f in self.frames if (f.collection, f.mode) == (collection, mode)]
        return dict(zip(frame.rows, frame.counts.tolist(), strict=True))


class Ticks:
    """A clock that goes on by so many seconds whenever it is looked at."""

    def __init__(self, tick_s: float) -> None:
        self.now_s, self.tick_s = 0.0, tick_s

    def __call__(self) -> float:
        self.now_s += self.tick_s
        return self.now_s


def closed(probe: DataProbe) -> Sink:
    sink = Sink()
    probe.close(cast(Training, sink))
    return sink


def ids(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, np.int64)


def test_classes_and_what_was_taken_for_what() -> None:
    counts = LabelCounts()
    counts.add(ids(0, 0, 1, 2, -100), ids(0, 1, 1, 0, 2), 3)
    counts.add(ids(2), ids(2), 3)
    labels, confusion = counts.drain()
    assert (labels.names, labels.count_columns) == (
        ("0", "1", "2"),
        ("labels", "predictions", "hits"),
    )
    assert labels.counts.tolist() == [[2, 2, 1], [1, 2, 1], [2, 1, 1]]
    assert confusion.counts.tolist() == [[1, 1, 0], [0, 1, 0], [1, 0, 1]]
    assert not counts
    assert counts.drain() == []


def test_who_belongs_to_whom_in_a_batch_is_no_class() -> None:
    counts = LabelCounts()
    counts.add(ids(*range(8, 16)), ids(*range(8)), 32)
    assert counts.drain() == []


def test_without_scores_the_ids_tell_how_many_classes_there_are() -> None:
    counts = LabelCounts()
    counts.add(ids(4, 1), None, 0)
    (labels,) = counts.drain()
    assert labels.counts.tolist() == [[0], [1], [0], [0], [1]]
    counts.add(ids(0, 5_000_000), ids(1, 0), 0)
    assert len(counts.drain()[0].names) == 1000


def test_many_samples_take_no_more_room_than_a_few() -> None:
    counts, shares, channels = LabelCounts(), TokenCounts(), InputChannels()
    for i in range(100):
        counts.add(ids(0, i % 5, 3), ids(0, 0, 3), 0)
        shares.add(ids(0, i, 3))
        one = sample_channels("x", torch.tensor([[float(i)], [float(-i)]]))
        assert one is not None
        channels.add(one)
    assert len(counts._looks) < 32
    assert len(shares._looks) < 32
    assert len(channels._looks["x"]) < 32
    labels, confusion = counts.drain()
    assert labels.counts[:, 0].tolist() == [120, 20, 20, 120, 20]
    assert confusion.counts[:, 0].tolist() == [120, 20, 20, 20, 20]
    (tokens,) = shares.drain()
    assert (tokens.names[:2], tokens.counts[:2, 0].tolist()) == (("0", "3"), [101, 101])
    assert int(tokens.counts.sum()) == 300
    (table,) = channels.drain()
    square = sum(i * i for i in range(100)) / 100
    np.testing.assert_allclose(table.values, [[0, square**0.5, -99, 99]], rtol=1e-5, atol=1e-5)
    assert table.counts.tolist() == [[200, 0]]


def test_the_most_frequent_tokens_and_the_rest() -> None:
    shares = TokenCounts()
    shares.add(np.repeat(np.arange(100), np.arange(100, 0, -1)).astype(np.int64))
    shares.add(ids(-100, 7))
    (table,) = shares.drain()
    assert table.names[:3] == ("0", "1", "2")
    assert table.names[-1] == "other"
    assert len(table.names) == 65
    assert int(table.counts.sum()) == 5051
    assert float(table.values.sum()) == pytest.approx(1)
    assert shares.drain() == []


@pytest.mark.parametrize(
    ("batch", "channels"),
    [
        (torch.randn(8, 3, 16, 16) * torch.tensor([1.0, 5, 9])[:, None, None], 3),
        (torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8), 3),
        (torch.randn(64, 5).half(), 5),
        (torch.randn(2, 7, 4), 4),
        (torch.randn(10), 1),
        (torch.randn(3, 2000), 1),
    ],
)
def test_channels_of_inputs(batch: torch.Tensor, channels: int) -> None:
    seen = InputChannels()
    for _ in range(2):
        one = sample_channels("x", batch)
        assert one is not None
        seen.add(one)
    (table,) = seen.drain()
    assert table.names == tuple(f"x.{i}" for i in range(channels))
    values = batch.double()
    if channels == 1:
        by_channel = values.reshape(1, -1)
    elif batch.dim() == 4:
        by_channel = values.movedim(1, 0).reshape(channels, -1)
    else:
        by_channel = values.reshape(-1, channels).t()
    expected = torch.stack(
        (
            by_channel.mean(1),
            by_channel.std(1, correction=0),
            by_channel.amin(1),
            by_channel.amax(1),
        )
    ).t()
    np.testing.assert_allclose(table.values, expected.numpy(), rtol=1e-4, atol=1e-4)
    assert table.counts.tolist() == [[2 * by_channel.shape[1], 0]] * channels


def test_channels_that_are_not_finite() -> None:
    batch = torch.tensor([[1.0, float("nan")], [3.0, float("inf")]])
    seen, one = InputChannels(), sample_channels("x", batch)
    assert one is not None
    seen.add(one)
    (table,) = seen.drain()
    assert table.values.tolist() == [[2, 1, 1, 3], [0, 0, 0, 0]]
    assert table.counts.tolist() == [[2, 0], [2, 2]]
    assert sample_channels("x", torch.zeros(0, 3)) is None


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 3), (2, 4, 3, 5), (4,)])
def test_a_plain_cross_entropy_is_counted(shape: Sequence[int]) -> None:
    scores = torch.randn(*shape, requires_grad=True)
    target = torch.randint(0, 4, (*shape[:1], *shape[2:]) if len(shape) > 1 else ())
    if target.dim() > 1:
        target[0, 0] = -100
    probe = DataProbe()
    probe.cross_entropy((scores, target), {}, "train")
    probe.cross_entropy((scores, target), {}, "train")  # another call of the same step
    counted = closed(probe).counts("labels")
    predictions = scores.argmax(1 if len(shape) > 1 else 0)
    valid = target >= 0
    for c in range(4):
        assert counted[str(c)] == [
            int((target == c).sum()),
            int((predictions[valid] == c).sum()),
            int(((predictions == c) & (target == c)).sum()),
        ]


def test_what_is_no_class_index_is_left_alone() -> None:
    probe = DataProbe()
    scores = torch.randn(6, 4)
    for args in (
        (scores, torch.softmax(scores, 1)),
        (scores, torch.zeros(6, 4, dtype=torch.int64)),
        (torch.randn(6, 4, device="meta"), torch.zeros(6, dtype=torch.int64)),
        (None, None),
        (),
    ):
        probe.due = True
        probe.cross_entropy(args, {}, "train")
    seen: list[bool] = []

    def loss(x: torch.Tensor) -> torch.Tensor:
        target = torch.zeros(6, dtype=torch.int64)
        probe.due = True
        probe.cross_entropy((x, target), {}, "train")
        seen.append(True)
        return functional.cross_entropy(x, target)

    torch.func.grad(loss)(scores)
    assert seen
    assert closed(probe).frames == []


def test_many_classes_are_tokens_and_a_large_batch_is_sampled() -> None:
    probe = DataProbe()
    target = torch.arange(100_000) % 3
    probe.cross_entropy((torch.zeros(1, 1).expand(100_000, 2000), target), {}, "train")
    counted = closed(probe).counts("tokens")
    assert set(counted) == {"0", "1", "2"}
    assert 3000 < sum(n for (n,) in counted.values()) <= data.ROWS
    probe = DataProbe()
    probe.cross_entropy((torch.zeros(1, 1).expand(50_000, 1000), target[:50_000]), {}, "train")
    assert sum(n for n, *_ in closed(probe).counts("labels").values()) <= 131


def test_named_tensors_stand_for_what_is_found() -> None:
    probe = DataProbe()
    labels, scores = torch.tensor([[0, 1], [1, 1]]), torch.zeros(2, 2, 3)
    scores[..., 1] = 1
    images, tokens = {"image": torch.ones(2, 3, 4, 4)}, torch.tensor([5, 5, 9])
    probe.named("train", check_data(images, labels, scores, tokens))
    probe.due = True
    probe.cross_entropy((torch.zeros(6, 4), torch.zeros(6, dtype=torch.int64)), {}, "train")
    probe.named("eval", check_data(None, labels, labels, None))
    sink = closed(probe)
    assert sink.counts("labels") == {"0": [1, 0, 0], "1": [3, 4, 3], "2": [0, 0, 0]}
    assert sink.counts("labels", "eval") == {"0": [1, 1, 1], "1": [3, 3, 3]}
    assert sink.counts("tokens") == {"5": [2], "9": [1]}
    assert sorted(sink.counts("input_channels")) == ["image.0", "image.1", "image.2"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((None, torch.zeros(3), None, None), "labels as a torch.Tensor of integers"),
        (([1, 2], None, None, None), "inputs as a torch.Tensor, or several by name, found list"),
        ((None, None, torch.zeros(3, 2), None), "need the labels"),
        ((None, torch.zeros(3, dtype=torch.int64), torch.zeros(3), None), r"\(3,\) of the labels"),
        ((None, None, None, "text"), "tokens as a torch.Tensor of integers, found str"),
    ],
)
def test_what_is_named_wrongly_is_told(
    arguments: tuple[object, object, object, object], says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says):
        check_data(*arguments)


def test_when_it_looks_and_when_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "TRAIN_SHARE", 1e9)
    probe, sink = DataProbe(), Sink()
    batch = torch.zeros(6, 4), torch.zeros(6, dtype=torch.int64)
    for step in range(230):
        probe.cross_entropy(batch, {}, "train")
        if step in (50, 51):
            probe.cross_entropy(batch, {}, "eval")
        probe.stepped(cast(Training, sink), step)
    sent = [(f.mode, f.step, int(f.counts[0, 0])) for f in sink.frames if f.collection == "labels"]
    assert sent == [
        ("train", 10, 12),
        ("train", 20, 6),
        ("eval", 49, 6),
        ("train", 50, 18),
        ("eval", 50, 6),
        ("train", 100, 30),
        ("train", 200, 60),
    ]
    assert {f.every for f in sink.frames if f.mode == "train"} == {100}
    assert probe.spent_s > 0


def test_short_steps_are_looked_at_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("tocsin.emitter.probes.inputs.data.time.perf_counter", lambda: clock[0])
    probe, sink, looked = DataProbe(), Sink(), []
    for step in range(1000):
        clock[0] += 0.001
        if probe.due:
            looked.append(step)
            probe.due = False
            probe._costs.append(100e-6)
        probe.stepped(cast(Training, sink), step)
    assert looked[:3] == [0, 1, 11]
    assert {b - a for a, b in pairwise(looked[3:])} == {100}
    assert sink.schedule.intervals()["labels"] == 100


@pytest.mark.parametrize(
    ("step_s", "cost_s", "apart"),
    [(0.0004, 400e-6, 500), (0.0004, 900e-6, 1000), (0.1, 900e-6, 100)],
)
def test_late_looks_at_short_steps_are_as_far_apart_as_they_cost(
    step_s: float, cost_s: float, apart: int
) -> None:
    probe, sink = DataProbe(), Sink()
    sink.schedule.budget.review([step_s] * 32, 0.0)
    probe.start(cast(Training, sink), cast(Optimizers, None))
    batch = torch.zeros(6, 4), torch.zeros(6, dtype=torch.int64)
    for step in range(6001):
        if probe.due:
            probe.cross_entropy(batch, {}, "train")
            sink.isolation.spent["labels"] = sink.isolation.spent.get("labels", 0.0) + cost_s
        probe.stepped(cast(Training, sink), step)
    sent = [(f.step, f.every) for f in sink.frames if f.collection == "labels"]
    assert [step for step, _ in sent if 300 <= step < 1000] == list(range(300, 1000, 100))
    late = [step for step, _ in sent if step >= 3000]
    assert {b - a for a, b in pairwise(late)} == {apart}
    assert sent[-1][1] == apart


def test_however_much_a_look_costs_each_record_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tocsin.emitter.probes.inputs.data.time.thread_time", Ticks(1.0))
    probe, sink = DataProbe(), Sink()
    batch = torch.zeros(6, 4), torch.zeros(6, dtype=torch.int64)
    for step in range(1000):
        probe.cross_entropy(batch, {}, "train")
        probe.stepped(cast(Training, sink), step)
    sent = {f.step for f in sink.frames if f.collection == "labels"}
    assert {300, 400, 500, 600, 700, 800, 900} <= sent


def test_paced_by_steps_no_clock_decides_what_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tocsin.emitter.probes.inputs.data.time.thread_time", Ticks(1.0))
    monkeypatch.setattr("tocsin.emitter.probes.inputs.data.time.perf_counter", Ticks(1e-6))
    probe, sink = DataProbe(), Sink(pacing="steps")
    probe.start(cast(Training, sink), cast(Optimizers, None))
    batch = torch.zeros(6, 4), torch.zeros(6, dtype=torch.int64)
    for step in range(200):
        probe.cross_entropy(batch, {}, "train")
        probe.stepped(cast(Training, sink), step)
    for _ in range(9):
        probe.cross_entropy(batch, {}, "eval")
    probe.close(cast(Training, sink))
    sent = [(f.mode, f.step, int(f.counts[0, 0])) for f in sink.frames if f.collection == "labels"]
    assert sent == [
        ("train", 10, 12),
        ("train", 20, 6),
        ("train", 50, 18),
        ("train", 100, 30),
        ("train", 7, 60),
        ("eval", 7, 54),
    ]


def test_an_evaluation_is_not_slowed_down(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def now() -> float:
        clock[0] += 0.001  # each look at the clock, so a look at a batch costs 1 ms
        return clock[0]

    monkeypatch.setattr("tocsin.emitter.probes.inputs.data.time.perf_counter", now)
    monkeypatch.setattr("tocsin.emitter.probes.inputs.data.time.thread_time", now)
    probe = DataProbe()
    batch = torch.zeros(6, 4), torch.zeros(6, dtype=torch.int64)
    for _ in range(100):
        clock[0] += 0.010
        probe.cross_entropy(batch, {}, "eval")
    looked = closed(probe).counts("labels", "eval")["0"][0] / 6
    assert 4 <= looked <= 8


def test_what_a_loss_leaves_out_is_no_class() -> None:
    probe = DataProbe()
    targets = torch.tensor([0, 0, 0, 1, 2, 1])
    probe.cross_entropy((torch.eye(3)[targets], targets), {"ignore_index": 0}, "train")
    counted = closed(probe).counts("labels")
    assert [counted[name][0] for name in ("1", "2")] == [2, 1]
    assert counted["0"][0] == 0


def test_inputs_in_layouts_without_channels_are_left_alone() -> None:
    assert sample_channels("coo", torch.eye(3).to_sparse()) is None
    assert sample_channels("mkldnn", torch.ones(3, 3).to_mkldnn()) is None
