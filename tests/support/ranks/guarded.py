"""Two gloo ranks whose gradient gets a NaN at one step, under `stop.before_update`.

python -m support.ranks.guarded FOLDER

Three trainings, one after the other: `ddp`, where the gradient of both ranks is averaged; `alone`,
where each rank has its own and only that of rank 1 is not finite; and `apart`, the same where rank
0 makes no steps at that time. `FOLDER/RANK.json` has what became of each: the steps made, and
whether the weights are those from before. A rank that has left writes `FOLDER/left-KIND-RANK`, and
waits for the command. The process that starts the ranks is a torchrun agent to the launcher;
`FOLDER/restarts` has how many it is left at the end.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tocsin.emitter import StopTraining, start
from tocsin.emitter.stop import rank_agreement
from tocsin.emitter.stop import rank_stop as rank_module
from tocsin.emitter.stop.torchrun import AgentGuard

RANKS = 2
BAD_AT = 5
STEPS = 8


def train(folder: Path, kind: str, rank: int) -> dict[str, object]:
    """One training, until its end or a stop."""
    run = start()
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Linear(8, 4)
    if kind == "ddp":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    step, before, left = 0, copy.deepcopy(model.state_dict()), None
    try:
        for step in range(STEPS):
            if kind == "apart" and rank == 0 and step == BAD_AT:
                step -= 1
                break
            before = copy.deepcopy(model.state_dict())
            out = model(torch.ones(4, 8) * (rank + 1))
            if step == BAD_AT and rank == 1:
                out = out + (out - out).sqrt()
            optimizer.zero_grad()
            out.square().mean().backward()
            optimizer.step()
    except StopTraining as stop:
        left = stop.step
        (folder / f"left-{kind}-{rank}").touch()
    run.finish()  # waits for the command
    after = model.state_dict()
    return {
        "kind": kind,
        "last": step,
        "left": left,
        "unchanged": all(torch.equal(after[name], before[name]) for name in after),
        "finite": all(bool(torch.isfinite(value).all()) for value in after.values()),
    }


def rank_main(folder: Path, rank: int) -> None:
    """All trainings of one rank."""
    torch.set_num_threads(1)
    rank_module.CONFIRMATION_WAIT_S = 60.0  # type: ignore[misc]  # a test's machine is busy
    # Where ranks do not make the same steps.
    rank_agreement.STOP_PATIENCE_S = 1.0  # type: ignore[misc]  # shorter for this test
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    found = []
    for kind in ("ddp", "alone", "apart"):
        store = f"file://{folder}/{kind}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
        found.append(train(folder, kind, rank))
        dist.barrier()
        dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(found))


def main() -> int:
    """Fork the ranks and wait for them; 1 if one of them failed."""
    folder, children = Path(sys.argv[1]), []
    for rank in range(RANKS):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                rank_main(folder, rank)
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    agent: Any = SimpleNamespace(_remaining_restarts=3)
    guard = AgentGuard(agent, os.environ["TOCSIN_LAUNCHER"], folder)
    failed = int(any(os.waitpid(pid, 0)[1] for pid in children))
    (folder / "restarts").write_text(str(agent._remaining_restarts))
    guard.close()
    return failed


if __name__ == "__main__":
    sys.exit(main())
