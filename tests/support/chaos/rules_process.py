"""A worker of the rules, with the fold rule alone; on Kafka it stands by, as `tocsin rules` does.

`python -m support.chaos.rules_process URL PREFIX CLOCK END MUTATION MEMBER`

The file CLOCK says by how many milliseconds its clock is wrong. With `caught-up` for END it ends
once it has read and committed all that is there. MUTATION is `none`, one of `mutations`, faults
that the model must find, or one of `RULES`. MEMBER is its name in the group, `-` for none.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from support.buses import World
from support.chaos.fold_rule import ColdFold, Fold, NextFold
from support.chaos.mutations import kind_of_worker, mutate, mutate_engine
from tocsin.runtime.dead_letters import DeadLetterLimits
from tocsin.runtime.testing import CrashPoints
from tocsin.runtime.worker import WorkerSettings
from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.schemas.topics import Topics
from tocsin.stream_rules.service import RulesService
from tocsin.stream_rules.testing import only

STANDBY_BYTES = 1 << 24


class WrongClock:
    """A clock that is so many milliseconds ahead."""

    def __init__(self, ahead_ms: int) -> None:
        self._ahead_ms = ahead_ms

    def now_ms(self) -> int:
        """See `tocsin.runtime.clock`."""
        return unix_ms() + self._ahead_ms


RULES = {
    "next-version": only(NextFold),
    "cold-version": (*only(ColdFold), *only("cold_start")),
}
"""What is run in place of the fold rule."""


async def main(
    url: str, prefix: str, ahead_ms: int, end: str, mutation: str, member: str | None
) -> int:
    mutate_engine(mutation)
    topics = Topics(prefix)
    kind = "kafka" if url.startswith("kafka:") else "embedded"
    async with World(kind, url).reached() as bus:
        worker = kind_of_worker(mutation)(
            bus,
            RulesService(topics, RULES.get(mutation, only(Fold))),
            topics=topics,
            group=f"{prefix}-rules",
            member=member,
            clock=WrongClock(ahead_ms),
            settings=WorkerSettings(
                checkpoint_s=0.05,
                poll_records=20,
                standby_bytes=STANDBY_BYTES if kind == "kafka" else 0,
                # A flood of bad records ends a worker; here they come one after the other for long.
                dead_letters=DeadLetterLimits(consecutive=1_000_000, share=1.0),
            ),
            crash=CrashPoints.from_environment(os.environ),
        )
        mutate(worker, mutation)
        running = asyncio.create_task(worker.run())
        if end != "caught-up":
            await running
        done = await worker.caught_up(120.0)
        worker.stop()
        await running
    return 0 if done else 1


if __name__ == "__main__":
    url, prefix, clock, end, mutation, name = sys.argv[1:]
    ahead_ms, member = int(Path(clock).read_text()), None if name == "-" else name
    raise SystemExit(asyncio.run(main(url, prefix, ahead_ms, end, mutation, member)))
