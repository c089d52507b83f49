"""A broker that is slow, dead, refuses or never answers is said once, and nothing waits for it."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.servers.kafka_broker import Broker, free_ports, skip_or_fail, unavailable
from support.trainings.captured import said
from support.waiting import wait_until
from tocsin.bus.embedded.bus import EmbeddedBus, EmbeddedProducer
from tocsin.bus.kafka.security import KafkaSecurity
from tocsin.bus.port import Bus, Outgoing
from tocsin.bus.urls import open_bus
from tocsin.emitter.send import sender as sending
from tocsin.emitter.send.bus_connection import CLOSE_S
from tocsin.emitter.send.encoding import Address
from tocsin.emitter.send.outbox import StepRow
from tocsin.emitter.send.sender import Sender
from tocsin.schemas.records.frames import RecordOrigin
from tocsin.schemas.records.runs import RunEnded
from tocsin.schemas.topics import Topics

ORIGIN = RecordOrigin(run_id="r1", incarnation="i1")


def make(
    opener: Callable[[], Bus], told: list[str], *, prefix: str = "tocsin", create: bool = False
) -> Sender:
    address = Address(
        topics=Topics(prefix), origin=ORIGIN, source="/runs/r1/ranks/0", create_topics=create
    )
    made = Sender(opener, address, report=told.append)
    made.start()
    return made


def train(sender: Sender, steps: int = 200) -> float:
    """Say something of some steps; the longest that one of them had to wait, seconds."""
    longest = 0.0
    for step in range(steps):
        began = time.perf_counter()
        sender.row(StepRow(step, 0, ("loss",), (0.5,)), urgent=step % 50 == 0)
        longest = max(longest, time.perf_counter() - began)
        time.sleep(0.001)
    return longest


def ends_soon(sender: Sender) -> None:
    began = time.monotonic()
    assert not sender.close(5.0)
    assert time.monotonic() - began < sending.FLUSH_WITHOUT_BUS_S + CLOSE_S + 1.5


@contextmanager
def blackhole() -> Iterator[int]:
    """A port that takes connections and never answers."""
    taken: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def take() -> None:
            while True:
                try:
                    taken.append(server.accept()[0])
                except OSError:
                    return

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
    thread.join(5)
    for each in taken:
        each.close()


def test_a_broker_that_takes_connections_and_never_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sending, "PUBLISH_S", 0.5)
    told: list[str] = []
    with blackhole() as port:
        sender = make(lambda: open_bus(f"kafka://127.0.0.1:{port}"), told)
        assert train(sender) < 0.5
        wait_until(lambda: told)
        ends_soon(sender)
    (line,) = told
    assert "no answer within 0.5 s" in line
    assert "retrying" in line


def test_a_broker_that_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []
    (port,) = free_ports(1)
    sender = make(lambda: open_bus(f"kafka://127.0.0.1:{port}"), told)
    assert train(sender) < 0.5
    wait_until(lambda: told)
    ends_soon(sender)
    # aiokafka has a line for each attempt, for which Python's last resort would be stderr.
    assert [record.name for record in caplog.records if "kafka" in record.name] == []
    # On a thread of its own: this one may have run a bus in an earlier test.
    own = threading.Thread(target=logging.getLogger("aiokafka.conn").error, args=("the user's",))
    own.start()
    own.join()
    assert [record.name for record in caplog.records] == ["aiokafka.conn"]
    (line,) = told
    assert "no broker answers" in line
    assert "this machine can reach it" in line


def test_a_slow_bus_gets_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = EmbeddedProducer.publish

    async def slow(self: EmbeddedProducer, records: Sequence[Outgoing], /) -> Sequence[int]:
        await asyncio.sleep(0.3)
        return await original(self, records)

    monkeypatch.setattr(EmbeddedProducer, "publish", slow)
    told: list[str] = []
    sender = make(lambda: EmbeddedBus(tmp_path / "bus.db"), told, create=True)
    assert train(sender) < 0.5
    sender.publish(RunEnded(run_id="r1", incarnation="i1", outcome="completed"))
    assert sender.close(10.0)
    found = said(tmp_path)
    assert sorted(found.steps()) == list(range(200))
    assert found.of(RunEnded)
    assert (told, sender.dropped) == ([], 0)


def test_another_kind_of_failure_is_said_too(tmp_path: Path) -> None:
    told: list[str] = []
    failures: list[Exception] = [OSError("away"), OSError("away"), PermissionError("not yours")]

    def open_it() -> Bus:
        if failures:
            raise failures.pop(0)
        return EmbeddedBus(tmp_path / "bus.db")

    sender = make(open_it, told, create=True)
    sender.row(StepRow(0, 0, ("loss",), (0.5,)))
    wait_until(lambda: sender.records)
    assert sender.close()
    assert [("away" in line, "not yours" in line, "again;" in line) for line in told] == [
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ]


@pytest.mark.kafka
def test_topics_that_are_missing_are_said_once_and_used_once_they_are_there(
    kafka_url: str,
) -> None:
    told: list[str] = []
    topics = Topics(f"missing-{uuid.uuid4().hex[:8]}")
    sender = make(lambda: open_bus(kafka_url), told, prefix=topics.prefix)
    sender.row(StepRow(0, 0, ("loss",), (0.5,)))
    wait_until(lambda: told)
    assert told[0].count("bus init") == 1

    async def init() -> None:
        async with open_bus(kafka_url) as bus:
            await bus.init(topics.specs())

    asyncio.run(init())
    wait_until(lambda: sender.records == 1)
    assert sender.close()
    assert len(told) == 2
    assert "answers again; 0 records were dropped" in told[1]


@pytest.mark.torture
@pytest.mark.kafka
def test_a_wrong_password_is_said_once(tmp_path: Path) -> None:
    reason = unavailable()
    if reason is not None:
        skip_or_fail(reason)
    broker = Broker(tmp_path / "guarded", users={"trainer": "trainer-word"})
    security = KafkaSecurity("SCRAM-SHA-256", "trainer", "wrong-word")
    told: list[str] = []
    try:
        broker.start()
        sender = make(lambda: open_bus(broker.guarded_url, security=security), told)
        assert train(sender) < 0.5
        wait_until(lambda: told)
        ends_soon(sender)
    finally:
        broker.stop(hard=True)
    (line,) = told
    assert line.count("check the credentials") == 1
    assert "wrong-word" not in line


@pytest.mark.torture
@pytest.mark.kafka
def test_a_broker_that_dies_and_returns_gets_what_waited(private_broker: Broker) -> None:
    topics = Topics("returning")

    async def init() -> None:
        async with open_bus(private_broker.url) as bus:
            await bus.init(topics.specs())

    asyncio.run(init())
    told: list[str] = []
    sender = make(lambda: open_bus(private_broker.url), told, prefix=topics.prefix)
    sender.row(StepRow(0, 0, ("loss",), (0.5,)))
    wait_until(lambda: sender.records == 1)
    private_broker.stop(hard=True)
    assert train(sender, 500) < 0.5
    wait_until(lambda: told, timeout_s=60)
    private_broker.start()
    wait_until(lambda: len(told) == 2, timeout_s=60)
    assert sender.close()
    assert sender.dropped == 0
    assert "answers again" in told[1]
