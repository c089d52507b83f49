"""What the processes of one user on one node know of each other: which runs there are here.

In the node's folder, each process that speaks for a run leaves a registration, a small JSON file,
while it lives; the locks lie there too (`tocsin.emitter.node.lock`). A registration whose
process has ended is none.

The folder is `$TOCSIN_NODE_FOLDER`, else `node` in the user's private folder. That one is found by
XDG_RUNTIME_DIR: where a scheduler's jobs have another one than a login, the variable joins them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from tocsin.emitter.node.lock import NodeLock
from tocsin.emitter.node.proc_files import ROOT
from tocsin.emitter.process import runtime_folder
from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.schemas.process.private_folders import make_private

NODE_FOLDER: Final = "TOCSIN_NODE_FOLDER"
MAX_BYTES: Final = 60_000
_SUFFIX: Final = ".run"
_SAMPLING: Final = ".lock"
_AGENT: Final = ".agent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """A process that speaks for a run on this node.

    Attributes:
        run_id: the run.
        incarnation: under which its samples are sent.
        bus: the URL of its bus.
        prefix: of the topics there.
        job_pid: the first process of the job; all below it are the job's. 0: not known yet.
        folder: the job's working folder.
        visible: its CUDA_VISIBLE_DEVICES.
        pid: the process that speaks.
        started: when the kernel started that one, in its clock ticks: numbers come again.
        at_ms: when it registered (Unix, milliseconds).
    """

    run_id: str
    incarnation: str
    bus: str
    prefix: str
    job_pid: int = 0
    folder: str = ""
    visible: str = ""
    pid: int = 0
    started: int = 0
    at_ms: int = 0

    @property
    def key(self) -> str:
        """Equal for all that speak for the same run: by its id, and by where its records go.

        Brokers can be listed in any order, so they do not count; the file of an embedded bus does.
        """
        where = self.bus if self.bus.startswith("embedded:") else ""
        text = "\0".join((self.run_id, self.prefix, where))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class NodeFolder:
    """The folder, made if needed."""

    def __init__(self, path: Path) -> None:
        """Raises OSError: it cannot be made, or is not this user's alone."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path: Final = make_private(path)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> NodeFolder:
        """The node folder of this user. Raises OSError."""
        given = environ.get(NODE_FOLDER)
        return cls(Path(given) if given else runtime_folder.private_folder(environ) / "node")

    def sampling(self, key: str) -> NodeLock:
        """Held by whoever samples for a run."""
        return NodeLock(self.path / f"{key}{_SAMPLING}")

    def agent(self, key: str) -> NodeLock:
        """Held by the node agent that wants to: the others step aside."""
        return NodeLock(self.path / f"{key}{_AGENT}")

    def leave(self, registration: Registration) -> Entry:
        """Register this process. Raises OSError."""
        pid = os.getpid()
        own = replace(
            registration,
            pid=pid,
            started=started_at(pid) or 0,
            at_ms=registration.at_ms or unix_ms(),
        )
        entry = Entry(self.path / f"{own.key}-{pid}-{os.urandom(4).hex()}{_SUFFIX}", own)
        entry.write(own)
        self._sweep()
        return entry

    def _sweep(self) -> None:
        """Take away the lock files that killed processes have left."""
        known = {registration.key for registration in self.registrations()}
        for path in self.path.iterdir():
            if path.suffix in (_SAMPLING, _AGENT) and path.stem not in known:
                lock = NodeLock(path)
                with contextlib.suppress(OSError):
                    lock.acquire()
                lock.release()

    def registrations(self) -> list[Registration]:
        """The registrations of live processes, the oldest first. Removes the files of others."""
        found: list[Registration] = []
        try:
            paths = [path for path in self.path.iterdir() if path.suffix == _SUFFIX]
        except OSError:
            return found
        for path in paths:
            registration = _read(path)
            if registration is None:
                continue
            if started_at(registration.pid) == registration.started:
                found.append(registration)
            else:
                with contextlib.suppress(OSError):
                    path.unlink()
        return sorted(found, key=lambda registration: (registration.at_ms, registration.pid))


class Entry:
    """The registration that this process has left."""

    def __init__(self, path: Path, registration: Registration) -> None:
        self.path: Final = path
        self.registration = registration
        self._pid = os.getpid()

    def write(self, registration: Registration) -> None:
        """Say something else than before. Raises OSError."""
        self.registration = registration
        new = self.path.with_suffix(".new")
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(asdict(registration), file)
        os.replace(new, self.path)

    def job_is(self, pid: int | None) -> None:
        """The job runs as this process."""
        if self.registration.job_pid != (pid or 0):
            with contextlib.suppress(OSError):
                self.write(replace(self.registration, job_pid=pid or 0))

    def remove(self) -> None:
        """Take it away; a forked child's copy does nothing."""
        if os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)


def job_pids(registrations: Iterable[Registration]) -> frozenset[int]:
    """The first processes of all their jobs."""
    return frozenset(found.job_pid for found in registrations if found.job_pid)


def started_at(pid: int, *, root: Path = ROOT) -> int | None:
    """When the kernel started that process, in clock ticks; None if there is none."""
    try:
        text = (root / f"proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    words = text[text.rindex(b")") + 2 :].split()
    return None if words[0] in (b"Z", b"X") else int(words[19])


def _read(path: Path) -> Registration | None:
    try:
        with path.open("rb") as file:
            raw = json.loads(file.read(MAX_BYTES))
        return Registration(**raw) if _fits(raw) else None
    except (OSError, ValueError, TypeError):
        return None


def _fits(raw: object) -> bool:
    if not isinstance(raw, dict):
        return False
    numbers = ("job_pid", "pid", "started", "at_ms")
    return all(
        isinstance(value, int if name in numbers else str) and not isinstance(value, bool)
        for name, value in raw.items()
    )
