"""A real MLflow tracking server on loopback, in an environment of its own, for it is large.

It is installed once, into `~/.cache/tocsin`; `TOCSIN_TEST_MLFLOW` names the interpreter of one that
is there. Without either, tests that need it are skipped and say why.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.servers.own_environment import interpreter
from support.waiting import wait_until

VERSION = "3.17.2"


@contextmanager
def real_mlflow(folder: Path) -> Iterator[str]:
    """The address of a server that keeps what it is sent in the folder."""
    python = interpreter("mlflow", VERSION, "mlflow", "TOCSIN_TEST_MLFLOW")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(python), "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    address = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert process.poll() is None, (folder / "mlflow.log").read_text()[-2_000:]
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    with (folder / "mlflow.log").open("w") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
            env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"},
            start_new_session=True,
        )
        try:
            wait_until(answers, what="MLflow answers")
            yield address
        finally:
            # Its workers are children of its own.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
