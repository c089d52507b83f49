"""What it costs to summarise the gradients, or the weights, of the benchmark's GPT.

    python benchmarks/summaries.py [--repeats 15] [--step-ms 117]
    python benchmarks/summaries.py --device cuda

Each method reads all 101 tensors (6.9 M numbers) once, on one thread, after the cache was filled
with other numbers: that is how a training leaves them. Methods take turns; printed are the median
and the least CPU time of the repeats (other programs hardly disturb it), nanoseconds per number of
the least, and its share of a step.

On a GPU it is a GPT of 92 M numbers in 149 tensors; printed are the medians of the time of the
calling thread, and of the time until the GPU has finished.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Final

import torch

from tocsin.console.demo.trainings.gpt import SIZES, Gpt, GptSize
from tocsin.emitter.probes.checksums import Checksums
from tocsin.emitter.probes.gradient_blocks import BlockReader
from tocsin.emitter.statistics.cpu_rows import exact_row, host_rows
from tocsin.emitter.statistics.gpu_rows import PackedRows
from tocsin.emitter.statistics.low_precision import LowPrecision
from tocsin.emitter.statistics.reductions import dense, norms
from tocsin.emitter.statistics.tensor_quantiles import Quantiles
from tocsin.emitter.statistics.tensor_rows import TensorRows, Wanted

CACHE: Final = 20_000_000


def measure(methods: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of CPU time of each call, in turns."""
    others = torch.ones(CACHE)
    found: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(repeats):
        for name, method in methods.items():
            others.sum()
            began = time.process_time()
            method()
            found[name].append(time.process_time() - began)
    return found


def on_device(device: str, repeats: int) -> None:
    """Measure there and print a table."""
    size = GptSize(12, 768, 12, context=1024, batch=8, vocabulary=4096)
    flat = [parameter.detach().view(-1) for parameter in Gpt(size).to(device).parameters()]
    half = [tensor.bfloat16() for tensor in flat]
    names = [str(i) for i in range(len(flat))]
    methods: dict[str, Callable[[], object]] = {
        "rows": lambda: PackedRows(flat),
        "rows, tensor by tensor": lambda: [PackedRows([tensor]) for tensor in flat],
        "rows of bfloat16": lambda: PackedRows(half),
        "ends of bfloat16": lambda: LowPrecision(names, half),
        "quantiles": lambda: Quantiles(flat),
        "norms": lambda: norms(flat),
    }
    finish = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    print(f"{len(flat)} tensors, {sum(t.numel() for t in flat):,} numbers")
    print(f"{'':24}{'the call':>12} {'to the end':>12}")
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in methods}
    for _ in range(repeats):
        for name, method in methods.items():
            finish()
            began = time.perf_counter()
            result = method()
            called = time.perf_counter()
            finish()
            found[name].append((called - began, time.perf_counter() - began))
            del result
    for name, times in found.items():
        call, whole = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
        print(f"{name:24}{call:9.2f} ms {whole:9.2f} ms")


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--step-ms", type=float, default=117.0, help="a step of this GPT")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.device != "cpu":
        on_device(arguments.device, arguments.repeats)
        return
    torch.set_num_threads(1)
    named = list(Gpt(SIZES["bench"]).named_parameters())
    names = [name for name, _ in named]
    gradients = [1e-3 * torch.randn_like(parameter).detach() for _, parameter in named]
    flat = [gradient.view(-1) for gradient in gradients]
    half = [tensor.half() for tensor in flat]
    small = [tensor for tensor in flat if tensor.numel() <= 4096]
    numbers = sum(tensor.numel() for tensor in flat)
    blocks = BlockReader()
    methods: dict[str, Callable[[], object]] = {
        "finding them": lambda: [dense(parameter) for _, parameter in named],
        "a block of each": lambda: blocks.read(gradients),
        "norms": lambda: norms(flat),
        "rows": lambda: host_rows(flat),
        "rows of the small ones": lambda: host_rows(small),
        "rows of float16": lambda: host_rows(half),
        "quantiles": lambda: Quantiles(flat).rows,
        "ends of float16": lambda: LowPrecision(names, half).rows,
        "all of it": lambda: list(TensorRows(names, flat, [Wanted("gradients")]).tables()),
        "checksums": lambda: list(Checksums(named).tables()),
        "rows in float64": lambda: [exact_row(tensor) for tensor in flat],
    }
    print(f"{len(named)} tensors, {numbers:,} numbers; a step of {arguments.step_ms:g} ms")
    print(f"{'':24}{'median':>9} {'least':>9} {'per number':>11} {'of a step':>10}")
    for name, seconds in measure(methods, arguments.repeats).items():
        best = min(seconds)
        print(
            f"{name:24}{1e3 * statistics.median(seconds):6.2f} ms {1e3 * best:6.2f} ms "
            f"{1e9 * best / numbers:8.3f} ns {1e5 * best / arguments.step_ms:8.2f} %"
        )


if __name__ == "__main__":
    main()
