"""Starts `support.processes.launching` as a process and looks at what it did."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.processes.children import python_path
from support.processes.forking import Forked
from support.records.stops import StopSigner
from support.waiting import HANGS_S, wait_until

TESTS = Path(__file__).parents[2]
SCRIPTS = TESTS / "e2e" / "scripts"


@dataclass
class Launched:
    """A launcher that runs, or ran."""

    folder: Path
    process: subprocess.Popen[str]

    def wait(self, timeout_s: float = HANGS_S) -> int:
        """The exit code; the output is in `out` and `err` then."""
        self.out, self.err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode

    def signal(self, number: signal.Signals) -> None:
        """To the launcher alone."""
        self.process.send_signal(number)

    def summary(self) -> dict[str, Any]:
        """The contract's JSON."""
        found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return found

    def observed(self, kind: str) -> list[dict[str, Any]]:
        """The data of all events of that type, in order."""
        path = self.folder / "observed.jsonl"
        if not path.exists():
            return []
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return [line["data"] for line in lines if line["type"] == kind]

    def incarnation(self) -> str:
        """The launcher's first."""
        wait_until(lambda: self.observed("tocsin.run.started"))
        return str(self.observed("tocsin.run.started")[0]["incarnation"])


def environment(folder: Path, signer: StopSigner | None = None) -> dict[str, str]:
    """Of a user who trusts `signer`'s key."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TOCSIN_", "TORCHELASTIC"))}
    kept["PYTHONPATH"] = python_path(TESTS)
    keys = folder / "keys"
    if signer is not None and not keys.exists():
        signer.key.write(keys / "actions.key")
    kept["TOCSIN_STOP_KEYS"] = str(keys)
    return kept


def command_line(folder: Path, *command: str, **options: str) -> list[str]:
    """To be run by hand or by pexpect."""
    words = [f"{name}={value}" for name, value in options.items()]
    launching = [sys.executable, "-m", "support.processes.launching", str(folder)]
    return [*launching, *words, "--", *command]


def start(
    folder: Path,
    *command: str,
    signer: StopSigner | None = None,
    environ: Mapping[str, str] | None = None,
    stdin: int | None = subprocess.DEVNULL,
    **options: str,
) -> Launched:
    """Launch CMD with a bus in `folder`."""
    process = Forked(
        command_line(folder, *command, **options),
        env={**environment(folder, signer), **(environ or {})},
        cwd=folder,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Without the terminal of whoever runs these tests.
        start_new_session=True,
    )
    return Launched(folder, process)
