"""How much memory a process may use: the limit of its control group, or the machine's.

Version 2 has `memory.max` in the group's folder below /sys/fs/cgroup, version 1
`memory/…/memory.limit_in_bytes`; each group above may set a lower one. In a container the path that
/proc says is often not there, and the container's own group is the root of what it sees.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Final

_ROOT: Final = Path("/sys/fs/cgroup")
_PROC: Final = Path("/proc")


def memory_limit(pid: int | None, total: int, *, root: Path = _ROOT, proc: Path = _PROC) -> int:
    """The lowest limit in force for a process (None: this one), at most `total` bytes."""
    limits = [total]
    for folder, name, path in _places(proc / (str(pid) if pid is not None else "self"), root):
        for above in (path, *path.parents):
            limit = _limit(folder / above.relative_to("/") / name)
            if limit is not None:
                limits.append(limit)
    return min(limits)


def _places(process: Path, root: Path) -> list[tuple[Path, str, PurePosixPath]]:
    try:
        lines = (process / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        where = PurePosixPath(path)
        if not where.is_absolute():
            continue
        if number == "0" and not controllers:
            found.append((root, "memory.max", where))
        elif "memory" in controllers.split(","):
            found.append((root / "memory", "memory.limit_in_bytes", where))
    return found


def _limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) > 0 else None
