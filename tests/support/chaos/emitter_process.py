"""A training's process, as far as it sends: `python -m support.chaos.emitter_process URL PREFIX RUN
INCARNATION STEPS`. Its numbers follow from their place. On stdout it prints each step up to which
the bus has acknowledged all; it ends with 0 if that is all of them.
"""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Callable

from tocsin.bus.embedded.spool import SpooledBus
from tocsin.bus.port import Outlet
from tocsin.bus.urls import open_bus
from tocsin.emitter.send.encoding import Address
from tocsin.emitter.send.outbox import StepRow
from tocsin.emitter.send.sender import Sender
from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.schemas.records.frames import RecordOrigin
from tocsin.schemas.records.runs import RunEnded, RunStarted
from tocsin.schemas.topics import Topics

PACE_S = 0.02
CONFIRMED_EVERY = 10


def number(run: str, incarnation: str, step: int) -> int:
    """What this training says at that step: 0 to 997."""
    return zlib.crc32(f"{run}/{incarnation}/{step}".encode()) % 998


def opener(url: str) -> Callable[[], Outlet]:
    """As a training opens its bus."""
    if url.startswith("kafka:"):
        return lambda: open_bus(url)
    path = open_bus(url)
    return lambda: SpooledBus(path.path, unix_ms)  # type: ignore[attr-defined]


def main(url: str, prefix: str, run: str, incarnation: str, steps: int) -> int:
    origin = RecordOrigin(run_id=run, incarnation=incarnation)
    address = Address(
        topics=Topics(prefix),
        origin=origin,
        source=f"/runs/{run}/ranks/0",
        create_topics=not url.startswith("kafka:"),
    )
    sender = Sender(opener(url), address, report=lambda line: None)
    sender.start()
    sender.publish(RunStarted(run_id=run, incarnation=incarnation, job_id="job"))
    for step in range(steps):
        value = float(number(run, incarnation, step))
        sender.row(StepRow(step, unix_ms() * 1000, ("loss",), (value,)))
        time.sleep(PACE_S)
        if step % CONFIRMED_EVERY == CONFIRMED_EVERY - 1 and sender.flush(1.0):
            print(step, flush=True)
    sender.publish(RunEnded(run_id=run, incarnation=incarnation, outcome="completed"))
    all_sent = sender.flush(60.0)
    while not all_sent and sender.failed is None:
        # A flush gives up within a second while the bus is away.
        time.sleep(0.2)
        all_sent = sender.flush(60.0)
    sender.close()
    return 0 if all_sent and not sender.dropped else 1


if __name__ == "__main__":
    url, prefix, run, incarnation, steps = sys.argv[1:]
    raise SystemExit(main(url, prefix, run, incarnation, int(steps)))
