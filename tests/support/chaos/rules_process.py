"""A worker of the rules, with the fold rule alone.

`python -m support.chaos.rules_process URL PREFIX CLOCK END MUTATION`

The file CLOCK says by how many milliseconds its clock is wrong. With `caught-up` for END it ends
once it has read and committed all that is there. With `repeats` for MUTATION it takes records again
that it has had already: a fault that the model must find.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from support.buses import World
from support.chaos.fold_rule import Fold
from tocsin.runtime.dead_letters import DeadLetterLimits
from tocsin.runtime.worker import Worker, WorkerSettings
from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.schemas.records.wire import Meta
from tocsin.schemas.topics import Topics
from tocsin.stream_rules.engine.run_state import RunState
from tocsin.stream_rules.service import RulesService
from tocsin.stream_rules.testing import only


class WrongClock:
    """A clock that is so many milliseconds ahead."""

    def __init__(self, ahead_ms: int) -> None:
        self._ahead_ms = ahead_ms

    def now_ms(self) -> int:
        """See `tocsin.runtime.clock`."""
        return unix_ms() + self._ahead_ms


def takes_repeats(state: RunState, meta: Meta) -> bool:
    """The mutation, in place of `RunState.admit`."""
    state.sequences[meta.boot] = meta.seq
    return True


async def main(url: str, prefix: str, ahead_ms: int, end: str, mutation: str) -> int:
    if mutation == "repeats":
        setattr(RunState, "admit", takes_repeats)  # noqa: B010  (a method is not assigned to)
    topics = Topics(prefix)
    kind = "kafka" if url.startswith("kafka:") else "embedded"
    async with World(kind, url).reached() as bus:
        worker = Worker(
            bus,
            RulesService(topics, only(Fold)),
            topics=topics,
            group=f"{prefix}-rules",
            clock=WrongClock(ahead_ms),
            settings=WorkerSettings(
                checkpoint_s=0.05,
                poll_records=20,
                # A flood of bad records ends a worker; here they come one after the other for long.
                dead_letters=DeadLetterLimits(consecutive=1_000_000, share=1.0),
            ),
        )
        running = asyncio.create_task(worker.run())
        if end != "caught-up":
            await running
        done = await worker.caught_up(120.0)
        worker.stop()
        await running
    return 0 if done else 1


if __name__ == "__main__":
    url, prefix, clock, end, mutation = sys.argv[1:]
    raise SystemExit(asyncio.run(main(url, prefix, int(Path(clock).read_text()), end, mutation)))
