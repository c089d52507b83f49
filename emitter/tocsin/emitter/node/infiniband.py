"""InfiniBand and RoCE ports: traffic and what went wrong on the link.

Columns per port, named by device and port (`infiniband.mlx5_0.1.…`): `received_bytes_per_s`,
`sent_bytes_per_s`, and counts since the driver was loaded: `receive_errors`, `send_discards`,
`symbol_errors`, `link_recoveries`, `link_downs`, `send_waits`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tocsin.emitter.node.proc_files import ROOT, ProcFile
from tocsin.emitter.node.sources import Sample

MAX_PORTS: Final = 16
EVERY_S: Final = 5.0
"""The counters come from the adapter's firmware: not asked for more often than that, seconds."""

WORD_BYTES: Final = 4
"""`port_rcv_data` and `port_xmit_data` count words of four bytes."""

_RATES: Final = {
    "received_bytes_per_s": "port_rcv_data",
    "sent_bytes_per_s": "port_xmit_data",
}
_COUNTS: Final = {
    "receive_errors": "port_rcv_errors",
    "send_discards": "port_xmit_discards",
    "symbol_errors": "symbol_error",
    "link_recoveries": "link_error_recovery",
    "link_downs": "link_downed",
    "send_waits": "port_xmit_wait",
}


class InfinibandSamples:
    """Reads /sys/class/infiniband; the ports are those that are there at the first reading."""

    def __init__(self, root: Path = ROOT) -> None:
        self._folder = root / "sys/class/infiniband"
        self._rates: dict[str, ProcFile] | None = None
        self._counts: dict[str, ProcFile] = {}
        self._before: dict[str, tuple[float, int]] = {}

    def read(self, now_s: float) -> Sample:
        """One reading."""
        if self._rates is None:
            self._rates = {}
            for name, counters in self._ports()[:MAX_PORTS]:
                for column, file in _RATES.items():
                    self._rates[f"infiniband.{name}.{column}"] = ProcFile(counters / file)
                for column, file in _COUNTS.items():
                    self._counts[f"infiniband.{name}.{column}"] = ProcFile(counters / file)
        found: Sample = {}
        for column, counter in self._rates.items():
            words = counter.number()
            if words is None:
                self._before.pop(column, None)
                continue
            if (earlier := self._before.get(column)) is not None and now_s > earlier[0]:
                moved = max(0, words - earlier[1]) * WORD_BYTES
                found[column] = moved / (now_s - earlier[0])
            self._before[column] = now_s, words
        for column, counter in self._counts.items():
            count = counter.number()
            if count is not None:
                found[column] = float(count)
        return found

    def _ports(self) -> list[tuple[str, Path]]:
        try:
            return [
                (f"{device.name}.{port.name}", port / "counters")
                for device in sorted(self._folder.iterdir())
                for port in sorted((device / "ports").iterdir())
            ]
        except OSError:
            return []
