"""What the side group does to a script's own groups: two ranks, of which one comes late.

python -m support.ranks.side_groups FOLDER

Prints a line for each scenario, and how its ranks ended. torch is imported once, then forked.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

from tocsin.emitter.stop import side_group

HERE_S = 0.5


def own_group_after_a_late_rank(rank: int, folder: Path) -> None:
    """Rank 1 comes when rank 0 has given it up; then the script makes a group."""
    side_group.HERE_S = HERE_S  # type: ignore[misc]  # it is final for all but tests
    make = side_group._make_group

    def late(torch_distributed: ModuleType, environ: Mapping[str, str]) -> None:
        if rank == 1:
            store = dist.distributed_c10d._get_default_store()
            store.wait(["tocsin/all/1"], timedelta(seconds=60))
        make(torch_distributed, environ)

    side_group._make_group = late
    side_group.wrap_init_process_group(dist)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    _own_group()


def stops_off_on_one_rank(rank: int, folder: Path) -> None:
    """`--no-stop` on one node alone: no rank makes the side group."""
    if rank == 1:
        os.environ["TOCSIN_STOP"] = "off"
    side_group.wrap_init_process_group(dist)
    dist.init_process_group("gloo", init_method=f"file://{folder}/off", rank=rank, world_size=2)
    _own_group()


def _own_group() -> None:
    assert side_group.current() is None
    group = dist.new_group(timeout=timedelta(seconds=20))
    number = torch.ones(1)
    dist.all_reduce(number, group=group)
    assert number.item() == 2
    dist.destroy_process_group()


def fake_group(rank: int, folder: Path) -> None:
    """As dry runs and estimates of memory have it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    side_group.wrap_init_process_group(dist)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    assert side_group.current() is None
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


SCENARIOS: tuple[Callable[[int, Path], None], ...] = (
    own_group_after_a_late_rank,
    stops_off_on_one_rank,
    fake_group,
)


def main() -> None:
    """Fork the ranks of each scenario."""
    folder = Path(sys.argv[1])
    os.environ["TOCSIN_RUN_ID"] = "r1"
    context = multiprocessing.get_context("fork")
    for scenario in SCENARIOS:
        ranks = [context.Process(target=scenario, args=(rank, folder)) for rank in (0, 1)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        print(scenario.__name__, *(each.exitcode for each in ranks), flush=True)


if __name__ == "__main__":
    main()
