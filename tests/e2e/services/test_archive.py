"""Runs that archive themselves, and the archive worker, as processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support.processes.forking import Forked
from support.records.made_runs import made_run
from support.waiting import wait_until
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.console.__main__ import app
from tocsin.console.services import own_archive
from tocsin.store import open_run, open_store

TOCSIN = (sys.executable, "-m", "tocsin.console")


def environment(**more: str) -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if name != "TOCSIN_STORE"} | more


def tocsin(folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """One command, as a user types it."""
    process = Forked(
        [*TOCSIN, *words],
        cwd=folder,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def test_a_run_is_in_the_store_when_it_is_over(tmp_path: Path) -> None:
    job = ("--", sys.executable, "-S", "-c", "import time; time.sleep(0.3)")
    left = tmp_path / ".tocsin" / "store" / ".scratch" / "left-by-a-crash"
    left.parent.mkdir(parents=True)
    left.touch()
    os.utime(left, (0, 0))

    done = tocsin(tmp_path, "run", "--run-id", "one", *job)
    off = tocsin(tmp_path, "run", "--run-id", "two", *job, TOCSIN_STORE="off")

    assert (done.returncode, off.returncode) == (0, 0), (done.stderr, off.stderr)
    store = open_store(tmp_path / ".tocsin" / "store")
    assert [run.run_id for run in store.runs()] == ["one"]
    run = open_run("one", store=store)
    assert "disk.free_bytes" in run.system().columns
    assert not left.exists()
    assert run.events()
    assert all(manifest.compacted for manifest in store.manifests("one").values())
    # And after the bus is gone.
    (tmp_path / ".tocsin" / "bus.db").unlink()
    assert open_run("one", store=store).nodes() == run.nodes()


def test_the_archive_worker(tmp_path: Path) -> None:
    made = made_run()

    async def fill() -> None:
        async with EmbeddedBus(tmp_path / "bus.db") as bus:
            await made.publish(bus)

    asyncio.run(fill())
    (tmp_path / "tocsin.yaml").write_text("version: 1\nstore: {url: runs, every: 1s}\n")
    bus, log = f"embedded:{tmp_path / 'bus.db'}", tmp_path / "log"
    with log.open("w") as stderr:
        worker = Forked(
            [*TOCSIN, "archive", "--bus", bus, "--http", "127.0.0.1:0"],
            cwd=tmp_path, env=environment(), stderr=stderr, text=True,
        )  # fmt: skip
    try:
        wait_until(
            lambda: set(open_store(tmp_path / "runs").manifests("run-1")) == {"telemetry", "issues"}
        )
        (tmp_path / "tocsin.yaml").write_text("version: 1\nstore: {url: other, keep: {runs: 9}}\n")
        worker.send_signal(signal.SIGHUP)
        wait_until(lambda: "configuration applied" in log.read_text())
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.communicate(timeout=60)
    said = log.read_text()
    assert worker.returncode == 0, said
    assert "archiving embedded:" in said
    assert "the section 'store' has changed: but for `keep`" in said
    run = open_run("run-1", store=tmp_path / "runs")
    assert len(run.steps()) == 20
    assert [one.issue_id for one in run.issues()] == [made.issue.issue_id]


def test_a_store_that_cannot_be_is_refused_at_the_start(tmp_path: Path) -> None:
    refused = tocsin(tmp_path, "archive", "--store", "ftp://x")
    assert refused.returncode == 2
    assert "--store: Value error, expected a folder, or s3://" in refused.stderr.replace("\n", " ")


def test_without_the_extra_status_has_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TOCSIN_STORE")
    monkeypatch.setattr(own_archive, "installed", lambda: False)

    async def fill() -> None:
        async with EmbeddedBus(tmp_path / "bus.db") as bus:
            await made_run().publish(bus)

    asyncio.run(fill())
    bus = f"embedded:{tmp_path / 'bus.db'}"

    shown = CliRunner().invoke(app, ["status", "--bus", bus])
    as_json = CliRunner().invoke(app, ["status", "--bus", bus, "--json"])
    monkeypatch.setenv("TOCSIN_STORE", "off")
    off = CliRunner().invoke(app, ["status", "--bus", bus])

    assert shown.output.count("runs are not archived: the extra 'store' is not installed") == 1
    assert json.loads(as_json.output)["version"] == 1
    assert "not archived" not in off.output
