"""A real Ray cluster on loopback, in an environment of its own, for it is large.

It is installed once, into `~/.cache/tocsin`; `TOCSIN_TEST_RAY` names the interpreter of one that is
there. Without either, tests that need it are skipped and say why.
"""

from __future__ import annotations

import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.servers.own_environment import interpreter
from support.waiting import wait_until

VERSION = "2.60.0"
TOKEN = "planted-SECRET-token-of-a-ray-cluster"

# The cluster ends with the process that began it: nothing else on this machine is touched.
_CLUSTER = """
import sys, ray
context = ray.init(
    num_cpus=1, include_dashboard=True, dashboard_host="127.0.0.1", object_store_memory=80_000_000,
    log_to_driver=False,
)
print(context.dashboard_url, flush=True)
sys.stdin.read()
ray.shutdown()
"""


@dataclass(frozen=True)
class RealRay:
    """A cluster that runs."""

    address: str
    python: Path

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """One request to the Jobs API."""
        request = urllib.request.Request(
            f"{self.address}/api/{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"authorization": f"Bearer {TOKEN}", "content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def status(self, submission: str) -> str:
        """The state of a job in Ray's words."""
        return str(self.ask("GET", f"jobs/{submission}")["status"])

    def answers(self) -> bool:
        """Whether the Jobs API is there."""
        try:
            self.ask("GET", "version")
        except (urllib.error.URLError, OSError):
            return False
        return True

    def submit(
        self, script: Path, folder: Path, submission: str, env: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """Submit a script, wait until it has written `ready` into the folder, and return what that
        file holds as JSON: the environment of the job."""
        folder.mkdir()
        self.ask(
            "POST",
            "jobs/",
            {
                "entrypoint": f"{self.python} {script} {folder}",
                "submission_id": submission,
                "runtime_env": {"env_vars": dict(env or {})},
            },
        )
        ready = folder / "ready"
        wait_until(ready.exists, what=f"the job {submission} runs")
        found: dict[str, str] = json.loads(ready.read_text())
        return found


@contextmanager
def real_ray(folder: Path) -> Iterator[RealRay]:
    """A cluster of one node, with token authentication."""
    python = interpreter("ray", VERSION, "ray[default]", "TOCSIN_TEST_RAY")
    script = folder / "cluster.py"
    script.write_text(_CLUSTER)
    settings = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        "RAY_USAGE_STATS_ENABLED": "0",
        # What a shell of ours may have set is for another cluster.
        "RAY_ADDRESS": "",
    }
    with (folder / "ray.log").open("w") as log:
        process = subprocess.Popen(
            [python, script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **settings},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            assert url, (folder / "ray.log").read_text()[-2000:]
            cluster = RealRay(f"http://{url}", python)
            wait_until(cluster.answers, what="Ray answers")
            yield cluster
        finally:
            process.stdin.close()
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
