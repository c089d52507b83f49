"""What `tocsin run` is asked to do, as one value, and the environment that a job gets from it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from tocsin.bus.port import Bus
from tocsin.emitter.checkpoints.pins import How
from tocsin.emitter.launch.helper import DRAIN_S
from tocsin.emitter.process import environment
from tocsin.emitter.stop import before_update
from tocsin.emitter.stop.before_update import CheckpointPolicy
from tocsin.emitter.stop.verification import STOP, STOP_KEYS, trusted_paths
from tocsin.schemas.compute_estimates import NO_PRICES
from tocsin.schemas.configuration.sections import PricesConfig
from tocsin.schemas.configuration.sources import CONFIG_VARIABLE
from tocsin.schemas.records.events import Data

HOOK_FOLDER: Final = Path(__file__).parents[1] / "hooks" / "startup"

Observer = Callable[[Data, int], None]
"""Told each record about this run that the launcher reads or makes, with its time (Unix, ms)."""


class Kept(Protocol):
    """Addresses that another process can go on with."""

    def keep(self, incarnations: Collection[str], /) -> None:
        """Keep them for the issues of these. Raises OSError."""
        ...

    def remove(self) -> None:
        """Remove what was kept: there is nothing to continue. Raises OSError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """One launch. `open_bus` gives the bus that `bus_url` names, not yet entered.

    `helper` is the command line of the helper process, or empty on a bus that others serve; it is
    driven through its stdin, see `tocsin.emitter.launch.helper`; `serve` does the same in a fork of
    the launcher. `config` is the configuration
    file, for the job's processes; `helper_log` is where the helper writes, kept only if it did not
    end well; `capture` its section as JSON. `stop` False is `--no-stop`. `pin` is how the last
    good checkpoint is kept; with `hold` nothing is started if the incarnation before was stopped.
    `before_update` is what becomes of the checkpoint where ranks leave before an update; None: they
    do not.

    `print_line` gets each line for the terminal, without the prefix; by default it goes to stderr
    as `tocsin: LINE`. `warnings` are lines for its start. Without a word from the rules for
    `judged_within_s` seconds the launcher warns that nobody judges the run; its own heartbeats make
    them report each 10 s. `again` are options with which another command finds this bus.
    `kept` holds the addresses of `--notify` for the command that finishes what is left. `prices`
    are for the estimate of what a stop has saved.
    """

    command: tuple[str, ...]
    run_id: str
    job_id: str
    bus_url: str
    open_bus: Callable[[], Bus]
    bus_prefix: str = "tocsin"
    config: Path | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    capture: str = ""
    stop: bool = True
    trusted_keys: tuple[Path, ...] = ()
    pin: How | None = None
    hold: bool = False
    before_update: CheckpointPolicy | None = None
    drain_s: float = DRAIN_S
    judged_within_s: float = 60.0
    quiet: bool = False
    summary: Path | None = None
    require_bus: bool = False
    helper: tuple[str, ...] = ()
    serve: Callable[[], int] | None = None
    helper_log: Path | None = None
    again: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    kept: Kept | None = None
    prices: PricesConfig = NO_PRICES
    print_line: Callable[[str], None] | None = None
    observe: Observer | None = None


def job_environment(
    options: LaunchOptions, base: Mapping[str, str], runtime: Path, launcher_socket: Path
) -> dict[str, str]:
    """`base` with what the hook in the job's processes reads."""
    environ = dict(base)
    environ[environment.RUN_ID] = options.run_id
    environ[environment.JOB_ID] = options.job_id
    environ[environment.BUS] = options.bus_url
    environ[environment.PREFIX] = options.bus_prefix
    environ |= environment.labels_for_job(options.labels)
    environ[environment.CAPTURE] = options.capture
    if options.config is not None:
        environ[CONFIG_VARIABLE] = str(options.config.absolute())
    environ[environment.RUNTIME_DIR] = str(runtime)
    environ[environment.LAUNCHER] = str(launcher_socket)
    paths = trusted_paths(base, options.trusted_keys)
    environ[STOP_KEYS] = os.pathsep.join(str(path.absolute()) for path in paths)
    environ.pop(STOP, None)
    environ.pop(before_update.VARIABLE, None)
    if not options.stop:
        environ[STOP] = "off"
    elif options.before_update is not None:
        environ[before_update.VARIABLE] = options.before_update
    searched = base.get("PYTHONPATH")
    environ["PYTHONPATH"] = os.pathsep.join([str(HOOK_FOLDER), *([searched] if searched else [])])
    return environ
