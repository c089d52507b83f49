"""Pressure stall information: the share of time in which work waited for CPU, memory or I/O.

Columns: `pressure.cpu_some_percent`, `pressure.cpu_full_percent`, likewise `memory` and `io`:
averages over ten seconds. `some`: at least one task waited; `full`: all did. Kernels without it
(before 4.20, or switched off) have no such columns.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tocsin.emitter.node.proc_files import ROOT, ProcFile
from tocsin.emitter.node.sources import Sample

EVERY_S: Final = 2.0
"""How often the kernel brings its averages up to date, seconds."""


class PressureSamples:
    """Reads /proc/pressure."""

    def __init__(self, root: Path = ROOT) -> None:
        folder = root / "proc/pressure"
        self._files = {name: ProcFile(folder / name) for name in ("cpu", "memory", "io")}

    def read(self, now_s: float) -> Sample:
        """One reading."""
        found: Sample = {}
        for name, file in self._files.items():
            for line in (file.read() or b"").splitlines():
                kind, _, rest = line.partition(b" avg10=")
                if rest and kind in (b"some", b"full"):
                    found[f"pressure.{name}_{kind.decode()}_percent"] = float(
                        rest.split(None, 1)[0]
                    )
        return found
