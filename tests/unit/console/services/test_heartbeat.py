"""Pings of workers: sent while they make progress, and only then."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest
from pydantic import SecretStr

from support.servers.fault_server import FaultServer, fault_server
from support.waiting import SOON_S, until
from tocsin.actions.receivers.address_guard import AddressGuard
from tocsin.console.context import CommandContext, read_context
from tocsin.console.services.heartbeat import (
    Heartbeat,
    Target,
    run_name,
    sender_url,
    target_of,
    why_withheld,
)
from tocsin.console.services.helper import Helper, Orders
from tocsin.console.services.workers import run_rules
from tocsin.runtime import metrics as names
from tocsin.runtime.metrics import Metrics
from tocsin.runtime.testing import FakeClock
from tocsin.runtime.worker import Worker
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.ids import check_run_id

START = 1_000_000


class Rounds:
    """A worker, as far as a heartbeat knows it."""

    def __init__(self, at_ms: int | None = None) -> None:
        self.last_round_ms = at_ms


class Counted(Metrics):
    def __init__(self) -> None:
        self.results: list[str] = []

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        assert (name, amount, labels["service"]) == (names.HEARTBEATS, 1, "rules")
        self.results.append(labels["result"])


MADE: list[Beating] = []


@pytest.fixture(autouse=True)
async def _closed() -> AsyncIterator[None]:
    yield
    for beating in MADE:
        beating.over = False
        await beating.end()
    MADE.clear()


class Beating:
    """A heartbeat in virtual time, with a worker that makes a round whenever it is told to."""

    def __init__(
        self, url: str, *, private: bool = True, run: bool = False, runs: bool = True
    ) -> None:
        self.clock = FakeClock(START)
        self.worker = Rounds()
        self.metrics = Counted()
        self.over = True
        self.heartbeat = Heartbeat(
            Target(SecretStr(url), 60_000, runs=runs),
            sender="rules@a",
            service="rules",
            workers=[cast(Worker, self.worker)],
            guard=AddressGuard(private=private),
            is_over=lambda: self.over,
            run=run,
            clock=self.clock,
            metrics=self.metrics,
        )
        MADE.append(self)

    async def second(self, *, works: bool = True) -> None:
        self.clock.advance(s=1)
        if works:
            self.worker.last_round_ms = self.clock.now_ms()
        await self.heartbeat.beat()

    async def seconds(self, count: int, *, works: bool = True) -> None:
        for _ in range(count):
            await self.second(works=works)

    async def end(self) -> None:
        self.heartbeat.stop()
        await self.heartbeat.run()


def content(server: FaultServer) -> list[dict[str, object]]:
    return [json.loads(request.body) for request in server.seen]


def test_all_workers_of_a_process_must_have_ended_a_round_lately() -> None:
    assert why_withheld([100_000, 50_000], 105_000, 60_000) is None
    assert why_withheld([100_000, 44_000], 105_000, 60_000) == "the last round ended 61 s ago"
    assert why_withheld([100_000, None], 105_000, 60_000) == "no round has ended yet"


def test_a_long_name_of_a_run_is_still_one_that_the_check_takes() -> None:
    assert check_run_id(run_name("r" * 200)).startswith("run@rrr")


def test_the_name_of_a_sender_is_a_part_of_the_path() -> None:
    url = sender_url(SecretStr("https://hc.example.com/{sender}?x=1"), "run@a/../b")
    assert url.get_secret_value() == "https://hc.example.com/run@a%2F..%2Fb?x=1"


async def test_a_worker_pings_each_minute_and_says_when_it_ends_on_purpose() -> None:
    async with fault_server() as server:
        beating = Beating(server.url("/status/200/{sender}"))
        await beating.seconds(125)
        await beating.end()

    assert [request.path for request in server.seen] == ["/status/200/rules@a"] * 4
    assert [one["ending"] for one in content(server)] == [False, False, False, True]
    assert beating.metrics.results == ["sent"] * 3


async def test_a_worker_that_hangs_or_never_works_does_not_ping(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with fault_server() as server:
        hangs = Beating(server.url("/status/200"))
        await hangs.seconds(5)
        await hangs.seconds(600, works=False)
        pinged = len(server.seen)
        await hangs.seconds(20)
        never = Beating(server.url("/status/200"))
        await never.seconds(600, works=False)
        never.over = False
        await never.end()

    # At the second ping the round of the fifth second was less than a minute ago.
    assert pinged == 2
    assert len(server.seen) == 3
    assert hangs.metrics.results.count("withheld") > 10
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "heartbeat withheld: the last round ended 116 s ago",
        "heartbeat withheld: no round has ended yet",
    ]


@pytest.mark.parametrize(
    ("path", "why"), [("302", "302 Found"), ("503", "503 Service Unavailable"), ("reset", None)]
)
async def test_a_failed_ping_is_counted_logged_once_and_tried_again_soon(
    path: str, why: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with fault_server() as server:
        beating = Beating(server.url(f"/status/{path}"))
        await beating.seconds(35)
        beating.over = False
        await beating.end()

    # No redirect is followed, and a worker that failed reports no end.
    assert len(server.seen) == 4
    assert beating.metrics.results == ["failed"] * 4
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == f"heartbeat failed: {why or 'connection reset'}"


async def test_a_worker_that_ends_while_it_pings_does_not_wait_for_the_next_time() -> None:
    async with fault_server() as server:
        server.answers.clear()
        beating = Beating(server.url("/status/200"))
        beating.worker.last_round_ms = START
        running = asyncio.create_task(beating.heartbeat.run())
        await until(lambda: server.seen, what="a ping")
        beating.heartbeat.stop()
        server.answers.set()
        async with asyncio.timeout(SOON_S):
            await running
    assert [one["ending"] for one in content(server)] == [False, True]


async def test_pings_go_to_no_address_that_is_not_allowed() -> None:
    async with fault_server() as server:
        beating = Beating(server.url("/status/200"), private=False)
        await beating.seconds(3)
    assert server.seen == []
    assert beating.metrics.results == ["failed"]


async def test_a_short_run_does_not_ping_and_runs_can_be_left_out() -> None:
    async with fault_server() as server:
        short = Beating(server.url("/status/200"), run=True)
        await short.seconds(58)
        await short.end()
        left_out = Beating(server.url("/status/200"), run=True, runs=False)
        await left_out.seconds(90)
        assert server.seen == []
        long = Beating(server.url("/status/200"), run=True)
        await long.seconds(62)
        await long.end()
    assert [one["ending"] for one in content(server)] == [False, True]


def configured(folder: Path, url: str, more: str = "") -> CommandContext:
    file = folder / "tocsin.yaml"
    file.write_text(f"version: 1\nheartbeat: {{url: {url}{more}}}\n")
    return read_context(file, f"embedded:{folder}/bus.db", environ={"HB": "no-url-s3cret"})


async def test_a_changed_section_takes_effect_without_a_restart(tmp_path: Path) -> None:
    async with fault_server() as server:
        beating = Beating(server.url("/status/200/old"))
        await beating.seconds(2)
        url = server.url("/status/200/new")
        take_over = await beating.heartbeat.prepare(configured(tmp_path, url, ", every: 10s"))
        await take_over()
        await beating.seconds(11)
    ends = [request.path.rpartition("/")[2] for request in server.seen]
    assert ends == ["old", "new", "new"]


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ("{url: ftp://a}", "expected a URL like"),
        ("{url: 'http://a/{host}'}", "expected only the placeholder {sender}"),
        ("{url: http://a/b, every: 1s}", "expected 2s to 1h"),
        ("{url: {secret: nothing}}", "unknown secret 'nothing'"),
        ("{every: 60s}", "the key 'url' is missing"),
    ],
)
def test_what_is_wrong_in_the_section_is_refused(
    tmp_path: Path, section: str, problem: str
) -> None:
    file = tmp_path / "tocsin.yaml"
    file.write_text(f"version: 1\nheartbeat: {section}\n")
    with pytest.raises(ConfigurationError) as refused:
        read_context(file, None, environ={})
    assert problem in str(refused.value)


def test_a_secret_that_is_no_url_is_refused_and_not_shown(tmp_path: Path) -> None:
    more = "}\nsecrets: {hb: {env: HB}"
    context = configured(tmp_path, "{secret: hb}", more)
    with pytest.raises(ConfigurationError) as refused:
        target_of(context)
    assert "the section 'heartbeat'" in str(refused.value)
    assert "s3cret" not in str(refused.value)


async def test_a_real_worker_pings_and_reports_its_end(tmp_path: Path) -> None:
    async with fault_server() as server:
        context = configured(tmp_path, f"'{server.url('/status/200/{sender}')}'", ", every: 2s")
        working = asyncio.create_task(run_rules(context))
        try:
            await until(lambda: server.seen, what="a ping")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            code = await working
    assert code == 0
    assert server.seen[0].path.startswith("/status/200/rules@")
    assert content(server)[-1]["ending"] is True


async def test_the_helper_of_a_run_pings_until_the_job_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    async with fault_server() as server:
        context = configured(tmp_path, f"'{server.url('/status/200/{sender}')}'", ", every: 2s")
        async with context.open_bus() as bus:
            await bus.init(context.topics.specs())
            orders = Orders()
            helper = Helper(
                bus, context, run_id="r1", since_ms=0, notify=(), allow_command=(), stop=True,
                orders=orders, report=None,
            )  # fmt: skip
            running = asyncio.create_task(helper.run(asyncio.Event()))
            await until(lambda: server.seen, what="a ping")
            orders.drain_s = 10.0
            orders.changed.set()
            assert await running == 0
    assert {request.path for request in server.seen} == {"/status/200/run@r1"}
    assert [one["ending"] for one in content(server)][-1] is True
