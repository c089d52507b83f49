"""A training in this process under real capture, and what the rules say of its records."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from support.trainings.captured import captured
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import EARLIEST, Partition, Record
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.topics import Topics, telemetry_partition
from tocsin.stream_rules.engine.configured_rules import RuleSpec
from tocsin.stream_rules.testing import issues_of


def records(folder: Path, run_id: str = "r1") -> list[Record]:
    """The run's telemetry, as it is on the bus of that folder."""
    partition = Partition(Topics().telemetry, telemetry_partition(run_id))
    found: list[Record] = []

    async def read() -> None:
        async with EmbeddedBus(folder / "bus.db", create=False) as bus:
            reader = await bus.reader({partition: EARLIEST})
            end = (await reader.ends([partition]))[partition]
            while await reader.position(partition) < end:
                found.extend(await reader.poll(timeout_s=1.0))
            await reader.close()

    asyncio.run(read())
    return found


def watch(
    folder: Path,
    train: Callable[[], object],
    *,
    every: Mapping[str, int] | None = None,
    specs: Sequence[RuleSpec] | None = None,
) -> list[IssueFiring]:
    """Run `train` under capture; what the rules say, in all states."""
    torch.set_num_threads(1)
    section = {"collections": {name: {"every": steps} for name, steps in (every or {}).items()}}
    with captured(folder, TOCSIN_CAPTURE=json.dumps(section)):
        train()
    return issues_of(records(folder), specs=specs)
