"""Reports that messages attach: whole or not at all, and never in the way of a message."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from support.records.made_runs import MadeRun, made_run
from support.records.on_bus import send
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.console.services.attached_reports import FRESH_S, AttachedReports
from tocsin.schemas.topics import Topics


def script(code: str) -> tuple[str, ...]:
    return (sys.executable, "-I", "-c", code)


async def fill(folder: Path, run: MadeRun) -> str:
    async with EmbeddedBus(folder / "bus.db") as bus:
        await bus.init(Topics().specs())
        await send(bus, run.telemetry)
        producer = await bus.producer()
        await producer.publish(run.others)
        await producer.close()
    return f"embedded:{folder}/bus.db"


async def test_it_is_the_report_of_the_run(tmp_path: Path) -> None:
    run = made_run()
    reports = AttachedReports(await fill(tmp_path, run), None)
    report = await reports.make(run.run_id)
    assert report is not None
    assert report.startswith(b"<!doctype html>")
    assert f"<h1>{run.run_id}".encode() in report


async def test_a_report_is_made_once_for_messages_of_one_moment() -> None:
    now = [0.0]
    code = "import time; print('<!doctype html>', time.time_ns())"
    reports = AttachedReports("embedded:x", None, command=script(code), clock=lambda: now[0])
    first, again = await reports.make("r"), await reports.make("r")
    assert first is not None
    assert first == again
    now[0] = FRESH_S + 1
    assert await reports.make("r") not in (None, first)


async def test_what_fails_costs_the_attachment_only() -> None:
    for code in ("raise SystemExit(2)", "print('no report')", "print('<!doctype html>' * 400_000)"):
        assert await AttachedReports("embedded:x", None, command=script(code)).make("r") is None


async def test_what_hangs_is_ended() -> None:
    code = "import time; time.sleep(600)"
    reports = AttachedReports("embedded:x", None, command=script(code), timeout_s=0.3)
    async with asyncio.timeout(30):
        assert await reports.make("r") is None
