"""Nothing of ours is measured or stamped by a clock that somebody can set."""

from __future__ import annotations

import ast
import re
import time
from pathlib import Path

import pytest

from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import EARLIEST, Outgoing, Partition
from tocsin.runtime.clock import SystemClock
from tocsin.schemas import monotonic_clock
from tocsin.schemas.topics import Topics

ROOT = Path(__file__).parents[3]
HOUR_NS = 3_600 * 10**9
JUMPS = [HOUR_NS, -HOUR_NS, 10 * 365 * 24 * HOUR_NS, 0]


@pytest.fixture(params=JUMPS)
def jump(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's clock is set while this process runs."""
    there = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: there() + request.param)
    monkeypatch.setattr(time, "time", lambda: time.time_ns() / 1e9)


def test_a_clock_that_is_set_moves_no_time_of_ours(jump: None) -> None:
    began_s, before_ms = time.monotonic(), monotonic_clock.unix_ms()
    SystemClock().now_ms()
    lasted_ms = monotonic_clock.unix_us() / 1000 - before_ms
    assert 0 <= lasted_ms <= 1000 * (time.monotonic() - began_s) + 1


async def test_append_times_go_on_as_they_were(tmp_path: Path, jump: None) -> None:
    partition = Partition(Topics().telemetry, 0)
    began_ms = monotonic_clock.unix_ms()
    async with EmbeddedBus(tmp_path / "bus.db") as bus:
        await bus.init(Topics().specs())
        producer = await bus.producer()
        await producer.publish([Outgoing(partition, b"r", b"", ())])
        (record,) = await (await bus.reader({partition: EARLIEST})).poll(timeout_s=10)
    assert began_ms <= record.append_ms <= monotonic_clock.unix_ms()


def test_nobody_else_reads_the_clock() -> None:
    clocks = {("time", "time"), ("time", "time_ns"), ("datetime", "now")}

    def reads(node: ast.AST) -> bool:
        named = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        return named and (node.value.id, node.attr) in clocks  # type: ignore[attr-defined]

    # Few modules need to be parsed.
    named = re.compile(r"\btime\.time|\bdatetime\.now")
    folders = ("emitter", "runtime", "bus", "stream_rules", "actions", "schemas", "console")
    readers = {
        path.name
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if named.search(source := path.read_text()) and any(map(reads, ast.walk(ast.parse(source))))
    }
    # The demo's trainings print the time of day, to be read beside that of another process.
    assert readers <= {"monotonic_clock.py", "common.py"}
