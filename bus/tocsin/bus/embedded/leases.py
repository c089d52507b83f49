"""Claims that live as long as their holder: leases by name, and members of groups.

A claim ends when it is released, when its process is seen to be dead (same machine and process
namespace: at once), or when it was not renewed for `TTL_MS`. Times are of the monotonic clock,
which all processes of a machine share and nobody sets; a claim of an earlier boot is dead.
"""

from __future__ import annotations

import os
import sqlite3
import time
from functools import lru_cache
from pathlib import Path
from typing import Final

from tocsin.bus.embedded.tables import transaction

TTL_MS: Final = 3_000
BEAT_S: Final = 1.0
"""How often a holder renews: three chances within the time to live."""


def monotonic_ms() -> int:
    """Milliseconds of the clock that leases are counted in."""
    return time.monotonic_ns() // 1_000_000


def this_process() -> str:
    """This process as a claim names it: `boot/namespace/pid/start`."""
    pid = os.getpid()
    return f"{_boot()}/{_namespace(pid)}/{pid}/{_start(pid)}"


@lru_cache(maxsize=1)
def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "?"


@lru_cache(maxsize=4)
def _namespace(pid: int) -> str:
    # Keyed by pid, so that a fork asks again.
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return "?"


def _start(pid: int) -> str:
    """When the process was started, in the kernel's ticks; "" if there is none or it is a
    zombie.
    """
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else rest[18]


def is_live(process: str, expires_ms: int, now_ms: int) -> bool:
    """Whether a claim of that process counts."""
    if now_ms >= expires_ms:
        return False
    boot, namespace, pid, start = process.split("/")
    if boot != _boot():
        return False
    if namespace != _namespace(os.getpid()):
        return True
    if start:
        return _start(int(pid)) == start
    # No /proc (macOS): whether somebody has that pid is all that can be asked.
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def claim(
    db: sqlite3.Connection, name: str, holder: str, now_ms: int, ttl_ms: int = TTL_MS
) -> bool:
    """Take the lease if it is free; False while somebody else who lives has it."""
    with transaction(db, write=True):
        row = db.execute(
            "SELECT holder, process, expires_ms FROM leases WHERE name = ?", (name,)
        ).fetchone()
        if row is not None and row[0] != holder and is_live(row[1], row[2], now_ms):
            return False
        db.execute(
            "INSERT OR REPLACE INTO leases (name, holder, process, expires_ms) VALUES (?, ?, ?, ?)",
            (name, holder, this_process(), now_ms + ttl_ms),
        )
        return True


def renew(db: sqlite3.Connection, name: str, holder: str, now_ms: int) -> None:
    """Keep it; it is taken again if it was lost and is free. Within the caller's transaction."""
    db.execute(
        "INSERT INTO leases (name, holder, process, expires_ms) VALUES (?, ?, ?, ?)"
        " ON CONFLICT (name) DO UPDATE SET expires_ms = excluded.expires_ms"
        " WHERE holder = excluded.holder",
        (name, holder, this_process(), now_ms + TTL_MS),
    )


def release(db: sqlite3.Connection, name: str, holder: str) -> None:
    """Give it back, if it is still this holder's."""
    db.execute("DELETE FROM leases WHERE name = ? AND holder = ?", (name, holder))


def held(db: sqlite3.Connection, name: str, now_ms: int) -> bool:
    """Whether somebody who lives has it."""
    row = db.execute("SELECT process, expires_ms FROM leases WHERE name = ?", (name,)).fetchone()
    return row is not None and is_live(row[0], row[1], now_ms)
