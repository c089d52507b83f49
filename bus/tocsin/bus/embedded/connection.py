"""One SQLite connection in a thread of its own, so that no file access runs on the event loop.

What is promised: a transaction that was acknowledged survives SIGKILL of its process. That is WAL
mode with `synchronous=NORMAL`: the commit is in the page cache of the kernel before `COMMIT`
returns. After a power loss or a kernel crash the last commits may be gone; the file is whole even
then.

The file may be deleted while we hold it open (`rm -rf .tocsin`): before each job the path is
compared with what was opened, and if it is another file or none, a new bus is made there with the
same topics, so that later records are kept. What was in the deleted file is gone. A file that is
damaged is set aside, and the same follows (`tocsin.bus.embedded.damage`).
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import queue
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from tocsin.bus.embedded import damage, tables
from tocsin.bus.embedded.errors import translated
from tocsin.bus.embedded.location import check_own, make_folder
from tocsin.bus.embedded.spool import has_spools
from tocsin.bus.port import BusClosed, BusError, BusUnavailable, MissingBus, UnusableBus
from tocsin.schemas.topics import TopicSpec

T = TypeVar("T")

BUSY_S: Final = 5.0
"""How long a writer waits for another's transaction."""

CLOSE_S: Final = 1.5
"""How long `close` waits for the job under way."""

WAL_BYTES: Final = 16 * 1024 * 1024
"""Bytes after which a producer checkpoints the write-ahead log, between two publishes."""

_WAL_PAGES: Final = 4 * WAL_BYTES // tables.PAGE_SIZE
"""Pages after which SQLite does it by itself, within a commit, should the producers not have."""


FORK_S: Final = 0.2
"""How long a fork waits for the jobs under way, seconds."""


class _Forks:
    """Keeps forks out of the middle of jobs.

    SQLite remembers in its own memory which locks this process holds on a file. A child that is
    made in the middle of a transaction inherits that, and finds the file locked for ever, whatever
    connection it opens.
    """

    def __init__(self) -> None:
        self._locks: weakref.WeakSet[_JobLock] = weakref.WeakSet()
        self._held: list[_JobLock] = []
        self._watching = False

    def lock(self) -> _JobLock:
        """One that a connection holds during each job."""
        if not self._watching:
            self._watching = True
            os.register_at_fork(
                before=self._before, after_in_parent=self._after, after_in_child=self._after
            )
        lock = _JobLock()
        self._locks.add(lock)
        return lock

    def _before(self) -> None:
        until = time.monotonic() + FORK_S
        for lock in list(self._locks):
            if lock.mutex.acquire(timeout=max(0.0, until - time.monotonic())):
                self._held.append(lock)

    def _after(self) -> None:
        held, self._held = self._held, []
        for lock in held:
            lock.mutex.release()


class _JobLock:
    """A lock that can be referred to weakly."""

    def __init__(self) -> None:
        self.mutex = threading.Lock()


_forks: Final = _Forks()


class BusFile:
    """How to open the file of a bus, or make it."""

    def __init__(self, path: Path, *, create: bool = True, busy_s: float = BUSY_S) -> None:
        self.path = path
        self.create = create
        self.busy_s = busy_s
        self.topics: Sequence[TopicSpec] = ()
        """Those that this process knows to be there, for a file whose own cannot be read."""

    def open(self, specs: Sequence[TopicSpec] = ()) -> sqlite3.Connection:
        """Open it; a file that is missing or empty is made first, with these topics. May block for
        `busy_s`.

        Raises:
            UnusableBus, BusUnavailable.
        """
        with translated(self.path):
            check_own(self.path)
            db = self._open_existing() if self.path.exists() else None
            return self._make(specs) if db is None else db

    def set_aside(self, error: sqlite3.Error, identity: tuple[int, int] | None) -> bool:
        """Whether the damaged file of that identity is not in the way any more: the next `open`
        finds or makes another one. A file is only set aside by who may make one.

        Raises BusUnavailable, OSError.
        """
        if not self.create:
            return False
        with self._exclusive():
            return identity != identity_of(self.path) or damage.set_aside(self.path, error)

    def _open_existing(self) -> sqlite3.Connection | None:
        """The file, open; None: it is still to be made, or it was damaged and is set aside."""
        # A file that we did not make may be anything.
        ours = self.create and self._lock.exists()
        try:
            return self._open_current()
        except sqlite3.Error as error:
            if not (ours and damage.is_damage(error)):
                raise
        with self._exclusive():
            # Once more, while nobody makes it.
            try:
                return self._open_current()
            except sqlite3.Error as error:
                if damage.is_damage(error) and damage.set_aside(self.path, error):
                    return None
                raise

    def _open_current(self) -> sqlite3.Connection | None:
        db, ready = self.connect(), False
        try:
            ready = self._is_ready(db)
        finally:
            if not ready:
                db.close()
        return db if ready else None

    @property
    def _lock(self) -> Path:
        """It is there from when a bus is made there."""
        return self.path.with_name(self.path.name + ".lock")

    def connect(self) -> sqlite3.Connection:
        """The file that is there. Raises sqlite3.Error."""
        db = sqlite3.connect(
            self.path, timeout=self.busy_s, isolation_level=None, check_same_thread=False
        )
        try:
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES}")
            db.execute(f"PRAGMA journal_size_limit = {4 * WAL_BYTES}")
            db.execute("PRAGMA temp_store = MEMORY")
        except BaseException:
            db.close()
            raise
        return db

    def _is_ready(self, db: sqlite3.Connection) -> bool:
        # All of one moment: another process may be making it.
        db.execute("BEGIN")
        try:
            (application,) = db.execute("PRAGMA application_id").fetchone()
            (version,) = db.execute("PRAGMA user_version").fetchone()
            (objects,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        finally:
            if db.in_transaction:
                db.execute("ROLLBACK")
        if application == tables.APPLICATION_ID and version == tables.FORMAT:
            return True
        if application == tables.APPLICATION_ID:
            raise UnusableBus(
                f"{self.path} has bus format {version}, this release reads {tables.FORMAT}: "
                "use the release that wrote it, or move the file away"
            )
        if application or version or objects:
            raise UnusableBus(
                f"{self.path} is an SQLite file of something else: choose another path"
            )
        return False

    def _make(self, specs: Sequence[TopicSpec]) -> sqlite3.Connection:
        if not self.create and not has_spools(self.path):
            raise MissingBus(
                f"there is no bus at {self.path}: 'tocsin run' creates one, or check the path"
            )
        try:
            make_folder(self.path)
        except OSError as error:
            raise UnusableBus(
                f"cannot make the folder {self.path.parent}: {error.strerror or error}"
            ) from error
        with self._exclusive():
            if not self.path.exists():
                # The log of a deleted file must never be taken for the log of the new one.
                for suffix in ("-wal", "-shm"):
                    self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
            db = self.connect()
            try:
                if not self._is_ready(db):
                    db.execute(f"PRAGMA page_size = {tables.PAGE_SIZE}")
                    db.execute("PRAGMA auto_vacuum = INCREMENTAL")
                    db.execute("PRAGMA journal_mode = WAL")
                    db.executescript(f"BEGIN IMMEDIATE; {tables.SCHEMA} COMMIT;")
                    tables.create_topics(db, specs)
            except BaseException:
                db.close()
                raise
            return db

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One maker at a time; the lock goes with its process."""
        lock = os.open(
            self._lock,
            os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW,
            0o600,
        )
        try:
            deadline = time.monotonic() + self.busy_s
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise BusUnavailable(
                            f"{self.path} is being made by another process"
                        ) from None
                    time.sleep(0.01)
            yield
        finally:
            os.close(lock)


class Connection:
    """A thread with an open bus file. `run` hands it one job at a time, in order.

    It belongs to the process and the event loop that opened it: after a fork it refuses.
    """

    def __init__(self, file: BusFile, name: str) -> None:
        self.file = file
        self.catalogue = tables.TopicCatalogue()
        self.epoch = 0
        """Grows by one each time that the file was found replaced; positions in the old one mean
        nothing.
        """
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: set[asyncio.Future[Any]] = set()
        self._pid = os.getpid()
        self._closed = False
        self._db: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None
        self._job_lock = _forks.lock()
        self._thread = threading.Thread(target=self._work, name=f"tocsin-{name}", daemon=True)

    async def open(self) -> None:
        """Start the thread and open the file. Raises UnusableBus or BusUnavailable."""
        self._thread.start()
        try:
            await self.run(lambda db: None)
        except BaseException:
            await self.close()
            raise

    async def run(self, job: Callable[[sqlite3.Connection], T]) -> T:
        """Run the job in the thread and wait for it.

        Raises:
            BusClosed, BusUnavailable, UnusableBus; and what the job raises.
        """
        if os.getpid() != self._pid:
            raise BusClosed("this bus was opened before a fork: open it again in the child")
        if self._closed:
            raise BusClosed("this part of the bus is closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)  # type: ignore[arg-type]  # None only beside an error
            else:
                future.set_exception(error)

        def work() -> None:
            result: T | None = None
            failure: BaseException | None = None
            try:
                result = self._do(job)
            except StopIteration as error:  # a future takes none, and would never be done
                failure = RuntimeError(f"a job ended by {error!r}")
            except BaseException as error:
                failure = error
            # The loop may be gone by now; then nobody waits either.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, result, failure)

        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        self._jobs.put(work)
        return await future

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def post(self, job: Callable[[sqlite3.Connection], object]) -> None:
        """Run the job later, for nobody waits for it; the port's errors in it are dropped."""

        def work() -> None:
            with suppress(BusError):
                self._do(job)

        if not self._closed:
            self._jobs.put(work)

    async def close(self) -> None:
        """End the thread; jobs that wait fail with BusClosed. Bounded by 1.5 s."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        for future in list(self._waiting):
            if not future.done():
                future.set_exception(BusClosed("the bus was closed meanwhile"))
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._jobs.put(lambda: self._finish(loop, ended))
        self._jobs.put(None)
        # Closing takes a millisecond or two; a longer wait is another process holding the lock.
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await ended.wait()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _finish(self, loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
        if self._db is not None:
            with suppress(sqlite3.Error):
                self._db.close()
            self._db = None
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(ended.set)

    def _do(self, job: Callable[[sqlite3.Connection], T]) -> T:
        if self._closed:
            raise BusClosed("the bus was closed meanwhile")
        with self._job_lock.mutex, translated(self.file.path):
            try:
                return job(self._current())
            except sqlite3.Error as error:
                if not damage.is_damage(error):
                    raise
            try:
                # Once more, with nothing of the file in memory: it may be whole.
                return job(self._fresh())
            except sqlite3.Error as error:
                if not damage.is_damage(error) or not self.file.set_aside(error, self._identity):
                    raise
            return job(self._current())

    def _current(self) -> sqlite3.Connection:
        """The open file, opened again if it is not the one at the path any more."""
        db = self._db
        if db is not None and self._identity == identity_of(self.file.path):
            return db
        specs: Sequence[TopicSpec] = ()
        if db is not None:
            # The deleted file is still readable through its open descriptor.
            with suppress(sqlite3.Error):
                specs = tables.topic_specs(db)
            with suppress(sqlite3.Error):
                db.close()
            self._db = None
            self.catalogue = tables.TopicCatalogue()
            self.epoch += 1
        try:
            self._db = self.file.open(specs or self.file.topics)
        except UnusableBus as error:
            if self.epoch and not self.file.path.exists():
                raise BusUnavailable(f"{self.file.path} was deleted") from error
            raise
        self._identity = identity_of(self.file.path)
        with suppress(sqlite3.Error):
            self.file.topics = tables.topic_specs(self._db) or self.file.topics
        return self._db

    def _fresh(self) -> sqlite3.Connection:
        """The file, opened anew if it is still the one that was open."""
        old = self._db
        if old is not None and self._identity == identity_of(self.file.path):
            self._db = self.file.connect()
            with suppress(sqlite3.Error):
                old.close()
        return self._current()


def identity_of(path: Path) -> tuple[int, int] | None:
    """What tells the file there from every other one; None: there is none."""
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_dev, info.st_ino
