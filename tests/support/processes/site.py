"""A place where `tocsin` is run as a user runs it: a folder, a bus, a configuration."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from support.processes import forking
from support.processes.forking import Forked
from support.servers.receiver import Receiver
from support.waiting import HANGS_S
from tocsin.bus.port import Partition, Record, UnknownTopic
from tocsin.bus.urls import open_bus
from tocsin.console.views.bus_view import read_all
from tocsin.emitter.launch.helper import NAME
from tocsin.schemas.records.events import Data, Event
from tocsin.schemas.records.wire import decode, read_meta
from tocsin.schemas.topics import Topics, telemetry_partition

D = TypeVar("D", bound=Data)

KAFKA = pytest.param("kafka", marks=pytest.mark.kafka)
LATER_EMBEDDED = pytest.param("embedded", marks=pytest.mark.torture)
LATER_KAFKA = pytest.param("kafka", marks=[pytest.mark.kafka, pytest.mark.torture])

on_both_buses = pytest.mark.parametrize("site", ["embedded", KAFKA], indirect=True)
"""The test runs on both buses, always."""

on_kafka = pytest.mark.parametrize("site", [LATER_EMBEDDED, KAFKA], indirect=True)
"""The test runs on Kafka, and in `make torture` on the embedded bus too."""

on_embedded = pytest.mark.parametrize("site", ["embedded", LATER_KAFKA], indirect=True)
"""The test runs on the embedded bus, and in `make torture` on Kafka too: a run takes seconds."""


SCRIPTS = Path(__file__).parents[2] / "e2e" / "scripts"
"""Small training scripts of other people, as it were."""

HOOK_SECRET = "whsec_dG9jc2luLXRlc3RzLXdlYmhvb2sta2V5"
"""The signing key of the webhook that `Site.config` names."""

GPT = "tocsin.console.demo.trainings.gpt"
RESNET = "tocsin.console.demo.trainings.resnet"


CONFIG = """\
version: 1
bus: {{url: "{url}", prefix: {prefix}}}
secrets:
  hook: {{env: TOCSIN_TEST_HOOK}}
receivers:
  hook: {{type: webhook, url: "{hook}", sign: {{key: {{secret: hook}}}}}}
rules:
  - nonfinite: [stop, hook]
  - loss_diverged: [stop, hook]
  - exploding_gradient: [hook]
  - name: stalled-soon
    use: stalled_training
    match: {{patience: little}}
    params: {{threshold: 4s}}
    actions: [{{stop: {{grace: 1s}}}}, hook]
"""


@dataclass(frozen=True)
class Finished:
    """A `tocsin run` that has ended."""

    exit_code: int
    stdout: str
    stderr: str
    summary: dict[str, Any]

    @property
    def issues(self) -> list[dict[str, Any]]:
        """The summary's issues above `info`."""
        return [issue for issue in self.summary["issues"] if issue["severity"] != "info"]

    def stopped_by(self, *rules: str, how: str = "edge") -> dict[str, Any]:
        """Assert that an issue of one of the rules has stopped the job and was told; the issue."""
        assert self.exit_code == 79, self
        assert self.summary["outcome"] == "stopped", self
        assert self.summary["exit_code"] == 79
        found = [issue for issue in self.issues if issue["rule"] in rules]
        assert found, self
        assert self.summary["stop"]["how"] == how, self
        states = {(d["issue"], d["action"]): d["state"] for d in self.summary["deliveries"]}
        assert states[(found[0]["id"], "stop")] == "delivered", self
        assert states[(found[0]["id"], "hook")] == "delivered", self
        return found[0]

    def __str__(self) -> str:
        return (
            f"exit code {self.exit_code}\n--- stdout\n{self.stdout[-3000:]}\n--- stderr\n"
            f"{self.stderr[-5000:]}\n--- summary\n{json.dumps(self.summary, indent=1)[:5000]}"
        )


class Running:
    """A `tocsin run` under way, in a session of its own. What it prints is read as it comes."""

    def __init__(self, process: subprocess.Popen[str], summary_path: Path) -> None:
        self.process = process
        self._summary_path = summary_path
        self._printed: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._readers = [
            threading.Thread(target=self._read, args=(name,), daemon=True) for name in self._printed
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str) -> None:
        with getattr(self.process, name) as stream:
            for line in stream:
                self._printed[name].append(line)

    @property
    def stdout(self) -> str:
        """What the job has printed so far."""
        return "".join(self._printed["stdout"])

    @property
    def stderr(self) -> str:
        """What tocsin and the job have printed there so far."""
        return "".join(self._printed["stderr"])

    def finish(self, timeout_s: float = HANGS_S) -> Finished:
        """Wait for its end; on a timeout kill it and fail with what it had printed."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(
                f"tocsin run did not end within {timeout_s} s\n{self._printed}"
            ) from None
        for reader in self._readers:
            reader.join(10)
        found = self._summary_path
        summary = json.loads(found.read_text()) if found.exists() else {}
        stderr = "".join(self._printed["stderr"])
        return Finished(self.process.returncode, self.stdout, stderr, summary)


@dataclass
class Site:
    """Where runs happen. `kind` is `embedded` or `kafka`."""

    kind: str
    folder: Path
    bus_url: str
    prefix: str
    config: Path
    environ: dict[str, str] = field(default_factory=dict)
    _count: int = 0

    def start(
        self,
        *command: str,
        run_id: str | None = None,
        options: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: int = subprocess.DEVNULL,
        wrap: Sequence[str] = (),
    ) -> Running:
        """Start `tocsin run … -- command`; `wrap` is a command that runs it."""
        self._count += 1
        summary = self.folder / f"summary-{os.getpid()}-{self._count}.json"
        argv = [*wrap, sys.executable, "-m", "tocsin.console", "run", "--config", str(self.config)]
        argv += ["--summary", str(summary), *(["--run-id", run_id] if run_id else []), *options]
        process = Forked(
            [*argv, "--", *command],
            cwd=cwd or self.folder,
            env={**os.environ, **self.environ, **(environ or {})},
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return Running(process, summary)

    def run(self, *command: str, timeout_s: float = HANGS_S, **options: Any) -> Finished:
        """Run `tocsin run … -- command` to its end."""
        return self.start(*command, **options).finish(timeout_s)

    def train(self, module: str, *arguments: str, **options: Any) -> Finished:
        """Run one of the shipped trainings on one thread."""
        return self.run(sys.executable, "-m", module, "--threads", "1", *arguments, **options)

    def tocsin(
        self, *arguments: str, timeout_s: float = HANGS_S
    ) -> subprocess.CompletedProcess[str]:
        """Run another command of tocsin to its end."""
        return forking.run(
            [sys.executable, "-m", "tocsin.console", *arguments],
            cwd=self.folder,
            env={**os.environ, **self.environ},
            stdin=subprocess.DEVNULL,
            timeout=timeout_s,
        )

    def said(self, run_id: str, kind: type[D]) -> list[D]:
        """The run's events of that type, from the telemetry on the bus."""

        place = Partition(Topics(self.prefix).telemetry, telemetry_partition(run_id))
        found: list[D] = []
        for record in self.records([place]):
            if record.key == run_id.encode() and record.value is not None:
                event = decode(read_meta(record.headers), record.value)
                if isinstance(event, Event) and isinstance(event.data, kind):
                    found.append(event.data)
        return found

    def records(self, partitions: Sequence[Partition]) -> list[Record]:
        """What stands there now, read without any view of ours; nothing on a bus that is made."""

        async def read() -> list[Record]:
            async with open_bus(self.bus_url) as bus:
                return [record async for record in read_all(bus, partitions)]

        # A launcher makes the file first, then its topics.
        if self.kind == "embedded" and not (self.folder / "bus.db").exists():
            return []
        with suppress(UnknownTopic):
            return asyncio.run(read())
        return []

    def service(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a worker; what it prints goes to a file in the folder."""
        with (self.folder / f"{arguments[0]}-{time.monotonic_ns()}.log").open("w") as log:
            return Forked(
                [sys.executable, "-m", "tocsin.console", *arguments, "--config", str(self.config)],
                cwd=self.folder,
                env={**os.environ, **self.environ},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
                start_new_session=True,
            )


def _site(kind: str, folder: Path, url: str, prefix: str, receiver: Receiver) -> Site:
    config = folder / "tocsin.yaml"
    config.write_text(CONFIG.format(url=url, prefix=prefix, hook=receiver.url))
    environ = {
        "TOCSIN_TEST_HOOK": HOOK_SECRET,
        "XDG_CONFIG_HOME": str(folder / "config"),
        "OMP_NUM_THREADS": "1",
    }
    return Site(kind, folder, url, prefix, config, environ)


def embedded_site_in(folder: Path, receiver: Receiver) -> Site:
    """A folder with an embedded bus of its own."""
    return _site("embedded", folder, f"embedded:{folder}/bus.db", "tocsin", receiver)


def kafka_site_in(folder: Path, kafka_url: str, receiver: Receiver) -> Site:
    """Topics of its own on a Kafka; no workers yet."""
    site = _site("kafka", folder, kafka_url, f"e2e-{uuid.uuid4().hex[:8]}", receiver)
    done = site.tocsin("bus", "init", "--config", str(site.config))
    assert done.returncode == 0, done.stderr
    return site


def end(process: subprocess.Popen[str], timeout_s: float = 60) -> int:
    """SIGTERM, then SIGKILL; its exit code."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait(10)


def family_of(running: Running, word: str) -> list[psutil.Process]:
    """The living processes of a job that have that word on their command line."""
    # What was forked from a launcher has its command line, with the job's behind it, and a name of
    # its own a moment later.
    lines = {one: _cmdline(one) for one in _family(running)}
    return [
        one
        for one, line in lines.items()
        if "tocsin.console" not in line and any(word in part for part in line)
    ]


def helpers_of(running: Running) -> list[psutil.Process]:
    """The living helpers of a launcher."""
    return [process for process in _family(running) if _name(process) == NAME]


def _family(running: Running) -> list[psutil.Process]:
    try:
        return psutil.Process(running.process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []
