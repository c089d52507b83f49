"""The trainings really train, break where they are told to, and repeat themselves bit for bit."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tocsin.console.demo.trainings import common, gpt, resnet

Train = Callable[[list[str]], int]
SMALL_GPT = ["--layers", "2", "--width", "32", "--context", "32"]
SMALL_RESNET = ["--batch", "16"]


@pytest.fixture(autouse=True)
def torch_settings() -> Iterator[None]:
    """Give back torch's global settings, which the trainings change as scripts may."""
    threads = torch.get_num_threads()
    state = torch.random.get_rng_state()
    yield
    torch.set_num_threads(threads)
    torch.random.set_rng_state(state)


@pytest.fixture
def bad_gradients() -> Iterator[list[list[str]]]:
    """Collect for each optimizer step the positions of the gradients that are not finite."""
    steps: list[list[str]] = []

    def look(optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        steps.append(
            [
                str(index)
                for group in optimizer.param_groups
                for index, parameter in enumerate(group["params"])
                if not torch.isfinite(parameter.grad).all()
            ]
        )

    handle = register_optimizer_step_pre_hook(look)
    yield steps
    handle.remove()


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", output, re.MULTILINE)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "falls_to"), [(gpt.main, 3.7), (resnet.main, 0.6)], ids=["gpt", "resnet"]
)
def test_a_healthy_training_learns(
    train: Train,
    falls_to: float,
    capsys: pytest.CaptureFixture[str],
    bad_gradients: list[list[str]],
) -> None:
    assert train(["--steps", "60", "--print-every", "1"]) == 0

    series = losses(capsys.readouterr().out)
    assert len(series) == 60
    assert sum(series[-10:]) / 10 < falls_to < series[0]
    assert bad_gradients == [[]] * 60


@pytest.mark.parametrize(
    ("train", "arguments"),
    [(gpt.main, SMALL_GPT), (resnet.main, SMALL_RESNET)],
    ids=["gpt", "resnet"],
)
def test_the_same_seed_gives_the_same_weights(
    train: Train, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def output(seed: int) -> str:
        assert train([*arguments, "--steps", "8", "--weights-hash", "--seed", str(seed)]) == 0
        return capsys.readouterr().out

    first = output(0)
    assert re.search(r"^weights sha256 [0-9a-f]{64}$", first, re.MULTILINE)
    assert output(0) == first
    assert output(1) != first


def test_nan_gradient_is_in_one_tensor_of_one_step(
    capsys: pytest.CaptureFixture[str], bad_gradients: list[list[str]]
) -> None:
    tensor = "blocks.1.attention.qkv.weight"
    fault = f"--fault nan_gradient --fault-at 6 --fault-tensor {tensor}"
    gpt.main([*SMALL_GPT, "--steps", "9", "--print-every", "1", *fault.split()])

    out = capsys.readouterr().out
    model = gpt.Gpt(gpt.GptSize(layers=2, width=32, heads=4, context=32, batch=8))
    position = [name for name, _ in model.named_parameters()].index(tensor)
    assert f"fault nan_gradient at step 6: one NaN in the gradient of {tensor}" in out
    assert bad_gradients[:7] == [[]] * 6 + [[str(position)]]
    assert all(math.isfinite(loss) for loss in losses(out)[:7])
    assert math.isnan(losses(out)[7])


@pytest.mark.parametrize(
    ("train", "arguments"),
    [
        (gpt.main, [*SMALL_GPT, "--fault", "nan_loss"]),
        (resnet.main, [*SMALL_RESNET, "--fault", "nan_batch"]),
    ],
    ids=["nan_loss", "nan_batch"],
)
def test_a_bad_loss_makes_the_whole_backward_bad(
    train: Train,
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    bad_gradients: list[list[str]],
) -> None:
    train([*arguments, "--steps", "7", "--print-every", "1", "--fault-at", "5"])

    series = losses(capsys.readouterr().out)
    assert all(math.isfinite(loss) for loss in series[:5])
    assert math.isnan(series[5])
    assert bad_gradients[:5] == [[]] * 5
    assert len(bad_gradients[5]) > 25


@pytest.mark.slow
def test_diverge_leaves_the_loss_high_but_finite(
    capsys: pytest.CaptureFixture[str], bad_gradients: list[list[str]]
) -> None:
    resnet.main(["--steps", "80", "--print-every", "1", "--fault", "diverge", "--fault-at", "30"])

    series = losses(capsys.readouterr().out)
    assert max(series[:31]) < 3
    assert min(series[32:]) > 10 * min(series[:31])
    assert all(math.isfinite(loss) for loss in series)
    assert bad_gradients == [[]] * 80


def test_checkpoints_hold_the_step_and_the_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(tmp_path / "saved" / "{step}.pt")
    steps = ["--steps", "4", "--weights-hash"]
    resnet.main([*SMALL_RESNET, *steps, "--save-every", "2", "--save-to", target])

    assert sorted(file.name for file in (tmp_path / "saved").iterdir()) == ["1.pt", "3.pt"]
    checkpoint = torch.load(tmp_path / "saved" / "3.pt")
    assert checkpoint["step"] == 3
    model = resnet.ResNet(resnet.SIZES["test"])
    model.load_state_dict(checkpoint["model"])
    assert f"weights sha256 {common.weights_hash(model)}" in capsys.readouterr().out


def test_an_unknown_tensor_is_answered_with_the_names() -> None:
    with pytest.raises(SystemExit, match=r"no parameter 'nowhere'.*blocks\.0\.attention\.qkv"):
        gpt.main([*SMALL_GPT, "--fault", "nan_gradient", "--fault-tensor", "nowhere"])


@pytest.mark.parametrize(
    ("build", "tensors", "parameters"),
    [
        (lambda: gpt.Gpt(gpt.SIZES["bench"]), 101, 6_868_992),
        (lambda: resnet.ResNet(resnet.SIZES["bench"]), 62, 2_797_610),
    ],
    ids=["gpt", "resnet"],
)
def test_the_bench_sizes_are_as_documented(
    build: Callable[[], torch.nn.Module], tensors: int, parameters: int
) -> None:
    counts = [parameter.numel() for parameter in build().parameters()]
    assert (len(counts), sum(counts)) == (tensors, parameters)


def test_the_text_comes_back_from_its_tokens() -> None:
    tokens = gpt.text_tokens(gpt.BYTES)
    assert len(tokens) > 300_000
    assert int(tokens.max()) < gpt.BYTES
    assert 'The "assert" statement' in bytes(tokens.tolist()).decode()
    assert len(gpt.text_tokens(4096)) < len(tokens) / 2
