"""Runs `launch` in a process of its own, as `tocsin run` does, with options from the command line.

    python -m support.processes.launching FOLDER [key=value…] -- CMD…

FOLDER gets the bus file, the summary and the observed records. Keys: run_id, drain_s, stop, quiet,
helper (a shell line), require_bus, bus (a URL), judged_within_s, before_update.
"""

from __future__ import annotations

import json
import shlex
import sys
import uuid
from pathlib import Path

from tocsin.emitter.launch import forked

with forked.importing():
    from tocsin.bus.urls import open_bus
    from tocsin.emitter.launch.forwarded_signals import die_of_interrupt
    from tocsin.emitter.launch.launcher import launch
    from tocsin.emitter.launch.options import LaunchOptions
    from tocsin.schemas.records.events import Data

# This module is the user's, but harms nobody: the launcher forks, as that of `tocsin run` does.
vars(forked)["has_users_modules"] = lambda: False


def main(arguments: list[str]) -> int:
    """Build the options and launch with them."""
    cut = arguments.index("--")
    folder = Path(arguments[0])
    given = dict(argument.split("=", 1) for argument in arguments[1:cut])
    url = given.get("bus", f"embedded:{folder / 'bus.db'}")
    observed = folder / "observed.jsonl"

    def observe(data: Data, at_ms: int) -> None:
        line = {"type": data.event_type, "at_ms": at_ms, "data": data.model_dump(mode="json")}
        with observed.open("a") as file:
            file.write(json.dumps(line) + "\n")

    options = LaunchOptions(
        command=tuple(arguments[cut + 1 :]),
        run_id=given.get("run_id", "r1"),
        job_id=given.get("job_id", str(uuid.uuid4())),
        bus_url=url,
        open_bus=lambda: open_bus(url),
        stop=given.get("stop", "on") == "on",
        hold=given.get("hold") == "yes",
        before_update="skip" if given.get("before_update") == "yes" else None,
        pin="hard_link" if given.get("pin") == "yes" else None,
        drain_s=float(given.get("drain_s", "0.2")),
        quiet=given.get("quiet") == "yes",
        summary=folder / "summary.json",
        require_bus=given.get("require_bus") == "yes",
        helper=tuple(shlex.split(given.get("helper", ""))),
        helper_log=folder / "helper.log",
        observe=observe,
        judged_within_s=float(given.get("judged_within_s", "60")),
    )
    ended = launch(options)
    if ended.interrupted is not None:
        die_of_interrupt(ended.interrupted)
    return ended.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
