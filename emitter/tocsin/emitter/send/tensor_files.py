"""Files of tensors that are saved in full: written beside the training, within a budget.

One daemon thread writes them. Nothing waits for it but the end of the training, and that only for a
time; what fails is reported once, and then no more is saved.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from tocsin.schemas.process.durable import sync
from tocsin.schemas.records.saved_tensors import SavedTensor
from tocsin.schemas.store_paths import TENSORS, quoted, run_folder

if TYPE_CHECKING:
    from obstore.store import ObjectStore

BUCKETS: Final = ("s3://", "gs://", "az://")
CLOSE_S: Final = 5.0
"""How long the end of a training waits for files under way, seconds."""

_POLL_S: Final = 0.01
_HEADER_BYTES: Final = 256
"""More than what the head of a file needs for one tensor beside its name."""


class Copied(Protocol):
    """Copies of tensors, of any shape, on the host, or on their way there."""

    @property
    def size_bytes(self) -> int:
        """Of their numbers."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """The tensors."""
        ...

    def ready(self) -> bool:
        """Whether they are there; never waits."""
        ...

    def write(self, path: Path) -> Sequence[SavedTensor]:
        """Write them into that file. Blocks. Raises OSError."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """Tensors that are to be written, and where, from the root of the store."""

    copied: Copied
    path: str
    collection: str
    step: int


@dataclass(frozen=True, slots=True)
class Saved:
    """A file that is there."""

    job: Job
    uri: str
    size_bytes: int
    tensors: Sequence[SavedTensor]


def size_of(copied: Copied) -> int:
    """What the file has at most, bytes: known before it is written."""
    names = sum(len(json.dumps(name)) for name in copied.names)
    return copied.size_bytes + names + _HEADER_BYTES * (len(copied.names) + 2)


class TensorFiles:
    """Writes the files of one rank.

    Args:
        root: a folder, or the URL of a bucket.
        budget_bytes: what this run may save in all; of it this rank has its part of what earlier
            incarnations have left.
        options: of a bucket, as obstore names them.
        saved: called for each file, on the thread that writes.
        failed: told once why no more is saved, on that thread.
    """

    def __init__(
        self,
        root: str,
        run_id: str,
        incarnation: str,
        *,
        ranks: int,
        budget_bytes: int,
        options: Mapping[str, str],
        saved: Callable[[Saved], None],
        failed: Callable[[str], None],
    ) -> None:
        self._root = root
        self._run = run_folder(run_id)
        self._own = f"{self._run}/{TENSORS}/incarnation={quoted(incarnation)}/"
        self._ranks = max(1, ranks)
        self._budget = budget_bytes
        self._options = dict(options)
        self._saved = saved
        self._failed = failed
        self._jobs: deque[Job] = deque()
        self._count = threading.Lock()
        """Around `_left` and `waiting_bytes`, which both threads change."""
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._left: int | None = None
        """Of the budget; None: it is not known yet what earlier incarnations have saved."""
        self._closing = False
        self.off = False
        """No more is taken."""
        self._broken = False
        """Nor written."""
        self.waiting_bytes = 0
        """Of copies that are not written yet."""

    @property
    def most_bytes(self) -> int:
        """What one more file may have at most, as far as is known."""
        with self._count:
            most = self._budget // self._ranks if self._left is None else self._left
            return max(0, most - self.waiting_bytes)

    def put(self, job: Job) -> None:
        """Have these written. Never waits. Raises RuntimeError: the system refuses a thread."""
        if self.off:
            return
        size_bytes = size_of(job.copied)
        with self._count:
            self.waiting_bytes += size_bytes
        self._jobs.append(job)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run_jobs, name="tocsin-tensors", daemon=True
            )
            self._thread.start()
        self._wake.set()

    def use_up(self) -> None:
        """More is wanted than the budget has left: no more is taken. Never waits."""
        if not self.off:
            self.off = True
            self._failed(f"the budget of {self._budget / 1e9:g} GB is used up")

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Wait for what is under way, for so long at most."""
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run_jobs(self) -> None:
        while True:
            while self._jobs and not self._broken:
                self._one(self._jobs.popleft())
            if self._broken:
                self._jobs.clear()
                with self._count:
                    self.waiting_bytes = 0
            if self._closing or self._broken:
                return
            self._wake.wait()
            self._wake.clear()

    def _one(self, job: Job) -> None:
        try:
            while not job.copied.ready():
                time.sleep(_POLL_S)
            if self._left is None:
                self._left = (self._budget - self._before()) // self._ranks
            size_bytes = size_of(job.copied)
            if size_bytes > self._left:
                self._broken = True
                self.use_up()
                return
            saved = self._write(job)
            with self._count:
                # At once: between the two this file would count twice.
                self._left -= saved.size_bytes
                self.waiting_bytes -= size_bytes
            self._saved(saved)
        # A wall: whatever a disk, a bucket or a library does, the training goes on.
        except Exception as error:
            self._broken = self.off = True
            self._failed(f"{type(error).__name__}: {error}"[:300])

    def _write(self, job: Job) -> Saved:
        if self._root.startswith(BUCKETS):
            with tempfile.TemporaryDirectory(prefix="tocsin-tensors-") as folder:
                made = Path(folder) / "tensors"
                tensors = job.copied.write(made)
                size_bytes = made.stat().st_size
                import obstore

                obstore.put(self._bucket(), job.path, made)
            return Saved(job, f"{self._root.rstrip('/')}/{job.path}", size_bytes, tensors)
        target = Path(self._root) / job.path
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=".")
        os.close(descriptor)
        made = Path(name)
        try:
            tensors = job.copied.write(made)
            size_bytes = made.stat().st_size
            sync(made)
            made.replace(target)
            sync(target.parent)
        finally:
            with contextlib.suppress(OSError):
                made.unlink(missing_ok=True)
        return Saved(job, target.as_uri(), size_bytes, tensors)

    def _before(self) -> int:
        """What earlier incarnations of the run have saved, bytes."""
        if self._root.startswith(BUCKETS):
            import obstore

            listed = obstore.list(self._bucket(), f"{self._run}/{TENSORS}")
            metas = [meta for chunk in listed for meta in chunk]
            return sum(meta["size"] for meta in metas if not meta["path"].startswith(self._own))
        root = Path(self._root)
        # What a crash has left half-written counts, too.
        found = (root / self._run / TENSORS).rglob("*")
        return sum(
            path.stat().st_size
            for path in found
            if path.is_file() and not path.relative_to(root).as_posix().startswith(self._own)
        )

    def _bucket(self) -> ObjectStore:
        from obstore.store import from_url

        endpoint = self._options.get("endpoint", os.environ.get("AWS_ENDPOINT_URL", ""))
        store: ObjectStore = from_url(  # type: ignore[call-overload]
            self._root.rstrip("/"),
            client_options={"allow_http": endpoint.startswith("http://")},
            **self._options,
        )
        return store
