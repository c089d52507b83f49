"""`python -m MODULE` of ours as a fork of a process that has imported it already.

What our commands import takes a second of processor time, more than most of them take to run.
`Forked` is `subprocess.Popen` for them: a process of its own, with the given arguments, folder,
environment, pipes and session, whose parent is a fork server. There is one for each process of
pytest, a fork of one that they share. In `make torture` each command starts a Python of its own, as
for users; but not one that is `AlwaysForked`.

    python -m support.processes.forking SOCKET    the server; ends when descriptor 0 is closed
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from support.processes.command_parameters import read_all_parameters

MODULES: Final = frozenset(
    {
        "tocsin.console",
        "support.processes.launching",
        "support.processes.actions",
        "support.processes.archive",
        "support.chaos.emitter_process",
        "support.chaos.rules_process",
        "support.processes.fold_member",
        "support.processes.fold",
    }
)
"""What can be run so."""

SHARED: Final = "FORK_SERVER_OF_TESTS"
"""The environment variable with the path of its socket."""

_PACKAGES: Final = (
    "tocsin.actions", "tocsin.bus", "tocsin.console", "tocsin.emitter.launch",
    "tocsin.emitter.node", "tocsin.emitter.send", "tocsin.runtime", "tocsin.schemas",
    "tocsin.store", "tocsin.stream_rules",
)  # fmt: skip
_LONGEST: Final = 1 << 20
_START: Final = struct.Struct("@i")
_END: Final = struct.Struct("@id")


@dataclass
class Spent:
    """Processor time of the processes that have ended, their ended children included."""

    seconds: float = 0.0


spent: Final = Spent()


class Forked(subprocess.Popen[str]):
    """As `subprocess.Popen(command, …)`; a plain one if the command is none of `MODULES`.

    Attributes:
        served: whether commands are forked; else each starts a Python of its own.
        started: those that somebody holds still.
    """

    served = os.environ.get("TOCSIN_TORTURE") != "1"
    started: ClassVar[weakref.WeakSet[Forked]] = weakref.WeakSet()
    _status: socket.socket | None = None

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        super().__init__(command, **options)
        self.started.add(self)

    def _execute_child(self, args: Sequence[str], *rest: Any) -> None:
        words = list(args)
        if words[:2] != [sys.executable, "-m"] or words[2] not in MODULES or not self.served:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        # As subprocess hands them on, in 3.11 and later.
        cwd, environ = rest[4], rest[5]
        theirs_in, theirs_out, theirs_err = rest[9], rest[12], rest[14]
        own_session = rest[20]
        request = {
            "module": words[2],
            "arguments": words[3:],
            "folder": os.fspath(cwd or os.getcwd()),
            "environ": dict(os.environ if environ is None else environ),
            "session": own_session,
        }
        files = [given if given != -1 else own for own, given in enumerate(
            (theirs_in, theirs_out, theirs_err))]  # fmt: skip
        self._status, child_side = socket.socketpair()
        with child_side:
            socket.send_fds(
                _server(), [json.dumps(request).encode()], [*files, child_side.fileno()]
            )
        (self.pid,) = _START.unpack(self._status.recv(_START.size, socket.MSG_WAITALL))
        self._child_created = True
        self._close_pipe_fds(*rest[9:15])  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._status is None:
            found: tuple[int, int] = super()._try_wait(wait_flags)  # type: ignore[misc]
            return found
        if wait_flags and not select.select([self._status], [], [], 0)[0]:
            return 0, 0
        status, used_s = _END.unpack(self._status.recv(_END.size, socket.MSG_WAITALL))
        self._status.close()
        spent.seconds += used_s
        return self.pid, status

    def _internal_poll(self, *rest: Any, **more: Any) -> int | None:
        if self._status is None:
            code: int | None = super()._internal_poll(*rest, **more)  # type: ignore[misc]
            return code
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid == self.pid:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode


class AlwaysForked(Forked):
    """Forked in `make torture`, too: for what is killed thousands of times after its start."""

    served = True


def run(
    command: Sequence[str], *, timeout: float, **options: Any
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run(command, capture_output=True, text=True, …)`."""
    with Forked(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


# -- the server


_connection: list[socket.socket] = []


def _server() -> socket.socket:
    """The connection to this process's own, which ends with it: a fork of the one that all workers
    of pytest-xdist share."""
    if not _connection:
        ours = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            ours.setsockopt(socket.SOL_SOCKET, option, _LONGEST)
        if SHARED not in os.environ:
            Shared()
        deadline = time.monotonic() + 60
        while True:
            try:
                ours.connect(os.environ[SHARED])
                break
            except OSError:
                assert time.monotonic() < deadline, "no fork server has come up"
                time.sleep(0.02)
        _connection.append(ours)
        atexit.register(ours.close)
    return _connection[0]


class Shared:
    """The server that is forked for each process of pytest that connects. Ends with this one."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tocsin-f")
        os.environ[SHARED] = path = os.path.join(self._folder.name, "s")
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.processes.forking", path],
            stdin=subprocess.PIPE,
            env=environ,
        )
        atexit.register(self.stop)

    def stop(self) -> None:
        """End it; what it was forked for ends with those that have connected."""
        self._process.communicate(timeout=10)
        self._folder.cleanup()
        os.environ.pop(SHARED, None)


def listen(path: str) -> None:
    """Fork for each connection, until descriptor 0 is closed. In a fork: serve it."""
    _import_all()
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        while listener.fileno() in select.select([listener.fileno(), 0], [], [])[0]:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                    connection.setsockopt(socket.SOL_SOCKET, option, _LONGEST)
                os.dup2(os.open(os.devnull, os.O_RDWR), 0)
                serve(connection)
                return
            connection.close()
            _reap()


def serve(connection: socket.socket) -> None:
    """Fork for each request until the other side has gone. In a fork: run the module."""
    while True:
        text, files, _, _ = socket.recv_fds(connection, _LONGEST, 4)
        if not text:
            return
        if os.fork() == 0:
            connection.close()
            _keep(json.loads(text), files)
            return
        for file in files:
            os.close(file)
        _reap()


def _import_all() -> None:
    """All of ours but what needs torch."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # whoever imports it fails
    for package in _PACKAGES:
        for module in pkgutil.walk_packages(
            importlib.import_module(package).__path__, f"{package}.", onerror=lambda name: None
        ):
            if "__main__" in module.name or "_child" in module.name:
                continue
            try:
                importlib.import_module(module.name)
            except Exception:  # of torch, or of something that is not installed
                continue
    read_all_parameters()
    del sys.modules["torch"]


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _keep(request: dict[str, Any], files: list[int]) -> None:
    """In a fork: fork the process itself, and tell how it ends. Returns in that process alone."""
    *streams, status = files
    with socket.socket(fileno=status) as told:
        pid = os.fork()
        if pid:
            for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            for file in (*streams, 0, 1, 2):
                os.close(file)
            told.sendall(_START.pack(pid))
            _, code, used = os.wait4(pid, 0)
            try:
                told.sendall(_END.pack(code, used.ru_utime + used.ru_stime))
            finally:
                os._exit(0)
    for own, file in enumerate(streams):
        os.dup2(file, own)
    for file in streams:
        os.close(file)
    if request["session"]:
        os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.path[0] = request["folder"]
    sys.argv[1:] = request["arguments"]
    try:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code is not None and not isinstance(ended.code, int):
            raise
        _leave(ended.code or 0)
    _leave(0)


def _leave(code: int) -> None:
    """End as Python does, but take nothing apart: to free what the server had imported takes four
    times as long as most commands. Comes back if what was written has nowhere to go."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except (OSError, ValueError):
        raise SystemExit(code) from None  # Python says so
    os._exit(code)


if __name__ == "__main__":
    listen(sys.argv[1])
