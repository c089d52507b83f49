"""Tensors that are saved in full: copied by the training, written beside it, read back."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from support.trainings.captured import Said, captured, said
from tocsin.emitter.plan.settings import capture_settings
from tocsin.emitter.probes.full_tensors import HostTensors
from tocsin.emitter.send.tensor_files import Job, Saved, TensorFiles, size_of
from tocsin.schemas.configuration.capture import capture_config
from tocsin.schemas.configuration.store import StoreConfig, capture_json
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.runs import CaptureDegraded
from tocsin.schemas.records.saved_tensors import TensorsSaved
from tocsin.schemas.store_paths import tensors_path
from tocsin.store import open_run
from tocsin.store.errors import DamagedStore, NotCaptured
from tocsin.store.storage.local import LocalStorage
from tocsin.store.tensor_values import read_tensor

BUDGET = 100_000


class Disk:
    """The files of one rank, and what was said of them."""

    def __init__(self, root: Path | str, incarnation: str = "1", **options: int) -> None:
        self.saved: list[Saved] = []
        self.failed: list[str] = []
        given = {"ranks": 1, "budget_bytes": BUDGET} | options
        self.files = TensorFiles(
            str(root),
            "run-1",
            incarnation,
            options={},
            saved=self.saved.append,
            failed=self.failed.append,
            **given,
        )
        self.incarnation = incarnation

    def put(self, tensors: dict[str, torch.Tensor], step: int = 3, rank: int = 0) -> None:
        copied = HostTensors(tensors)
        copied.start()
        path = tensors_path("run-1", self.incarnation, "gradients", step=step, rank=rank)
        self.files.put(Job(copied, path, "gradients", step))

    def records(self) -> list[TensorsSaved]:
        return [
            TensorsSaved(
                run_id="run-1",
                incarnation=self.incarnation,
                collection=one.job.collection,
                step=one.job.step,
                uri=one.uri,
                path=one.job.path,
                size_bytes=one.size_bytes,
                tensors=tuple(one.tensors),
            )
            for one in self.saved
        ]


def on_disk(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b": torch.tensor(float("nan"), dtype=torch.bfloat16),
    "c/../d": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "e": torch.tensor([[True, False]]).to(torch.float64),
    "f": torch.ones(4, 2, dtype=torch.float16).t(),
}


def test_they_come_back_bit_by_bit(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.put(TENSORS)
    disk.files.close()

    (record,) = disk.records()
    read = {t.name: read_tensor(record, t, LocalStorage(tmp_path)) for t in record.tensors}

    assert disk.failed == []
    assert set(read) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert read[name].shape == tuple(tensor.shape)
        assert np.array_equal(read[name].astype(float), tensor.double().numpy(), equal_nan=True)
    assert read["a.weight"].dtype == np.float32
    assert record.size_bytes == on_disk(tmp_path) <= size_of(HostTensors(TENSORS))


def test_another_file_in_its_place_is_noticed(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.put(TENSORS)
    disk.files.close()
    (record,) = disk.records()
    other = Disk(tmp_path / "other")
    other.put({name: tensor + 1 for name, tensor in TENSORS.items()})
    other.files.close()
    (tmp_path / record.path).write_bytes((tmp_path / "other" / record.path).read_bytes())

    with pytest.raises(DamagedStore, match="its checksum differs"):
        read_tensor(record, record.tensors[0], LocalStorage(tmp_path))
    (tmp_path / record.path).unlink()
    with pytest.raises(DamagedStore, match="cannot be read"):
        read_tensor(record, record.tensors[0])


def test_the_copy_is_of_that_moment(tmp_path: Path) -> None:
    disk, tensor = Disk(tmp_path), torch.zeros(8)
    disk.put({"a": tensor})
    tensor += 1
    disk.files.close()
    (record,) = disk.records()
    assert not read_tensor(record, record.tensors[0]).any()


def test_a_file_that_is_there_counts_once(tmp_path: Path) -> None:
    left: list[int] = []

    def saved(one: Saved) -> None:
        left.append(files.most_bytes)
        sizes.append(one.size_bytes)

    sizes: list[int] = []
    files = TensorFiles(
        str(tmp_path),
        "run-1",
        "1",
        ranks=1,
        budget_bytes=BUDGET,
        options={},
        saved=saved,
        failed=lambda reason: None,
    )
    copied = HostTensors({"a": torch.ones(15_000)})
    copied.start()
    files.put(Job(copied, tensors_path("run-1", "1", "gradients", step=1, rank=0), "gradients", 1))
    files.close()

    assert left == [BUDGET - sizes[0]]


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_budget_is_never_exceeded(tmp_path: Path, ranks: int) -> None:
    every = []
    for incarnation in ("1", "2", "3"):
        for rank in range(ranks):
            disk = Disk(tmp_path, incarnation, ranks=ranks)
            for step in range(20):
                if size_of(HostTensors({"a": torch.ones(2_000)})) > disk.files.most_bytes:
                    disk.files.use_up()
                    break
                disk.put({"a": torch.ones(2_000)}, step, rank)
            disk.files.close()
            every.append(disk)
            assert on_disk(tmp_path) <= BUDGET
    assert on_disk(tmp_path) > BUDGET / 2
    assert all(disk.failed == ["the budget of 0.0001 GB is used up"] for disk in every)
    assert all(disk.files.off for disk in every)


def test_a_disk_that_is_full_is_said_once_and_no_more_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: HostTensors, path: Path) -> Sequence[object]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(HostTensors, "write", full)
    disk = Disk(tmp_path)
    for step in range(5):
        disk.put(TENSORS, step)
    disk.files.close()

    assert len(disk.failed) == 1
    assert "No space left" in disk.failed[0]
    assert (disk.saved, disk.files.off, disk.files.waiting_bytes) == ([], True, 0)
    assert on_disk(tmp_path) == 0


def test_into_a_bucket_and_back(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    first = Disk("s3://runs/full")
    first.put(TENSORS)
    first.files.close()
    (record,) = first.records()

    read = read_tensor(record, record.tensors[0])

    assert record.uri.startswith("s3://runs/full/run=run-1/tensors/incarnation=1/gradients-step3")
    assert np.array_equal(read, TENSORS["a.weight"].numpy())
    # What an earlier incarnation has saved counts.
    again = Disk("s3://runs/full", "2", budget_bytes=record.size_bytes + 100)
    again.put(TENSORS)
    again.files.close()
    assert len(again.failed) == 1


def test_the_section_says_which_steps_and_where(tmp_path: Path) -> None:
    config = capture_config(
        {
            "collections": {"gradients": {"save": "full", "steps": [0, 500]}},
            "full_tensors": {"budget": "20GB"},
        }
    )
    settings = capture_settings(capture_json(config, StoreConfig(url="runs"), tmp_path))

    plan = settings.plans["gradients"]
    assert plan.saves == {0, 500}
    schedule = plan.schedule()
    assert schedule is not None
    assert schedule.automatic
    assert (settings.full.url, settings.full.budget_bytes) == (str(tmp_path / "runs"), 20 * 10**9)
    assert "full_tensors" not in json.loads(
        capture_json(capture_config({}), StoreConfig(url="runs"), tmp_path)
    )


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"save": "full"}, "'save' needs the steps"),
        ({"save": "some", "steps": [1]}, "save"),
    ],
)
def test_what_is_wrong_with_it(options: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        capture_config({"collections": {"gradients": options}})


def test_activations_cannot_be_saved_yet() -> None:
    with pytest.raises(ConfigurationError, match="activations cannot be saved in full"):
        capture_config({"collections": {"activations": {"save": "full", "steps": [1]}}})


def trained(folder: Path, **full: object) -> tuple[nn.Module, Said]:
    """Six steps of SGD with a rate of 1, of which 2 and 4 are to be saved; the model after them."""
    section = {
        "collections": {
            "gradients": {"save": "full", "steps": [2, 4]},
            "first": {"of": "weights", "match": "^0\\.", "save": "full", "steps": [4]},
        },
        "full_tensors": full,
    }
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with captured(folder, TOCSIN_CAPTURE=json.dumps(section)):
        for step in range(6):
            optimizer.zero_grad()
            model(torch.full((2, 4), 0.1 * step)).square().sum().backward()
            optimizer.step()
            if step == 4:
                kept = copy.deepcopy(model)
                for after, before in zip(kept.parameters(), model.parameters(), strict=True):
                    after.grad = before.grad.clone()
    return kept, said(folder)


def test_a_training_saves_what_it_is_asked_for(tmp_path: Path) -> None:
    model, found = trained(tmp_path)

    saved = [event for event in found.events if isinstance(event, TensorsSaved)]
    assert {(one.collection, one.step) for one in saved} == {
        ("gradients", 2), ("gradients", 4), ("first", 4),
    }  # fmt: skip
    run = open_run("r1", bus=tmp_path / "bus.db")
    weight = dict(model.named_parameters())["0.weight"]
    assert weight.grad is not None
    tensor = run.tensor("0.weight", "gradients")
    assert list(tensor.saved_steps()) == [2, 4]
    assert np.array_equal(tensor.value(4), weight.grad.numpy())
    assert np.array_equal(run.tensor("0.weight", "first").value(4), weight.detach().numpy())
    assert run.collections()["first"].saved == 2
    with pytest.raises(NotCaptured, match="Captured: 2, 4"):
        tensor.value(3)
    # Summaries are made as without it.
    assert "l2" in tensor.statistics()


def test_without_a_budget_it_trains_as_ever(tmp_path: Path) -> None:
    _, found = trained(tmp_path, budget="10B")

    assert not any(isinstance(event, TensorsSaved) for event in found.events)
    degraded = [event for event in found.events if isinstance(event, CaptureDegraded)]
    assert [one.reason for one in degraded] == ["the budget of 1e-08 GB is used up"]
    assert len({step for step, _, _ in found.rows}) == 6
