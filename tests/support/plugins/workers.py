"""Workers of pytest-xdist as forks of a process that has collected the tests once.

To import all test modules and what they test takes longer than to run most of them, and each worker
would do it. They collect again in the fork, where everything is imported already. In `make torture`
there is one process, which is none of these.

    python -m support.plugins.workers SOCKET PATH…    the server; ends when descriptor 0 is closed
    python -I -S …/workers.py SOCKET -u -c LINE    what pytest-xdist takes for Python: one worker
"""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import socket
import sys
import time
from collections.abc import Sequence

_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""A library with threads cannot be forked; and two cores run several workers."""


class Server:
    """The process that collects and is forked."""

    def __init__(self, paths: Sequence[str]) -> None:
        import subprocess
        import tempfile

        from support.processes.children import STARTUP

        self._folder = tempfile.TemporaryDirectory(prefix="tocsin-w")
        self._path = os.path.join(self._folder.name, "s")
        folders = os.pathsep.join([str(STARTUP), *filter(None, sys.path)])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.plugins.workers", self._path, *paths],
            stdin=subprocess.PIPE,
            env={**os.environ, **_ONE_THREAD, "PYTHONPATH": folders},
        )

    @property
    def gateway(self) -> str:
        """The specification of a worker, for `--tx`."""
        return f"popen//python={shlex.join([sys.executable, '-I', '-S', __file__, self._path])}"

    def stop(self) -> None:
        """End it, and with it the workers that are left."""
        self._process.communicate()
        self._folder.cleanup()


def serve(path: str, paths: Sequence[str]) -> str | None:
    """Fork for each connection; the line of Python to be run in a fork, None at the end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        _collect(paths)
        workers: set[int] = set()
        while True:
            ready, _, _ = select.select([listener.fileno(), 0], [], [])
            if listener.fileno() not in ready:
                break
            connection, _ = listener.accept()
            if not (worker := os.fork()):
                listener.close()
                return _become(connection)
            connection.close()
            workers.add(worker)
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
    return None


def _collect(paths: Sequence[str]) -> None:
    """Import all that a worker will import; what fails here fails there, and is reported there."""
    import contextlib
    import gc
    import io

    import pytest

    with contextlib.redirect_stdout(io.StringIO()):
        # That of reruns starts a thread.
        off = ("no:cacheprovider", "no:rerunfailures")
        pytest.main(["--collect-only", "-qq", *(f"-p{name}" for name in off), *paths])
    threads = len(os.listdir("/proc/self/task")) - 1
    assert not threads, f"imports have started {threads} threads, which are lost in a fork"
    gc.collect()
    gc.freeze()
    frozen, freeze_count = gc.get_freeze_count(), gc.get_freeze_count
    # As in a process that has never frozen anything: capture asks, and looks into fewer objects.
    gc.get_freeze_count = lambda: freeze_count() - frozen


def _become(connection: socket.socket) -> str:
    """Take over the files, the environment and the line of the process that has connected."""
    text, files, _, _ = socket.recv_fds(connection, _LONGEST, 3)
    for own, file in enumerate(files):
        os.dup2(file, own)
        os.close(file)
    sys.stdin = os.fdopen(0)
    request = json.loads(text)
    os.environ.clear()
    os.environ.update(request["environ"])
    _held.append(connection)
    return str(request["line"])


_LONGEST = 1 << 20
_held: list[socket.socket] = []
"""Closed by the end of this process alone, which the other side waits for."""


def ask(path: str, line: str) -> None:
    """Have a worker forked that has the files of this process; wait until it has ended."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LONGEST)
        for _ in range(3_000):
            try:
                connection.connect(path)
                break
            except OSError:
                time.sleep(0.01)
        request = {"environ": dict(os.environ), "line": line}
        socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
        for own in (0, 1):
            os.close(own)
        connection.recv(1)


if __name__ == "__main__":
    if sys.argv[2:4] == ["-u", "-c"]:
        ask(sys.argv[1], sys.argv[4])
    elif (line := serve(sys.argv[1], sys.argv[2:])) is not None:
        exec(line, {"__name__": "__main__"})
