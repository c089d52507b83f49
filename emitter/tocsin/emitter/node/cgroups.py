"""What a process may use: the limits of its control group, or the machine's.

Version 2 has `memory.max` and `cpu.max` in the group's folder below /sys/fs/cgroup, version 1
`memory/…/memory.limit_in_bytes` and `cpu/…/cpu.cfs_quota_us`; each group above may set a lower one.
In a container the path in /proc is often not there, and the container's own group is the
root of what it sees.

Columns: `memory.limit_bytes` (a container's limit is *the* limit; else the machine's memory),
`memory.group_used_bytes` (what the group whose limit that is uses, without the file cache that the
kernel would drop first; not there without such a limit), `cpu.limit_cores` (the lowest quota,
else the cores that the process may run on), `cpu.throttled_percent` (time in which the group was
held back, against time passed; over 100 where several cores were).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from tocsin.emitter.node.proc_files import ROOT, ProcFile, named_numbers
from tocsin.emitter.node.sources import Sample

READ_EVERY_S: Final = 5.0
"""How often the limits are looked up: they rarely change, but a job moves when it starts."""

_V1_MEMORY: Final = "memory.usage_in_bytes"
_V2_MEMORY: Final = "memory.current"


@dataclass(frozen=True, slots=True)
class Limits:
    """The lowest limits in force for a process; None: there is none but the machine's."""

    memory_bytes: int | None
    memory_usage: Path | None
    """The file with the memory that the group of `memory_bytes` uses."""
    cores: float | None
    cpu_stat: tuple[Path, ...]
    """Files that count throttling, of the process's own groups."""


def read_limits(pid: int | None, *, root: Path = ROOT) -> Limits:
    """Read them anew."""
    process = root / "proc" / (str(pid) if pid is not None else "self")
    memory: list[tuple[int, Path]] = []
    cores: list[float] = []
    stats: list[Path] = []
    for folders, controllers, path in _groups(process, root / "sys/fs/cgroup"):
        for folder in folders:
            own = folder / path.relative_to("/") / "cpu.stat"
            if not controllers or "cpu" in controllers:
                stats.append(own if own.exists() else folder / "cpu.stat")
            for above in (path, *path.parents):
                group = folder / above.relative_to("/")
                memory.extend(_memory(group, version=1 if controllers else 2))
                if (quota := _cores(group)) is not None:
                    cores.append(quota)
    allowed = _allowed(process)
    if allowed is not None:
        cores.append(float(allowed))
    limit, usage = min(memory, default=(None, None))
    return Limits(limit, usage, min(cores, default=None), tuple(dict.fromkeys(stats)))


def _groups(process: Path, root: Path) -> list[tuple[list[Path], list[str], PurePosixPath]]:
    """Where the groups of a process are: folders, controllers (version 2: none), path in them."""
    try:
        lines = (process / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[tuple[list[Path], list[str], PurePosixPath]] = []
    for line in lines:
        number, _, rest = line.partition(":")
        joined, _, path = rest.partition(":")
        where = PurePosixPath(path)
        if not where.is_absolute() or ".." in where.parts:
            continue
        if number == "0" and not joined:
            # Beside version 1 it is mounted in a folder of its own.
            found.append(([root, root / "unified"], [], where))
            continue
        controllers = [name for name in joined.split(",") if name in ("memory", "cpu")]
        if controllers:
            names = dict.fromkeys([joined, *controllers])
            folders = [root / name for name in names if (root / name).is_dir()]
            found.append((folders[:1], controllers, where))
    return found


def _memory(group: Path, *, version: int) -> list[tuple[int, Path]]:
    limit = _number(group / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
    usage = group / (_V2_MEMORY if version == 2 else _V1_MEMORY)
    return [] if limit is None else [(limit, usage)]


def _cores(group: Path) -> float | None:
    text = _text(group / "cpu.max")
    if text is not None:
        quota, _, period = text.partition(" ")
    else:
        quota = _text(group / "cpu.cfs_quota_us") or ""
        period = _text(group / "cpu.cfs_period_us") or ""
    if not quota.isdigit() or not period.isdigit() or int(quota) == 0 or int(period) == 0:
        return None
    return int(quota) / int(period)


def _allowed(process: Path) -> int | None:
    """How many cores the process may run on."""
    for line in (_text(process / "status") or "").splitlines():
        name, _, ranges = line.partition(":")
        if name == "Cpus_allowed_list":
            count = 0
            for part in ranges.strip().split(","):
                first, _, last = part.partition("-")
                if not first.isdigit() or (last and not last.isdigit()):
                    return None
                count += int(last or first) - int(first) + 1
            return count
    return None


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text is not None and text.isdigit() and int(text) > 0 else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


class GroupSamples:
    """Reads the limits of a process, what its group uses, and how much it was held back."""

    def __init__(self, root: Path = ROOT) -> None:
        self.pid: int | None = None
        """Of the job; None: of this process."""
        self.total = 0
        """The machine's memory, bytes; 0: not known."""
        self._root = root
        self._last_read: tuple[int | None, float] | None = None
        self._limits: Limits | None = None
        self._usage: ProcFile | None = None
        self._memory_stat: ProcFile | None = None
        self._stats: list[ProcFile] = []
        self._throttled: tuple[float, int] | None = None

    def read(self, now_s: float) -> Sample:
        """One reading."""
        if (
            self._last_read is None
            or self._last_read[0] != self.pid
            or now_s - self._last_read[1] >= READ_EVERY_S
        ):
            self._last_read = self.pid, now_s
            self._read()
        assert self._limits is not None
        found: Sample = {}
        limit = self._limits.memory_bytes
        if limit is not None or self.total:
            found["memory.limit_bytes"] = float(min(limit or self.total, self.total or limit or 0))
        if limit is not None and (not self.total or limit < self.total):
            used = None if self._usage is None else self._usage.number()
            if used is not None:
                found["memory.group_used_bytes"] = float(max(0, used - self._cache()))
        if self._limits.cores is not None:
            found["cpu.limit_cores"] = self._limits.cores
        throttled_us = self._throttled_us()
        if throttled_us is not None:
            before, self._throttled = self._throttled, (now_s, throttled_us)
            if before is not None and now_s > before[0]:
                held_s = max(0, throttled_us - before[1]) / 1e6
                found["cpu.throttled_percent"] = 100 * held_s / (now_s - before[0])
        return found

    def _read(self) -> None:
        limits = read_limits(self.pid, root=self._root)
        if self._limits is None or limits.memory_usage != self._limits.memory_usage:
            usage = limits.memory_usage
            self._usage = None if usage is None else ProcFile(usage)
            self._memory_stat = None if usage is None else ProcFile(usage.parent / "memory.stat")
        if self._limits is None or limits.cpu_stat != self._limits.cpu_stat:
            self._stats = [ProcFile(path) for path in limits.cpu_stat]
            self._throttled = None
        self._limits = limits

    def _cache(self) -> int:
        numbers = named_numbers((self._memory_stat and self._memory_stat.read()) or b"")
        # In version 1 the sum over the groups below has a name of its own.
        return numbers.get(b"total_inactive_file", numbers.get(b"inactive_file", 0))

    def _throttled_us(self) -> int | None:
        for file in self._stats:
            numbers = named_numbers(file.read() or b"")
            if b"throttled_usec" in numbers:
                return numbers[b"throttled_usec"]
            if b"throttled_time" in numbers:  # version 1 counts nanoseconds
                return numbers[b"throttled_time"] // 1000
        return None
