"""What is found in checkpoint files: written by torch, safetensors and DCP, read without them."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tocsin.emitter.checkpoints import health as checkpoint_health
from tocsin.emitter.checkpoints import reader_process
from tocsin.emitter.checkpoints.health import Health, health

INF = float("inf")


def trained(*, spoiled: bool = False) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A small model after one step."""
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoderLayer(16, 2, dim_feedforward=32)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 2, 16)).square().sum().backward()
    optimizer.step()
    if spoiled:
        with torch.no_grad():
            model.linear1.weight[3, 4] = float("nan")
            model.linear2.weight.zero_()
    return model, optimizer


def written(folder: Path, kind: str, model: torch.nn.Module) -> Path:
    """A checkpoint of that kind."""
    path = folder / f"checkpoint.{kind}"
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    if kind == "pt":
        torch.save({"model": state, "step": 3, "lr": 0.1}, path)
    elif kind == "whole.pt":
        torch.save(model, path)
    elif kind == "safetensors":
        save_file(state, path)
    elif kind == "bfloat16.pt":
        torch.save({name: value.to(torch.bfloat16) for name, value in state.items()}, path)
    elif kind == "float16.pt":
        torch.save({name: value.half() for name, value in state.items()}, path)
    elif kind == "float64.safetensors":
        save_file({name: value.double() for name, value in state.items()}, path)
    elif kind == "dcp":
        from torch.distributed import checkpoint as distributed

        distributed.save({"model": state, "step": 3}, checkpoint_id=path, no_dist=True)
    return path


KINDS = (
    "pt", "whole.pt", "safetensors", "bfloat16.pt", "float16.pt", "float64.safetensors", "dcp",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", KINDS)
def test_a_sound_checkpoint(tmp_path: Path, kind: str) -> None:
    model, _ = trained()

    found = health(written(tmp_path, kind, model))

    parameters = list(model.parameters())
    assert (found.torn, found.nonfinite, found.zeros) == ("", [], [])
    assert found.tensors == len(parameters)
    assert found.matrices == sum(parameter.dim() > 1 for parameter in parameters)
    assert found.complete
    assert not found.changed
    assert found.bytes_read >= 2 * sum(parameter.numel() for parameter in parameters)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_and_a_matrix_of_zeros_are_named(tmp_path: Path, kind: str) -> None:
    model, _ = trained(spoiled=True)

    found = health(written(tmp_path, kind, model))

    assert [name.endswith("linear1") or "linear1" in name for name in found.nonfinite] == [True]
    assert [("linear2" in name) for name in found.zeros] == [True]
    assert (found.nonfinite_tensors, found.zero_tensors, found.torn) == (1, 1, "")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_was_cut_off_is_torn(tmp_path: Path, kind: str) -> None:
    model, _ = trained()
    path = written(tmp_path, kind, model)
    file = next(path.glob("*.distcp")) if path.is_dir() else path
    whole = file.read_bytes()

    for part in (0.01, 0.5, 0.95):
        file.write_bytes(whole[: int(part * len(whole))])
        assert health(path).torn, part
    file.write_bytes(b"")
    assert health(path).torn


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_without_its_last_part_is_torn(tmp_path: Path) -> None:
    model, _ = trained()
    path = written(tmp_path, "dcp", model)
    (path / ".metadata").rename(tmp_path / "metadata")

    assert "not finished" in health(path).torn

    (tmp_path / "metadata").rename(path / ".metadata")
    next(path.glob("*.distcp")).unlink()
    assert "has no __0_0.distcp" in health(path).torn


def test_all_files_of_a_folder_are_read(tmp_path: Path) -> None:
    model, optimizer = trained(spoiled=True)
    written(tmp_path, "safetensors", model)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    (tmp_path / "trainer_state.json").write_text("{}")
    (tmp_path / "README").write_bytes(b"")

    found = health(tmp_path)

    assert found.tensors > len(list(model.parameters()))
    assert found.nonfinite == ["linear1.weight"]


def test_a_best_score_that_there_is_not_yet_is_healthy(tmp_path: Path) -> None:
    path, kept = tmp_path / "a.ckpt", {"kth_value": torch.tensor(INF), "past": torch.tensor([INF])}
    state = {"w": torch.ones(2, 2)}
    torch.save({"state_dict": state, "callbacks": {"M{'mode': 'min'}": kept}}, path)
    assert health(path).nonfinite_tensors == 0
    torch.save({"state_dict": state, "best": torch.tensor(INF)}, path)
    assert health(path).nonfinite_tensors == 0
    torch.save({"state_dict": state | {"scale": torch.tensor(float("nan"))}}, path)
    assert health(path).nonfinite == ["state_dict.scale"]


def test_a_mask_of_minus_infinity_is_healthy(tmp_path: Path) -> None:
    mask = torch.triu(torch.full((4, 4), -INF), 1)
    names = {"mask": mask, "half": mask.half(), "brain": mask.bfloat16(), "weight": torch.ones(2)}
    torch.save(names, tmp_path / "a.pt")
    assert health(tmp_path / "a.pt").nonfinite == []

    torch.save({"mask": mask, "bad": torch.tensor([1.0, -INF])}, tmp_path / "b.pt")
    assert health(tmp_path / "b.pt").nonfinite == ["bad"]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    good, bad = torch.tensor([1.0, -2.0, 0.0]), torch.tensor([1.0, float("nan"), 0.0])
    torch.save({"good": good.to(dtype), "bad": bad.to(dtype)}, tmp_path / "a.pt")
    assert health(tmp_path / "a.pt").nonfinite == ["bad"]


def test_only_the_numbers_of_a_view_count(tmp_path: Path) -> None:
    buffer = torch.full((10, 10), float("nan"))
    buffer[2:4] = 1.0
    torch.save({"rows": buffer[2:4], "apart": buffer[2:4, ::2]}, tmp_path / "a.pt")
    assert health(tmp_path / "a.pt").nonfinite == []

    expanded = torch.zeros(3, 4).expand(5, 3, 4)
    torch.save({"w": expanded, "t": torch.full((2, 3), INF).t()}, tmp_path / "b.pt")
    found = health(tmp_path / "b.pt")
    assert (found.torn, found.nonfinite, found.zeros) == ("", ["t"], ["w"])


def test_nothing_of_a_pickle_is_executed(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str, str]]:
            return open, (str(tmp_path / "sprung"), "w")

    torch.save({"trap": Trap(), "weight": torch.full((2, 2), INF)}, tmp_path / "a.pt")

    assert health(tmp_path / "a.pt").nonfinite == ["weight"]
    assert not (tmp_path / "sprung").exists()


def test_other_files_say_nothing(tmp_path: Path) -> None:
    for name, raw in (("a.pt", pickle.dumps({"a": 1})), ("b", b"text"), ("c.npy", b"\x93NUMPY")):
        (tmp_path / name).write_bytes(raw)
        assert health(tmp_path / name) == Health()
    torch.save({"w": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert health(tmp_path / "old.pt") == Health()
    with pytest.raises(FileNotFoundError):
        health(tmp_path / "none.pt")


def test_of_a_large_one_the_beginnings_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_health, "_MIN_BYTES", 1024)
    bad = torch.ones(100, 1000)
    bad[0, 3] = INF
    torch.save({"a": torch.ones(100, 1000), "b": bad, "z": torch.zeros(9, 99)}, tmp_path / "a.pt")

    found = health(tmp_path / "a.pt", max_bytes=100_000)

    assert found.nonfinite == ["b"]
    assert not found.complete
    assert found.zeros == []
    assert found.bytes_read <= 101_000
    late = health(tmp_path / "a.pt", max_s=1.0, clock=iter(range(100)).__next__)
    assert (late.bytes_read, late.complete) == (0, False)


def test_the_process_tells_it_as_json(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model, _ = trained(spoiled=True)
    path = written(tmp_path, "pt", model)
    command = [sys.executable, "-m", reader_process.__name__, str(path)]

    done = subprocess.run(command, capture_output=True, check=True, text=True)
    assert '"nonfinite": ["model.linear1.weight"]' in done.stdout

    lost = subprocess.run([*command[:-1], str(tmp_path / "no")], capture_output=True, text=True)
    assert lost.returncode == 1
    assert "No such file" in lost.stdout
