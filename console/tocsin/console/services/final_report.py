"""`tocsin run --report`: the report at the end of a run, made by a process of its own.

The job has ended, and its exit code is that of `tocsin run`: whatever happens here costs a line.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tocsin.console.files import check_writable
from tocsin.console.report.formats import ReportFormat, format_of
from tocsin.emitter.launch.options import LaunchOptions
from tocsin.schemas.errors import require_extra
from tocsin.schemas.process.own_python import python_command, python_environment

TIMEOUT_S: Final = 120.0


def check_report(path: Path) -> None:
    """Whether the report can be written: said now, not when the job is over.

    Raises:
        ConfigurationError: it cannot.
        MissingExtra: HTML needs the extra `page`.
    """
    check_writable(path, "--report", "report.html")
    if format_of(path, None) is ReportFormat.HTML:
        require_extra("page", "a report in HTML", "jinja2")


def write_final_report(options: LaunchOptions, path: Path) -> bool:
    """Write it, and print where it is or why there is none. Blocks; raises nothing of the report.

    A second Ctrl-C ends it.
    """
    words = _words(options, path)
    reason = ""
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=python_environment(os.environ),
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            reason = lines[-1].removeprefix("tocsin: ") if lines else f"exit {done.returncode}"
    except subprocess.TimeoutExpired:
        reason = f"it was not ready after {TIMEOUT_S:.0f} s"
    except OSError as error:
        reason = str(error)
    except KeyboardInterrupt:
        reason = "interrupted"
    if reason:
        again = " ".join(("tocsin report", options.run_id, *options.again))
        print(f"tocsin: no report was written: {reason}; try: {again}", file=sys.stderr)
    elif not options.quiet:
        print(f"tocsin: the report is in {path}", file=sys.stderr)
    return not reason


def _words(options: LaunchOptions, path: Path) -> Sequence[str]:
    config = () if options.config is None else ("--config", str(options.config))
    given = ("--bus", options.bus_url, "--output", str(path), *config)
    return python_command("tocsin.console", "report", options.run_id, *given)
