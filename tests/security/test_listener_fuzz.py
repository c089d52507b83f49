"""Whatever somebody writes to a listener, the next good stop is obeyed.

Records under `RUN/…/stop` need no signature to be read, and datagrams come from any process of the
user. Each listener is attacked with its real hands: those of the launcher, of `start()`, of a rank.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from support.processes.launches import start
from support.records.stops import StopSigner, event_of, outgoing
from support.waiting import until, wait_until
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import Bus, Outgoing, Partition, Record
from tocsin.console.services.helper import Orders
from tocsin.emitter.launch.enforcer import Enforcer, StopOrder
from tocsin.emitter.launch.escalation import Stopper
from tocsin.emitter.launch.job import Job
from tocsin.emitter.process.process_group import process_lives
from tocsin.emitter.stop import datagrams
from tocsin.emitter.stop.detail_requests import DetailRequests
from tocsin.emitter.stop.listener import Listener, ThreadListener
from tocsin.emitter.stop.processes import Members
from tocsin.emitter.stop.rank_stop import Rank
from tocsin.emitter.stop.verification import SignedCommand
from tocsin.schemas.records.events import Data
from tocsin.schemas.records.frames import RecordOrigin
from tocsin.schemas.records.stops.commands import StopAcknowledged
from tocsin.schemas.topics import Topics, issue_partition

SIGNER = StopSigner()
CONTROL = Partition(Topics().control, issue_partition("r1"))


def hello(**changes: str | int) -> datagrams.Message:
    """Of this process, as it is when a test runs."""
    said: datagrams.Message = {
        "kind": "hello", "role": "trainer", "pid": os.getpid(), "rank": 0, "incarnation": "i1",
        "socket": "/nowhere",
    }  # fmt: skip
    return {**said, **changes}


quick = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def good(run_id: str = "r1", **changes: object) -> SignedCommand:
    return SIGNER.sign(SIGNER.command(run_id, "i1", **changes))


def claims() -> st.SearchStrategy[bytes]:
    """Values that look like a command, with fields of any kind."""
    event = json.loads(event_of(SIGNER.command("r1", "i1")).encode())
    leaf = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30)
    nested = st.recursive(
        leaf,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner),
        max_leaves=5,
    )
    fields = st.sampled_from(sorted(event["data"]))

    def build(changes: Mapping[str, object], beside: Mapping[str, object]) -> bytes:
        changed = {**event, **beside, "data": {**event["data"], **changes}}
        return json.dumps(changed).encode("utf-8", "surrogatepass")

    return st.builds(
        build,
        st.dictionaries(fields, nested, max_size=3),
        st.dictionaries(st.sampled_from(sorted(event)), nested, max_size=1),
    )


VALUES = (
    claims()
    | st.binary(max_size=200)
    | st.none()
    | st.just(b"9" * 20_000)
    | st.sampled_from(
        [
            b"",
            b"{}",
            b"[]",
            b"null",
            b'"x"',
            b"\x00",
            b"\xff" * 70_000,
            b"[" * 50_000,
            b"{" * 50_000,
        ]
    )
)
KEYS = st.sampled_from([b"r1/i1/stop", b"r1/stop", b"r1//stop", b"r1/look_closer", b"r1/\xff/stop"])
SIGNATURES = st.sampled_from(
    [(b"", b""), (b"\xff", b"\x00"), (SIGNER.key.public.key_id.encode(), b"A" * 86 + b"==")]
)


@st.composite
def attacks(draw: st.DrawFn) -> Outgoing:
    key_id, signature = draw(SIGNATURES)
    headers = (("tocsin-key-id", key_id), ("tocsin-signature", signature))
    return Outgoing(CONTROL, draw(KEYS), draw(VALUES), headers)


def empty_id() -> bytes:
    """A command that is named "": a refusal of it would name nothing either."""
    event = json.loads(event_of(SIGNER.command("r1", "i1")).encode())
    event["data"]["command_id"] = ""
    return json.dumps(event).encode()


class Given:
    """A bus on which these records are, and one more, which is a person's good stop."""

    url = "embedded:made"

    def __init__(self, records: Sequence[Outgoing]) -> None:
        good_stop = outgoing(good(), "r1")
        self.records = tuple(
            Record(CONTROL, n, 1, each.key, each.value, each.headers)
            for n, each in enumerate([*records, good_stop])
        )
        self.given = False

    async def __aenter__(self) -> Given:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def reader(self, start: object) -> Given:
        return self

    async def ends(self, partitions: object) -> dict[Partition, int]:
        return {CONTROL: 0}

    async def poll(self, *, timeout_s: float) -> Sequence[Record]:
        if self.given:
            await asyncio.sleep(timeout_s)
        self.given = True
        return self.records

    async def close(self) -> None:
        pass


@asynccontextmanager
async def listening(listener: Listener, bus: Given) -> AsyncIterator[None]:
    task = asyncio.create_task(listener.keep_listening(cast(Bus, bus)))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def keys_in(folder: Path) -> Path:
    keys = folder / "keys"
    if not keys.exists():
        SIGNER.key.write(keys / "actions.key")
    return keys


@quick
@given(st.lists(attacks(), max_size=8))
@example([Outgoing(CONTROL, b"r1/i1/stop", None, ())])
@example([Outgoing(CONTROL, b"r1/i1/stop", b"{}", ())])
@example([Outgoing(CONTROL, b"r1/x/stop", empty_id(), ())])
def test_the_launcher(tmp_path: Path, records: list[Outgoing]) -> None:
    keys = keys_in(tmp_path)

    async def main() -> None:
        job = SimpleNamespace(returncode=None, exit_code=None, terminate=lambda *a, **k: None)
        members = Members("i1", process_lives)
        said: list[Data] = []
        stopper = Stopper(
            "r1", members, lambda: cast(Job, job), said.append, key_paths=[keys], stops_off=False
        )
        looks = DetailRequests("r1", members)
        listener = Listener(Topics(), "r1", stopper, detail_requests=looks)
        async with listening(listener, Given(records)):
            await until(lambda: stopper.stopped)
        assert any(isinstance(each, StopAcknowledged) for each in said)
        await stopper.close()

    asyncio.run(main())


@settings(quick, max_examples=15)
@given(st.lists(attacks(), max_size=8))
def test_start(tmp_path: Path, records: list[Outgoing]) -> None:
    obeyed = threading.Event()
    listener = ThreadListener(
        lambda: cast(Bus, Given(records)),
        Topics(),
        RecordOrigin(run_id="r1", incarnation="i1"),
        lambda data: data.model_dump_json(),
        datagrams.Endpoint(tmp_path / datagrams.LAUNCHER_SOCKET),
        environ={"TOCSIN_STOP_KEYS": str(keys_in(tmp_path))},
        on_obeyed=lambda trainer, command: obeyed.set(),
    )
    listener.members.receive(hello())
    listener.start()
    try:
        assert obeyed.wait(20)
    finally:
        listener.close()


def any_datagrams() -> st.SearchStrategy[bytes]:
    leaf = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40)
    coded = st.binary(max_size=50).map(lambda raw: base64.b64encode(raw).decode())
    names = st.sampled_from(
        [
            "key",
            "value",
            "key_id",
            "signature",
            "pid",
            "rank",
            "incarnation",
            "steps",
            "socket",
            "world_size",
            "training",
            "restart_count",
            "step",
            "role",
        ]
    )
    kinds = st.sampled_from(
        ["stop", "look_closer", "hello", "left", "finished", "restart_blocked", "x"]
    )
    messages = st.builds(
        lambda kind, fields: json.dumps({"kind": kind, **fields}).encode(),
        kinds,
        st.dictionaries(names, leaf | coded | st.sampled_from(["trainer", "agent"]), max_size=6),
    )
    return messages | st.binary(max_size=200)


def test_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOCSIN_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TOCSIN_STOP_KEYS", str(keys_in(tmp_path)))
    monkeypatch.delenv("TOCSIN_STOP", raising=False)
    said: list[Data] = []
    looks: list[int] = []
    rank = Rank(
        RecordOrigin(run_id="r1", incarnation="i1"), said.append,
        request_detail=lambda steps, reason: looks.append(steps),
    )  # fmt: skip
    path = rank.socket
    assert path is not None

    @quick
    @given(any_datagrams())
    @example(json.dumps({"kind": "stop", "key": "é", "value": "ü"}).encode())
    @example(json.dumps({"kind": "stop", "value": "\ud800"}).encode())
    def attack(raw: bytes) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(raw, str(path))

    attack()
    unsigned = SignedCommand(b"r1/i1/stop", empty_id(), None)
    assert datagrams.send(path, unsigned.message())
    assert datagrams.send(path, good().message())
    wait_until(lambda: any(isinstance(each, StopAcknowledged) for each in said))
    rank.close()


@quick
@given(st.lists(any_datagrams(), max_size=10))
@example([json.dumps(hello(pid=-1)).encode()])
@example([json.dumps(hello(pid=2**80, incarnation="é")).encode()])
def test_who_belongs_to_the_job(raw: list[bytes]) -> None:
    members = Members("i1", process_lives)
    for message in map(datagrams.decode, raw):
        if message is not None:
            members.receive(message)
            RecordOrigin(run_id="r1", incarnation=members.incarnation)
            assert members.living(members.incarnation) is not None
            assert members.training_over() in (True, False)
            assert members.steps() >= 0
    assert members.receive(hello())
    assert [trainer.pid for trainer in members.living("i1")][-1:] == [os.getpid()]


@quick
@given(
    st.lists(
        st.binary(max_size=60)
        | st.builds(
            lambda word, value: f"{word} {value}".encode("utf-8", "replace"),
            st.sampled_from(["job", "drain", "stop", "left"]),
            st.text(max_size=30) | st.integers().map(str) | st.floats().map(str),
        ),
        max_size=10,
    )
)
@example([b"left -1", b"left 99999999999999999999", b"drain nan", b"job 0"])
def test_the_helpers_orders(lines: list[bytes]) -> None:
    async def main() -> None:
        orders = Orders()
        for line in lines:
            orders.apply(line)
        assert orders.drain_s is None or 0 <= orders.drain_s < float("inf")
        own = StopOrder(pid=os.getpid(), rank=0, incarnation="i1", command_id="c", grace_s=60.0)
        orders.apply(f"stop {own.model_dump_json()}".encode())
        enforcer = Enforcer("r1", lambda data: None)
        for order in orders.stops:
            if isinstance(order, StopOrder):
                enforcer.obey(order)
            elif order.what == "left":
                enforcer.left(order.pid)
            else:
                enforcer.saving(order.pid, on=order.what == "saving")
        assert len(enforcer.under_way) == 1
        await enforcer.close()

    asyncio.run(main())


def test_an_order_that_never_ends_is_passed_over() -> None:
    reading, writing = os.pipe()

    async def main() -> None:
        orders = Orders()
        with os.fdopen(reading) as stdin, pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.stdin", stdin)
            task = asyncio.create_task(orders.listen())
            with os.fdopen(writing, "wb", buffering=0) as out:
                await asyncio.to_thread(out.write, b"stop " + b"x" * 200_000 + b"\n")
                await asyncio.to_thread(out.write, b"drain 3\n")
            await task
            assert (orders.drain_s, orders.gone) == (3.0, True)

    asyncio.run(main())


@pytest.mark.timeout(120)
def test_a_launched_job_is_stopped_after_bad_records(tmp_path: Path) -> None:
    job = start(tmp_path, "sleep", "100", signer=SIGNER)
    run_id, incarnation = "r1", job.incarnation()
    launcher = psutil.Process(job.process.pid)
    # The start is on the bus a moment before the job is there; a stop in between is refused.
    wait_until(lambda: any(each.name() == "sleep" for each in launcher.children()))
    bad = [
        (f"{run_id}/x/stop".encode(), empty_id(), ()),
        (f"{run_id}/x/stop".encode(), b"\xff\x00", ()),
        (f"{run_id}/{incarnation}/stop".encode(), b"{}", (("tocsin-key-id", b"\xff"),)),
    ]
    command = SIGNER.command(run_id, incarnation, grace_s=0.1)

    async def publish() -> None:
        async with EmbeddedBus(tmp_path / "bus.db") as bus:
            producer = await bus.producer()
            records = [Outgoing(CONTROL, key, value, headers) for key, value, headers in bad]
            await producer.publish([*records, outgoing(SIGNER.sign(command), run_id)])
            await producer.close()

    asyncio.run(publish())
    assert job.wait() == 79, job.err
