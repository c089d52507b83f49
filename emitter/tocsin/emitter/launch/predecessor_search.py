"""Whether a run was stopped before, asked by `start()`; see `tocsin.emitter.launch.predecessor`.

A training opens no file of an embedded bus: another process does, which is this module as a
program. On Kafka a thread does, as the training may have an event loop of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import logging
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from tocsin.bus.port import Bus, BusError
from tocsin.bus.urls import open_bus
from tocsin.emitter.launch.predecessor import Predecessor, stopped_before
from tocsin.schemas.errors import TocsinError
from tocsin.schemas.process.own_python import python_command, python_environment
from tocsin.schemas.topics import Topics

logger = logging.getLogger(__name__)

MODULE: Final = "tocsin.emitter.launch.predecessor_search"

TIMEOUT_S: Final = 10.0
"""How long to find out, seconds: a process is started for it."""


def find_predecessor(
    url: str, prefix: str, run_id: str, environ: Mapping[str, str], open_kafka: Callable[[], Bus]
) -> Predecessor | None:
    """The incarnation before, if a stop ended it. Waits up to `TIMEOUT_S`; what cannot be found
    out by then is logged, and taken for no.
    """
    path = Path(url.removeprefix("embedded:"))
    if not url.startswith("embedded:"):
        return _in_a_thread(lambda: _ask(open_kafka, prefix, run_id))
    if not path.exists():
        return None
    try:
        words = ("--bus", url, "--prefix", prefix, "--run-id", run_id)
        done = subprocess.run(
            python_command(MODULE, *words),
            env=python_environment(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=TIMEOUT_S,
            check=True,
        )
        found = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        logger.warning("it is not known whether this run was stopped before: %s", error)
        return None
    return None if found is None else Predecessor(**found)


def _in_a_thread(ask: Callable[[], Predecessor | None]) -> Predecessor | None:
    found: list[Predecessor | None] = []
    thread = threading.Thread(target=lambda: found.append(ask()), daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    return found[0] if found else None


def _ask(opener: Callable[[], Bus], prefix: str, run_id: str) -> Predecessor | None:
    async def read() -> Predecessor | None:
        async with asyncio.timeout(TIMEOUT_S), opener() as bus:
            return await stopped_before(bus, Topics(prefix), run_id)

    try:
        return asyncio.run(read())
    except (TocsinError, BusError, TimeoutError) as error:
        logger.warning("it is not known whether this run was stopped before: %s", error)
        return None


def main(argv: Sequence[str] | None = None) -> None:
    """Print the predecessor as JSON, or null."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--bus", "--prefix", "--run-id"):
        parser.add_argument(name, required=True)
    given = parser.parse_args(argv)
    found = _ask(lambda: open_bus(given.bus), given.prefix, given.run_id)
    print(json.dumps(None if found is None else dataclasses.asdict(found)))


if __name__ == "__main__":
    main()
