"""Disks: space left in the folders that are watched, and what the devices do.

Columns: `disk.free_bytes` and `disk.total_bytes` of the job's working folder;
`disk.PATH.free_bytes` and `disk.PATH.total_bytes` of each other folder (`capture.system.folders`)
on another disk, named by its path; `disk.read_bytes_per_s` and `disk.write_bytes_per_s`, sums over
the real devices; `disk.busiest_percent`, the share of time in which the busiest of them had work.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tocsin.emitter.node.proc_files import ROOT, ProcFile
from tocsin.emitter.node.sources import Sample

MAX_FOLDERS: Final = 16
SPACE_EVERY_S: Final = 5.0
"""How often the space is looked at, seconds."""

SCAN_EVERY: Final = 120
"""Readings until it is looked for new devices."""

_SECTOR_BYTES: Final = 512
"""What /proc/diskstats counts in, whatever the device."""

_LAYERED: Final = ("loop", "ram", "zram", "dm-", "md", "nbd", "sr", "fd")


class DiskSpace:
    """Asks the file systems. May hang where a network file system does: to be read beside."""

    def __init__(self, folder: Path | None, folders: Sequence[Path] = ()) -> None:
        self._names: dict[Path, str] = {}
        if folder is not None:
            self._names[folder] = "disk"
        for other in folders[:MAX_FOLDERS]:
            self._names.setdefault(other, f"disk.{other}")

    def __bool__(self) -> bool:
        return bool(self._names)

    def read(self, now_s: float) -> Sample:
        """One reading; a folder that is not there yet, can only be read, or is on the disk of an
        earlier one has no columns. May hang where a network file system does.
        """
        found: Sample = {}
        devices: set[int] = set()
        for folder, name in self._names.items():
            try:
                device, disk = os.stat(folder).st_dev, os.statvfs(folder)
            except OSError:
                continue
            if disk.f_flag & os.ST_RDONLY:  # nothing will be written there
                continue
            # Between two readings a disk may be written to, and would look like two.
            if device in devices:
                continue
            devices.add(device)
            found[f"{name}.free_bytes"] = float(disk.f_bavail * disk.f_frsize)
            found[f"{name}.total_bytes"] = float(disk.f_blocks * disk.f_frsize)
        return found


class DiskTraffic:
    """Reads /proc/diskstats; rates are over the time since the reading before."""

    def __init__(self, root: Path = ROOT) -> None:
        self._file = ProcFile(root / "proc/diskstats", records=True)
        self._devices = root / "sys/block"
        self._real: frozenset[bytes] = frozenset()
        self._n = 0
        self._at_s = 0.0
        self._before: dict[bytes, tuple[int, int, int]] = {}

    def read(self, now_s: float) -> Sample:
        """One reading."""
        text = self._file.read()
        if text is None:
            return {}
        if self._n % SCAN_EVERY == 0:
            self._real = self._whole_disks()
        self._n += 1
        there: dict[bytes, tuple[int, int, int]] = {}
        for line in text.splitlines():
            words = line.split(None, 14)
            if len(words) > 12 and words[2] in self._real:
                there[words[2]] = int(words[5]), int(words[9]), int(words[12])
        before, self._before = self._before, there
        elapsed_s = now_s - self._at_s
        self._at_s = now_s
        both = [(now, before[name]) for name, now in there.items() if name in before]
        if not both or elapsed_s <= 0:
            return {}
        # A counter that began anew has gone back.
        read, written = (
            _SECTOR_BYTES * sum(max(0, now[place] - earlier[place]) for now, earlier in both)
            for place in (0, 1)
        )
        busy_ms = max(now[2] - earlier[2] for now, earlier in both)
        return {
            "disk.read_bytes_per_s": read / elapsed_s,
            "disk.write_bytes_per_s": written / elapsed_s,
            "disk.busiest_percent": min(100.0, max(0.0, busy_ms / 10 / elapsed_s)),
        }

    def _whole_disks(self) -> frozenset[bytes]:
        """Whole devices; what lies upon others would count the same bytes once more."""
        try:
            names = [entry.name for entry in self._devices.iterdir()]
        except OSError:
            return frozenset()
        real = [name for name in names if (self._devices / name / "device").exists()]
        if not real:
            real = [name for name in names if not name.startswith(_LAYERED)]
        return frozenset(os.fsencode(name) for name in real)
