"""A rule's request to capture more: judged once per node, handed to its ranks, bounded by both."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support.waiting import wait_until
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import Outgoing, Partition, Record
from tocsin.emitter.stop import datagrams, exit_points
from tocsin.emitter.stop.detail_requests import EVERY_MS, MAX_STEPS, DetailRequests
from tocsin.emitter.stop.listener import Listener, ThreadListener
from tocsin.emitter.stop.processes import Members
from tocsin.schemas.records.events import Data, Event
from tocsin.schemas.records.frames import RecordOrigin
from tocsin.schemas.records.stops.commands import DetailRequest
from tocsin.schemas.records.wire import meta_of
from tocsin.schemas.topics import Topics, issue_partition

NOW_MS = 1_795_258_012_000
PLACE = Partition(Topics().control, issue_partition("r1"))


def request(**changes: object) -> DetailRequest:
    fields: dict[str, object] = {
        "run_id": "r1",
        "incarnation": "i1",
        "rule": "loss_spike",
        "issue_id": "issue-1",
        "steps": 50,
        "not_after_ms": NOW_MS + 300_000,
    }
    return DetailRequest.model_validate(fields | changes)


def outgoing(asked: DetailRequest) -> Outgoing:
    event: Event[Data] = Event.wrap(asked, id=asked.issue_id, source="/rules", time_ms=NOW_MS)
    return Outgoing(PLACE, asked.key.encode(), event.encode(), meta_of(event).headers())


def record(asked: DetailRequest) -> Record:
    out = outgoing(asked)
    return Record(PLACE, 0, NOW_MS, out.key, out.value, out.headers)


@dataclass
class Node:
    """A rank that has said hello, as the launcher sees it, and a clock."""

    rank: datagrams.Endpoint
    detail_requests: DetailRequests
    clock: list[int] = field(default_factory=lambda: [NOW_MS])

    def heard(self) -> list[datagrams.Message]:
        return self.rank.drain()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    clock = [NOW_MS]
    members = Members("i0", lambda pid: pid == os.getpid())
    rank = datagrams.Endpoint(tmp_path / "rank.sock")
    hello: datagrams.Message = {
        "kind": "hello", "role": "trainer", "pid": os.getpid(), "rank": 0, "world_size": 1,
        "incarnation": "i1", "socket": str(rank.path),
    }  # fmt: skip
    members.receive(hello)
    yield Node(rank, DetailRequests("r1", members, now_ms=lambda: clock[0]), clock)
    rank.close()


def test_a_request_reaches_the_rank_with_its_reason(node: Node) -> None:
    assert node.detail_requests.apply(record(request())) == "look"
    assert node.heard() == [
        {"kind": "look_closer", "steps": 50, "reason": "issue issue-1 of loss_spike"}
    ]


def test_more_steps_than_the_limit_are_cut(node: Node) -> None:
    node.detail_requests.apply(record(request(steps=2**40)))
    assert [message["steps"] for message in node.heard()] == [MAX_STEPS]


def test_at_most_one_in_a_minute_is_handed_on(node: Node) -> None:
    taken = []
    for wait_ms, issue in ((0, "a"), (EVERY_MS - 1, "b"), (1, "b"), (EVERY_MS, "b")):
        node.clock[0] += wait_ms
        taken.append(node.detail_requests.apply(record(request(issue_id=issue))))
    assert taken == ["look", "too_soon", "look", "repeated"]
    assert len(node.heard()) == 2
    node.clock[0] -= 10 * EVERY_MS
    assert node.detail_requests.apply(record(request(issue_id="c"))) == "look"


def test_what_is_not_for_this_training_now_is_left_aside(node: Node) -> None:
    detail_requests, good = node.detail_requests, record(request())
    assert detail_requests.apply(record(request(incarnation="i0"))) == "other_incarnation"
    assert (
        detail_requests.apply(record(request(not_after_ms=NOW_MS - 1)), earlier=True) == "expired"
    )
    assert detail_requests.apply(record(request(run_id="r2"))) == "malformed"
    for value in (b"", b"{}", b"\xff", (good.value or b"").replace(b"look_closer", b"ended")):
        forged = Record(PLACE, 0, NOW_MS, good.key, value, good.headers)
        assert detail_requests.apply(forged) == "malformed"
    assert node.heard() == []
    assert sum(detail_requests.counts.values()) == 7


class _NoHandler:
    """A request to look closer needs none."""

    def __getattr__(self, name: str) -> object:
        raise AssertionError(name)


def test_the_listener_hands_only_that_key_of_its_run_on(node: Node) -> None:
    handler: object = _NoHandler()
    listener = Listener(Topics(), "r1", handler, detail_requests=node.detail_requests)  # type: ignore[arg-type]  # none
    good = record(request())
    for key in (b"r12/look_closer", b"r1/i1/look_closer", b"_all/look_closer", b"look_closer"):
        assert listener.apply(Record(PLACE, 0, NOW_MS, key, good.value, good.headers)) is None
    assert node.heard() == []
    assert listener.apply(good, earlier=True) is None
    assert len(node.heard()) == 1


def test_from_the_bus_to_the_training_of_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOCSIN_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TOCSIN_LAUNCHER", str(tmp_path / datagrams.LAUNCHER_SOCKET))
    topics, path = Topics(), tmp_path / "bus.db"
    origin = RecordOrigin(run_id="r1", incarnation="i1")
    asked: list[tuple[int, str]] = []
    told = threading.Event()

    async def publish(*records: Outgoing) -> None:
        async with EmbeddedBus(path) as bus:
            await bus.init(topics.specs())
            producer = await bus.producer()
            await producer.publish(records)
            await producer.close()

    def request_detail(steps: int, reason: str) -> None:
        asked.append((steps, reason))
        told.set()

    asyncio.run(publish())
    endpoint = datagrams.Endpoint(tmp_path / datagrams.LAUNCHER_SOCKET)
    listener = ThreadListener(
        lambda: EmbeddedBus(path), topics, origin, lambda data: None, endpoint
    )
    listener.start()
    try:
        exit_points.started(origin, lambda data: None, request_detail=request_detail)
        wait_until(lambda: listener.members.living("i1"))
        assert listener.listener.ready.wait(5)
        asyncio.run(publish(outgoing(request(not_after_ms=4 * NOW_MS))))
        assert told.wait(10)
    finally:
        exit_points.finished()
        listener.close()
    assert asked == [(50, "issue issue-1 of loss_spike")]
