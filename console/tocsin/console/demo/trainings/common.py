"""What the trainings share: their command line, seeding, what they print, and checkpoints."""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch


def training_parser(
    description: str, *, learning_rate: float, faults: Sequence[str], sizes: Sequence[str]
) -> argparse.ArgumentParser:
    """Return the options that every training has. Steps are counted from 0."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=learning_rate, help="learning rate")
    parser.add_argument("--batch", type=int, help="samples a step; default: the size's own")
    parser.add_argument("--size", choices=sizes, default=sizes[0])
    parser.add_argument("--threads", type=int, default=1, help="threads that torch may use")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--print-every", type=int, default=10, metavar="N", help="steps")
    parser.add_argument("--save-every", type=int, default=0, metavar="N", help="steps; 0: never")
    parser.add_argument(
        "--save-to", default="checkpoint.pt", metavar="F", help="{step} in it becomes the step"
    )
    parser.add_argument("--weights-hash", action="store_true", help="print the weights' SHA-256")
    parser.add_argument(
        "--times", action="store_true", help="print when the fault came and when the loop was left"
    )
    parser.add_argument("--fault", choices=faults, help="what to break; default: nothing")
    parser.add_argument("--fault-at", type=int, default=50, metavar="K", help="step of the fault")
    return parser


def prepare(*, seed: int, threads: int, device: str = "cpu") -> torch.device:
    """Make this process repeatable: the same seed gives the same weights, bit for bit.

    On CUDA, operations without a deterministic kernel only warn; on a CPU these trainings have
    none.
    """
    chosen = torch.device(device)
    if chosen.type == "cuda":
        # cuBLAS is repeatable only with a fixed workspace, set before its first use.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Only there: the call imports torch's compiler, which takes longer than a short training.
        torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_num_threads(threads)
    random.seed(seed)
    torch.manual_seed(seed)
    return chosen


class Printer:
    """Prints the lines of a training, each flushed so that a reader of the pipe sees it at once."""

    def __init__(self, *, every: int, times: bool = False) -> None:
        self._every = every
        self._times = times

    def step(self, step: int, loss: torch.Tensor) -> None:
        """Print the loss at every N-th step. Reading it waits for the device, so not each step."""
        if step % self._every == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)

    def fault(self, name: str, step: int, what: str) -> None:
        """Say that the fault happens now."""
        print(f"fault {name} at step {step}: {what}{self._now()}", flush=True)

    def left(self, step: int) -> None:
        """Say, if times are wanted, that the loop was left during or after this step."""
        if self._times:
            print(f"left the loop at step {step}{self._now()}", flush=True)

    def _now(self) -> str:
        return f" [unix time {time.time():.6f} s]" if self._times else ""


def weights_hash(model: torch.nn.Module) -> str:
    """Return the SHA-256 of all parameters and buffers: names, types, shapes and bits."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def parameter_named(model: torch.nn.Module, name: str) -> torch.nn.Parameter:
    """Return one parameter. Exits with a message that lists the names if there is none such."""
    parameters = dict(model.named_parameters())
    if name not in parameters:
        raise SystemExit(f"no parameter {name!r}; the model has: {', '.join(parameters)}")
    return parameters[name]


def poison_gradient(parameter: torch.nn.Parameter) -> None:
    """Set one element of the parameter's gradient to NaN."""
    parameter.grad[(0,) * parameter.grad.dim()] = float("nan")


def save_checkpoint(
    path: str, *, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Write what is needed to go on after this step; a crash half-way leaves the older file."""
    target = Path(path.format(step=step))
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    torch.save(
        {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, partial
    )
    partial.replace(target)


def finish(model: torch.nn.Module, arguments: argparse.Namespace) -> None:
    """Print the closing lines of a training that ran to its end."""
    print(f"done after {arguments.steps} steps", flush=True)
    if arguments.weights_hash:
        print(f"weights sha256 {weights_hash(model)}", flush=True)
