"""Errors that NVIDIA's driver writes into the kernel log ("Xid"), where that may be read.

A line reads `NVRM: Xid (PCI:0000:17:00): 79, pid=4711, GPU has fallen off the bus.`

Columns: `gpu.N.xids` (how many since the sampler began; from a node agent, since it first sampled
the run) and `gpu.N.xid` (the number of the last one, 0 before the first); `gpu.unknown.…` for a
device that NVML does not know. Reading
/dev/kmsg needs the right to (root, CAP_SYSLOG, or `kernel.dmesg_restrict=0`): without it there are
no such columns.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from tocsin.emitter.node.proc_files import ROOT
from tocsin.emitter.node.sources import Sample

MAX_RECORDS: Final = 1000
"""Records that one reading takes; a flood is taken in over several."""

UNKNOWN: Final = "unknown"

_RECORD_BYTES: Final = 8192
"""The longest record that the kernel hands out."""

_XID: Final = re.compile(rb"NVRM: Xid \(PCI:([0-9a-fA-F]+:[0-9a-fA-F]+:[0-9a-fA-F]+)[^)]*\): (\d+)")


def bus_place(text: str) -> str:
    """A PCI address as NVML or the log writes it, in one form: `0000:17:00`.

    NVML has eight digits of domain and a function: `00000000:17:00.0`.
    """
    domain, _, rest = text.lower().partition(":")
    return f"{domain[-4:].zfill(4)}:{rest.partition('.')[0]}"


class XidSamples:
    """Reads /dev/kmsg from now on, never waiting."""

    def __init__(self, devices: Callable[[], Mapping[str, int]], root: Path = ROOT) -> None:
        """`devices` gives the number of each GPU by its `bus_place`."""
        self._devices = devices
        self._count: dict[str, int] = {}
        self._last: dict[str, int] = {}
        try:
            self._fd = os.open(root / "dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            self._fd = -1
            return
        try:
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError:
            self.close()

    def read(self, now_s: float) -> Sample:
        """What has been written since; nothing where the log cannot be read."""
        if self._fd < 0:
            return {}
        devices = self._devices()
        for _ in range(MAX_RECORDS):
            try:
                record = os.read(self._fd, _RECORD_BYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:
                # Records were overwritten before they were read; the next ones are there.
                continue
            except OSError:
                self.close()
                return {}
            if not record:
                break
            for xid in _XID.finditer(record):
                number = devices.get(bus_place(xid[1].decode()))
                name = UNKNOWN if number is None else str(number)
                self._count[name] = self._count.get(name, 0) + 1
                self._last[name] = int(xid[2])
        found: Sample = {}
        for name in dict.fromkeys([*map(str, devices.values()), *self._count]):
            found[f"gpu.{name}.xids"] = float(self._count.get(name, 0))
            found[f"gpu.{name}.xid"] = float(self._last.get(name, 0))
        return found

    def close(self) -> None:
        """Let go of the log."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class XidsSince:
    """Counts from its first sample on: for a run whose node was sampled before."""

    def __init__(self) -> None:
        self._zero: Sample | None = None

    def count(self, sample: Sample) -> Sample:
        """The sample without the errors that were there at the first one."""
        counts = {name: value for name, value in sample.items() if name.endswith(".xids")}
        if self._zero is None:
            self._zero = counts
        # A column that comes later begins with its first error.
        since = {name: value - self._zero.get(name, 0.0) for name, value in counts.items()}
        last = {name.removesuffix("s"): 0.0 for name, value in since.items() if value == 0}
        return {**sample, **since, **last}
