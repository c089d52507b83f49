"""The machine's memory and swap. What the job may use of it: `tocsin.emitter.node.cgroups`.

Columns: `memory.used_bytes` (what is not available), `memory.total_bytes`, `swap.used_bytes`,
`swap.total_bytes`.
"""

from __future__ import annotations

from pathlib import Path

from tocsin.emitter.node.proc_files import ROOT, ProcFile
from tocsin.emitter.node.sources import Sample


class MemorySamples:
    """Reads /proc/meminfo."""

    def __init__(self, root: Path = ROOT) -> None:
        self._file = ProcFile(root / "proc/meminfo")
        self.total = 0
        """The machine's memory as of the last reading, bytes; 0 while it is not known."""

    def read(self, now_s: float) -> Sample:
        """One reading."""
        text = self._file.read()
        if text is None:
            return {}
        total, available = _bytes(text, b"MemTotal:"), _bytes(text, b"MemAvailable:")
        found: Sample = {}
        if total is not None:
            self.total = total
            found["memory.total_bytes"] = float(total)
            if available is not None:
                found["memory.used_bytes"] = float(max(0, total - available))
        swap, free = _bytes(text, b"SwapTotal:"), _bytes(text, b"SwapFree:")
        if swap is not None and free is not None:
            found["swap.used_bytes"] = float(swap - free)
            found["swap.total_bytes"] = float(swap)
        return found


def _bytes(text: bytes, name: bytes) -> int | None:
    at = text.find(name)
    if at < 0:
        return None
    return 1024 * int(text[at + len(name) :].split(None, 1)[0])
