"""What it costs that all ranks leave at the same step: the rounds of the agreement on gloo ranks.

Each rank trains a small transformer under DDP and holds the rounds as under `tocsin run`, each
timed: by the clock, waiting included, and in processor time of the training thread. The share is of
the time of the same steps.

    python benchmarks/agreement.py --ranks 2 4 8 --steps 300
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tocsin.emitter.stop.rank_agreement import Agreement
from tocsin.emitter.stop.side_group import GlooCollective

WARM_UP = 20


@dataclass(frozen=True)
class Cost:
    """One rank's: sums over the steps, seconds."""

    steps_s: float
    rounds_s: float
    rounds_cpu_s: float
    calls: int


def train(rank: int, ranks: int, steps: int, folder: Path) -> Cost:
    """Train on one rank. Raises RuntimeError: the ranks did not step alike."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    agreement = Agreement(GlooCollective(dist, dist.new_group(backend="gloo")))
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    model = DistributedDataParallel(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(4, 64, 128)
    began = rounds_s = rounds_cpu_s = 0.0
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            began, rounds_s, rounds_cpu_s = time.perf_counter(), 0.0, 0.0
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        clock, cpu = time.perf_counter(), time.thread_time()
        agreement.at_exit_point(False)
        rounds_s += time.perf_counter() - clock
        rounds_cpu_s += time.thread_time() - cpu
    steps_s = time.perf_counter() - began
    if agreement.broken:
        raise RuntimeError(agreement.broken)
    agreement.close()
    dist.destroy_process_group()
    return Cost(steps_s, rounds_s, rounds_cpu_s, steps)


def measure(ranks: int, steps: int) -> list[Cost]:
    """Fork the ranks and wait for them."""
    with tempfile.TemporaryDirectory(prefix="tocsin-bench-") as name:
        folder = Path(name)
        children = []
        for rank in range(ranks):
            pid = os.fork()
            if not pid:
                code = 1
                try:
                    cost = train(rank, ranks, steps, folder)
                    (folder / f"{rank}.json").write_text(json.dumps(asdict(cost)))
                    code = 0
                finally:
                    os._exit(code)
            children.append(pid)
        if any(os.waitpid(pid, 0)[1] for pid in children):
            raise SystemExit(f"{ranks} ranks: one of them failed")
        return [Cost(**json.loads((folder / f"{r}.json").read_text())) for r in range(ranks)]


def main() -> None:
    """Print one line for each number of ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    for ranks in arguments.ranks:
        costs = measure(ranks, arguments.steps)
        steps_s = sum(each.steps_s for each in costs)
        share = sum(each.rounds_s for each in costs) / steps_s
        cpu = sum(each.rounds_cpu_s for each in costs) / steps_s
        step_ms = 1e3 * steps_s / sum(each.calls for each in costs)
        print(
            f"{ranks} ranks, {step_ms:.1f} ms a step: the agreement takes {share:.3%} of the step "
            f"time, {cpu:.3%} in processor time"
        )


if __name__ == "__main__":
    main()
