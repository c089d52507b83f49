"""Network traffic per direction, errors and drops.

Columns, all sums: `network.received_bytes_per_s`, `network.sent_bytes_per_s`,
`network.receive_errors_per_s`, `network.send_errors_per_s`, `network.receive_drops_per_s`,
`network.send_drops_per_s`.

Summed are the interfaces of real devices; bridges, bonds and tunnels carry the same bytes once
more. In a container there is no real one: there all but the loopback count.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tocsin.emitter.node.proc_files import ROOT, ProcFile
from tocsin.emitter.node.sources import Sample

SCAN_EVERY: Final = 120
"""Readings until it is looked for new devices."""

_COLUMNS: Final = (
    ("network.received_bytes_per_s", 0),
    ("network.sent_bytes_per_s", 8),
    ("network.receive_errors_per_s", 2),
    ("network.send_errors_per_s", 10),
    ("network.receive_drops_per_s", 3),
    ("network.send_drops_per_s", 11),
)


class NetworkSamples:
    """Reads /proc/net/dev; rates are over the time since the reading before."""

    def __init__(self, root: Path = ROOT) -> None:
        self._file = ProcFile(root / "proc/net/dev", records=True)
        self._devices = root / "sys/class/net"
        self._real: frozenset[str] = frozenset()
        self._n = 0
        self._at_s = 0.0
        self._before: dict[str, list[int]] = {}

    def read(self, now_s: float) -> Sample:
        """One reading."""
        text = self._file.read()
        if text is None:
            return {}
        if self._n % SCAN_EVERY == 0:
            self._real = self._interfaces()
        self._n += 1
        there: dict[str, list[int]] = {}
        for line in text.decode(errors="replace").splitlines():
            name, colon, numbers = line.partition(":")
            name = name.strip()
            if colon and (name in self._real if self._real else name != "lo"):
                there[name] = [int(word) for word in numbers.split()]
        before, self._before = self._before, there
        elapsed_s = now_s - self._at_s
        self._at_s = now_s
        if not before or elapsed_s <= 0:
            return {}
        return {
            column: sum(
                # A counter that began anew has gone back.
                max(0, now[place] - before[name][place])
                for name, now in there.items()
                if name in before
            )
            / elapsed_s
            for column, place in _COLUMNS
        }

    def _interfaces(self) -> frozenset[str]:
        try:
            names = [entry.name for entry in self._devices.iterdir()]
        except OSError:
            return frozenset()
        return frozenset(name for name in names if self._is_counted(name))

    def _is_counted(self, name: str) -> bool:
        """A real one, but for the part of another real one: the virtual function of a network card
        is counted by the interface above it, too (Azure, `net_failover`). A bond is none."""
        entry = self._devices / name
        real = (entry / "device").exists()
        return real and not (entry / "master" / "device").exists()
