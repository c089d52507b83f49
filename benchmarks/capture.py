"""What watching costs a training: tocsin and others, side by side.

Copies of the same training are loaded, one for each column: nothing, tocsin as it comes, tocsin
with full rows of gradients and weights at each step, tocsin with activations at each step,
`wandb.watch(log="all", log_freq=1)`, the reference's hook (reductions, and full tensors), and naive
statistics. They take turns block by block, in another order each round, and all of tocsin's
processes are suspended while it is not their copy's turn; so each round compares the same machine
at nearly the same time. Per round each column is divided by "nothing"; reported are the median of
these ratios and their middle half, the time that tocsin's hooks have measured themselves, the CPU
of all processes of ours beside the training's thread, bytes on the bus a step, and memory.

    python benchmarks/capture.py                       # GPT and ResNet, one thread, then all cores
    python benchmarks/capture.py --columns nothing tocsin full --models gpt --rounds 30
    python benchmarks/capture.py --models gpt124m --device cuda [--compile]
    python benchmarks/capture.py --growth        # 100 to 20,000 tensors, 1 to 500 M parameters

wandb and smdebug are taken where they can be imported; `--python wandb=DIR/bin/python` names
another environment (they do not go together; smdebug 1.0.34 needs numpy < 2.3, protobuf <= 3.20.3,
requests and pandas).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

CONSOLE = Path(__file__).parent.parent / "console"
WORKER = str(Path(__file__).with_name("capture_worker.py"))

FULL = {name: {"every": 1} for name in ("gradients", "weights")}
CAPTURES: dict[str, dict[str, Any]] = {
    "tocsin": {},
    "full": {"budget": "100%", "collections": FULL},
    "activations": {"budget": "100%", "collections": {"activations": {"every": 1}}},
}
"""The section `capture` of each of tocsin's columns."""

OTHERS = ("wandb", "smdebug-reductions", "smdebug-full", "naive")
COLUMNS = ("nothing", *CAPTURES, *OTHERS)
WARM_UP_S = 12.0
WARM_UP_STEPS = 80
"""Tocsin's copies train for so long first, and for so many steps at least: the start-up allowance
is used up, the intervals are settled.
"""


@dataclass
class Column:
    """One copy of the training and what was measured of it."""

    name: str
    process: subprocess.Popen[str]
    folder: Path
    ours: list[psutil.Process] = field(default_factory=list)
    walls: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    steps: int = 0
    last: dict[str, Any] = field(default_factory=dict)
    hooks_before_s: float = 0.0
    bus_before: int = 0

    def ask(self, steps: int) -> dict[str, Any]:
        """Train a block. Raises SystemExit if the training has ended."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The next line of the worker; what others print between is left out."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise SystemExit(f"the training under {self.name!r} has ended early")

    def block(self, steps: int) -> None:
        """Train and note."""
        before = sum(sum(process.cpu_times()[:2]) for process in self.ours)
        self.last = self.ask(steps)
        self.walls.append(self.last["wall_s"] / steps)
        self.cpu_s += sum(sum(process.cpu_times()[:2]) for process in self.ours) - before
        self.cpu_s += self.last["cpu_s"] - self.last["thread_s"]
        self.steps += steps

    @property
    def beside_percent(self) -> float:
        """CPU beside the thread that trains, of one core."""
        return 100 * self.cpu_s / (statistics.mean(self.walls) * self.steps)

    def bus_bytes(self) -> int:
        """The size of the bus's file with its log."""
        return sum(path.stat().st_size for path in self.folder.glob(".tocsin/bus.db*"))


def begin(name: str, model: str, options: argparse.Namespace, threads: int, base: Path) -> Column:
    """Start the copy of a column and wait until it is loaded."""
    folder = base / name
    folder.mkdir()
    watcher = name if name in OTHERS else "none"
    python = options.python.get(name.partition("-")[0], sys.executable)
    command = [python, WORKER, model, "--threads", str(threads), "--watcher", watcher]
    command += ["--device", options.device, *(["--compile"] if options.compile else [])]
    if name in CAPTURES:
        (folder / "tocsin.yaml").write_text(json.dumps({"version": 1, "capture": CAPTURES[name]}))
        command = [sys.executable, "-m", "tocsin.console", "run", "--quiet", "--", *command]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={
            **os.environ,
            "XDG_CONFIG_HOME": str(folder / "config"),
            # Another environment has the trainings from here.
            **({"PYTHONPATH": str(CONSOLE)} if python != sys.executable else {}),
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if options.verbose else subprocess.DEVNULL,
        text=True,
    )
    column = Column(name, process, folder)
    column.answer()
    if name in CAPTURES:
        family = [psutil.Process(process.pid)]
        family += family[0].children(recursive=True)
        column.ours = [p for p in family if WORKER not in p.cmdline()[:3]]
    return column


@contextmanager
def suspended(columns: Sequence[Column]) -> Iterator[None]:
    """Let the processes of these columns take no CPU; the trainings themselves are idle."""
    processes = [process for column in columns for process in column.ours]
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


def measure(model: str, threads: int, options: argparse.Namespace) -> list[Column]:
    """All columns of one model."""
    with tempfile.TemporaryDirectory(prefix="tocsin-bench-") as name, ExitStack() as stack:
        columns: list[Column] = []
        for column_name in options.columns:
            try:
                with suspended(columns):
                    column = begin(column_name, model, options, threads, Path(name))
            except SystemExit:
                print(f"{column_name}: not here, or it does not run", file=sys.stderr)
                continue
            columns.append(column)
            stack.callback(_end, column)
        step_s = 1.0
        for column in columns:
            with suspended([other for other in columns if other is not column]):
                step_s = column.ask(3)["wall_s"] / 3
                if column.ours:
                    column.last = column.ask(max(WARM_UP_STEPS, int(WARM_UP_S / step_s)))
                    column.hooks_before_s = column.last.get("hooks_s", 0.0)
                    column.bus_before = column.bus_bytes()
        steps = options.steps or max(3, int(1.0 / step_s))
        for turn in range(options.rounds):
            start = turn % len(columns)
            for column in (*columns[start:], *columns[:start]):
                with suspended([other for other in columns if other is not column]):
                    column.block(steps)
            print(f"{model}, {threads} threads: round {turn + 1}/{options.rounds}", file=sys.stderr)
        for column in columns:
            column.last["bus_bytes"] = column.bus_bytes() - column.bus_before
        return columns


def _end(column: Column) -> None:
    assert column.process.stdin is not None
    column.process.stdin.close()
    try:
        column.process.wait(30)
    except subprocess.TimeoutExpired:
        column.process.kill()


def report(model: str, threads: int, columns: Sequence[Column]) -> list[dict[str, Any]]:
    """Print the table of one model; return it as values."""
    plain = columns[0]
    median_s = statistics.median(plain.walls)
    print(f"\n{model}, {threads} threads, step {1e3 * median_s:.2f} ms, {len(plain.walls)} rounds")
    print(
        f"{'column':<20} {'cost, median (middle half)':<30} {'in hooks':>9} "
        f"{'beside it':>12} {'bytes/step':>11} {'memory':>9}"
    )
    rows = []
    for column in columns:
        ratios = [100 * (b / a - 1) for a, b in zip(plain.walls, column.walls, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        row: dict[str, Any] = {
            "model": model, "threads": threads, "column": column.name,
            "step_ms": 1e3 * statistics.median(column.walls),
            "cost_percent": middle, "low_percent": low, "high_percent": high,
            "memory_mb": (column.last["memory_bytes"] - plain.last["memory_bytes"]) / 1e6,
        }  # fmt: skip
        if column.ours:
            hooks_s = column.last["hooks_s"] - column.hooks_before_s
            row["hooks_percent"] = (
                100 * hooks_s / sum(w for w in column.walls) / (column.steps / len(column.walls))
            )
            row["hooks_us"] = 1e6 * hooks_s / column.steps
            # Less what torch's own threads take.
            row["beside_percent"] = column.beside_percent - plain.beside_percent
            row["bytes_per_step"] = column.last["bus_bytes"] / column.steps
            row["intervals"] = column.last["intervals"]
        rows.append(row)
        print(
            f"{column.name:<20} {middle:+7.2f} % ({low:+.2f} … {high:+.2f} %)".ljust(51)
            + (
                f"{row['hooks_percent']:8.2f} % {row['beside_percent']:7.2f} % core "
                f"{row['bytes_per_step']:10,.0f}"
                if column.ours
                else " " * 33
            )
            + f" {row['memory_mb']:+6.0f} MB"
        )
    return rows


GROWTH = """
import json, sys, time, torch
tensors, numbers = int(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
each = max(1, numbers // tensors)
model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(each)) for _ in range(tensors)])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for parameter in model:
    parameter.grad = torch.ones_like(parameter)
from tocsin.emitter.hooks.torch_patches import hooks
loss = torch.zeros(1, requires_grad=True)
until, n = time.monotonic() + float(sys.argv[3]), 0
while time.monotonic() < until or n < 40:
    loss.sum().backward()
    optimizer.step()
    time.sleep(0.05)  # what forward and backward would take, and less than they would
    n += 1
    if n == 3:
        before, begun, first = hooks.isolation.seconds, time.perf_counter(), n
spent, lasted = hooks.isolation.seconds - before, time.perf_counter() - begun
shares = hooks.capture.schedule.budget.shares
print(json.dumps({
    "step_ms": 1e3 * lasted / (n - first), "hooks_percent": 100 * spent / lasted,
    "costs_ms": {name: 1e3 * share.cost_s for name, share in shares.items() if share.costs},
    "intervals": {name: share.interval for name, share in shares.items() if share.costs},
}))
"""


def growth(seconds: float) -> None:
    """How the cost grows with the number of tensors and of parameters."""
    print("tensors  parameters   step ms  in hooks  cost of a pass and its interval in force")
    for tensors, numbers in (
        (100, 1_000_000), (1_000, 1_000_000), (20_000, 1_000_000),
        (100, 10_000_000), (100, 100_000_000), (100, 500_000_000),
        (2_000, 100_000_000), (20_000, 500_000_000),
    ):  # fmt: skip
        with tempfile.TemporaryDirectory(prefix="tocsin-bench-") as folder:
            script = Path(folder) / "grow.py"
            script.write_text(GROWTH)
            done = subprocess.run(
                [
                    sys.executable, "-m", "tocsin.console", "run", "--quiet", "--",
                    sys.executable, str(script), str(tensors), str(numbers), str(seconds),
                ],
                cwd=folder, capture_output=True, text=True, check=False,
            )  # fmt: skip
        if done.returncode:
            print(f"{tensors:7,}  {numbers:10,}  {done.stderr.strip().splitlines()[-1:]}")
            continue
        found = json.loads(done.stdout.strip().splitlines()[-1])
        passes = ", ".join(
            f"{name} {cost:.2f} ms / {found['intervals'][name]}"
            for name, cost in found["costs_ms"].items()
        )
        print(
            f"{tensors:7,}  {numbers:11,}  {found['step_ms']:7.1f}  "
            f"{found['hooks_percent']:6.2f} %  {passes}",
            flush=True,
        )


def main() -> None:
    """Print the tables, and with --json one line of JSON each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["gpt", "resnet"])
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, os.cpu_count() or 1])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, help="of a block; by default about a second's worth")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument(
        "--python", action="append", default=[], metavar="wandb|smdebug=FILE",
        help="interpreter of the environment that has it",
    )  # fmt: skip
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each row of --growth")
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    options.python = dict(entry.split("=", 1) for entry in options.python)
    if options.growth:
        growth(options.seconds)
        return
    if "nothing" not in options.columns:
        options.columns.insert(0, "nothing")
    rows = []
    for model in options.models:
        for threads in dict.fromkeys(options.threads):
            rows += report(model, threads, measure(model, threads, options))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
