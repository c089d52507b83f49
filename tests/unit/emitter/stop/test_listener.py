"""Attacks on the stop, and what the listener does with good commands."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import pytest

from support.records.stops import StopSigner, outgoing
from support.waiting import until
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import BusUnavailable, Reader, Record
from tocsin.emitter.stop import datagrams, listener
from tocsin.emitter.stop.listener import ANSWERED, Listener, ThreadListener
from tocsin.emitter.stop.verification import (
    SKEW_MS,
    UNKNOWN_MS,
    CommandVerdict,
    Facts,
    Memory,
    SignedCommand,
    decide,
    read_keys,
    trusted_paths,
)
from tocsin.schemas.records.events import Data
from tocsin.schemas.records.frames import RecordOrigin
from tocsin.schemas.records.stops.commands import StopAcknowledged, StopRefused, StopRequested
from tocsin.schemas.signing import SigningKey, TrustedKeys
from tocsin.schemas.topics import Topics

NOW_MS = time.time_ns() // 1_000_000


@pytest.fixture
def signer() -> StopSigner:
    return StopSigner()


def facts_of(signer: StopSigner, **changes: object) -> Facts:
    facts = Facts("r1", "i1", TrustedKeys([signer.key.public]))
    return replace(facts, **changes)  # type: ignore[arg-type]  # a test's shorthand


def reason_of(signed: SignedCommand, facts: Facts, memory: Memory | None = None) -> str:
    return decide(signed, facts, memory or Memory(), NOW_MS).reason


def test_a_good_command_is_obeyed(signer: StopSigner) -> None:
    verdict = decide(signer.sign(signer.command("r1", "i1")), facts_of(signer), Memory(), NOW_MS)
    assert verdict.reason == "obey"
    assert verdict.why is None
    assert verdict.command is not None
    assert verdict.command.run_id == "r1"


def test_unsigned_and_forged_commands_are_refused(signer: StopSigner) -> None:
    facts, stranger = facts_of(signer), StopSigner()
    command = signer.command("r1", "i1")
    good = signer.sign(command)
    assert reason_of(replace(good, signature=None), facts) == "bad_signature"
    assert reason_of(stranger.sign(command), facts) == "untrusted_key"
    assert reason_of(good, replace(facts, keys=TrustedKeys([]))) == "untrusted_key"
    altered = good.value.replace(b'"grace_s":20.0', b'"grace_s":0.0')
    assert altered != good.value
    assert reason_of(replace(good, value=altered), facts) == "bad_signature"
    assert reason_of(replace(good, key=b"r1/i2/stop"), facts) == "bad_signature"


def test_a_refusal_names_the_claimed_command(signer: StopSigner) -> None:
    command = signer.command("r1", "i1")
    verdict = decide(StopSigner().sign(command), facts_of(signer), Memory(), NOW_MS)
    assert verdict.command_id == command.command_id
    assert verdict.command is None


def test_commands_for_others_are_refused(signer: StopSigner) -> None:
    facts = facts_of(signer)
    assert reason_of(signer.sign(signer.command("r2", "i1")), facts) == "other_run"
    assert reason_of(signer.sign(signer.command("r1-retry", "i1")), facts) == "other_run"
    assert reason_of(signer.sign(signer.command("r1", "i0")), facts) == "other_incarnation"


def test_a_signed_command_under_another_key_is_malformed(signer: StopSigner) -> None:
    command = signer.command("r1", "i1")
    value = signer.sign(command).value
    moved = SignedCommand(b"r1/i2/stop", value, signer.key.sign(b"r1/i2/stop", value))
    assert reason_of(moved, facts_of(signer)) == "malformed"
    rubbish = SignedCommand(b"r1/i1/stop", b"{}", signer.key.sign(b"r1/i1/stop", b"{}"))
    assert reason_of(rubbish, facts_of(signer)) == "malformed"


MINUTE_MS = 60_000


@pytest.mark.parametrize(
    ("ahead_ms", "waited_ms", "reason"),
    [
        (0, 0, "obey"),
        (15 * MINUTE_MS, 0, "obey"),
        (15 * MINUTE_MS, MINUTE_MS, "obey"),
        (-15 * MINUTE_MS, 0, "obey"),
        (SKEW_MS, MINUTE_MS, "obey"),
        # It lay there for longer than it was meant for, as far as anybody knows.
        (15 * MINUTE_MS, MINUTE_MS + 1, "expired"),
        (MINUTE_MS + 1, UNKNOWN_MS, "expired"),
        (MINUTE_MS, UNKNOWN_MS, "obey"),
        (10 * 365 * SKEW_MS, 0, "expired"),
    ],
)
def test_a_command_is_in_time_by_what_it_waited_and_not_by_two_clocks(
    signer: StopSigner, ahead_ms: int, waited_ms: int, reason: str
) -> None:
    command = signer.command("r1", "i1", requested_ms=NOW_MS, not_after_ms=NOW_MS + MINUTE_MS)
    verdict = decide(
        signer.sign(command), facts_of(signer), Memory(), NOW_MS + ahead_ms, waited_ms=waited_ms
    )
    assert verdict.reason == reason
    if reason == "expired":
        assert "the clock here says" in verdict.text
        assert verdict.text.count("UTC") == 2


def test_stops_that_are_off_are_refused(signer: StopSigner) -> None:
    signed = signer.sign(signer.command("r1", "i1"))
    assert reason_of(signed, facts_of(signer, stops_off="off")) == "stops_off"


def test_a_replay_has_no_effect(signer: StopSigner) -> None:
    command = signer.command("r1", "i1")
    signed, memory = signer.sign(command), Memory()
    memory.note(signed, command)
    memory.obey(command)
    assert reason_of(signed, facts_of(signer), memory) == "repeated"
    reused = signer.sign(signer.command("r1", "i1", nonce=command.nonce))
    assert reason_of(reused, facts_of(signer), memory) == "replayed"
    another = signer.sign(signer.command("r1", "i1"))
    assert reason_of(another, facts_of(signer), memory) == "already_stopping"


def test_what_has_ended_is_not_stopped(signer: StopSigner) -> None:
    signed = signer.sign(signer.command("r1", "i1"))
    verdict = decide(signed, facts_of(signer, over="it ended"), Memory(), NOW_MS)
    assert (verdict.reason, verdict.text) == ("already_ended", "it ended")


def test_the_memory_of_nonces_is_bounded(signer: StopSigner) -> None:
    memory = Memory()
    for _ in range(1_100):
        command = signer.command("r1", "i1")
        memory.note(SignedCommand(b"", b"", None), command)
    assert len(memory.nonces) == 1_000


def test_a_command_survives_the_datagram(signer: StopSigner) -> None:
    signed = signer.sign(signer.command("r1", "i1"))
    raw = datagrams.decode(datagrams.encode(signed.message()))
    assert raw is not None
    assert SignedCommand.from_message(raw) == signed
    assert SignedCommand.from_message({"kind": "stop", "key": "not base64!"}) is None


def test_keys_come_from_the_environment_then_the_plan_then_the_home(tmp_path: Path) -> None:
    environ = {"TOCSIN_STOP_KEYS": "/a:/b", "XDG_CONFIG_HOME": "/c"}
    assert trusted_paths(environ, (Path("/d"),)) == [Path("/a"), Path("/b")]
    assert trusted_paths({}, (Path("/d"),)) == [Path("/d")]
    assert trusted_paths({"XDG_CONFIG_HOME": "/c"}) == [Path("/c/tocsin/keys")]


def test_a_broken_key_file_does_not_hide_the_good_ones(tmp_path: Path) -> None:
    key = SigningKey.generate()
    key.write(tmp_path / "good.key")
    (tmp_path / "broken.pub").write_text("no key")
    keys = read_keys([tmp_path, tmp_path / "absent"])
    assert len(keys) == 1
    assert keys.trusts(key.public.key_id)


@dataclass
class RecordingHandler:
    """Writes down what it is told to do."""

    current: Facts
    done: list[tuple[str, str]] = field(default_factory=list)

    def facts(self) -> Facts:
        return self.current

    def obey(self, signed: SignedCommand, command: StopRequested) -> None:
        self.done.append(("obey", command.command_id))

    def join(self, command: StopRequested) -> None:
        self.done.append(("join", command.command_id))

    def missed(self, command: StopRequested, why: str) -> None:
        self.done.append(("missed", why))

    def refuse(self, verdict: CommandVerdict) -> None:
        self.done.append(("refuse", str(verdict.why)))


@pytest.fixture
def handler(signer: StopSigner) -> RecordingHandler:
    return RecordingHandler(facts_of(signer))


def record(signed: SignedCommand, run_id: str = "r1") -> Record:
    out = outgoing(signed, run_id)
    return Record(out.partition, 0, NOW_MS, out.key, out.value, out.headers)


def test_a_command_that_came_while_the_bus_was_away_has_expired(
    signer: StopSigner, handler: RecordingHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader could not read for ten minutes; the command was good for one."""
    monotonic = [0.0]
    monkeypatch.setattr("tocsin.emitter.stop.listener.time.monotonic", lambda: monotonic[0])
    sent = signer.command("r1", "i1", requested_ms=NOW_MS, not_after_ms=NOW_MS + MINUTE_MS)
    signed = signer.sign(sent)
    delayed = Listener(Topics(), "r1", handler, now_ms=lambda: NOW_MS + 10 * MINUTE_MS)

    class Away:
        async def poll(self, *, timeout_s: float) -> list[Record]:
            monotonic[0] += 300.0
            if monotonic[0] < 900.0:
                raise BusUnavailable("away")
            if monotonic[0] > 900.0:
                raise asyncio.CancelledError
            return [record(signed)]

    monkeypatch.setattr(listener, "_PAUSE_S", 0.0)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(delayed._read(cast(Reader, Away()), 0))
    assert delayed.counts == Counter(expired=1)


def test_one_effect_per_incarnation(signer: StopSigner, handler: RecordingHandler) -> None:
    listener = Listener(Topics(), "r1", handler)
    first = signer.command("r1", "i1")
    second = signer.command("r1", "i1")
    for signed in (signer.sign(first), signer.sign(first), signer.sign(second)):
        listener.apply(record(signed))
    assert handler.done == [("obey", first.command_id), ("join", second.command_id)]
    handler.current = replace(handler.current, incarnation="i2")
    third = signer.command("r1", "i2")
    listener.apply(record(signer.sign(third)))
    listener.apply(record(signer.sign(signer.command("r1", "i1"))))
    assert handler.done[2:] == [("obey", third.command_id), ("refuse", "other_incarnation")]


def test_records_that_are_no_command_to_this_run_are_left_aside(
    signer: StopSigner, handler: RecordingHandler
) -> None:
    listener = Listener(Topics(), "r1", handler)
    other = record(signer.sign(signer.command("r12", "i1")))
    tombstone = replace(record(signer.sign(signer.command("r1", "i1"))), value=None)
    approval = replace(other, key=b"r1/i1/approval")
    for each in (other, tombstone, approval):
        assert listener.apply(each) is None
    assert handler.done == []


def test_answers_to_attacks_are_bounded_and_all_are_counted(
    signer: StopSigner, handler: RecordingHandler
) -> None:
    listener, attacker = Listener(Topics(), "r1", handler), StopSigner()
    for _ in range(ANSWERED + 50):
        listener.apply(record(attacker.sign(signer.command("r1", "i1"))))
    assert len(handler.done) == ANSWERED
    assert listener.counts == Counter(untrusted_key=ANSWERED + 50)
    good = signer.command("r1", "i1")
    listener.apply(record(signer.sign(good)))
    assert handler.done[-1] == ("obey", good.command_id)


async def test_a_predecessors_commands_are_not_answered_again(
    tmp_path: Path, signer: StopSigner, handler: RecordingHandler
) -> None:
    topics = Topics()
    async with EmbeddedBus(tmp_path / "bus.db") as bus:
        await bus.init(topics.specs())
        producer = await bus.producer()
        await producer.publish([outgoing(signer.sign(signer.command("r1", "i0")), "r1")])
        listener = Listener(topics, "r1", handler)
        task = asyncio.create_task(listener.listen(bus))
        await until(listener.ready.is_set)
        late = signer.command("r1", "i0")
        good = signer.command("r1", "i1")
        await producer.publish([outgoing(signer.sign(each), "r1") for each in (late, good)])
        await until(lambda: len(handler.done) == 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await producer.close()
    assert handler.done == [("refuse", "other_incarnation"), ("obey", good.command_id)]
    assert listener.counts["other_incarnation"] == 2


def test_the_listener_in_a_thread_hands_the_signed_bytes_to_the_ranks(
    tmp_path: Path, signer: StopSigner
) -> None:
    topics, path = Topics(), tmp_path / "bus.db"
    keys = tmp_path / "keys"
    signer.key.write(keys / "actions.key")
    said: list[Data] = []
    obeyed, left = threading.Event(), threading.Event()
    listener = ThreadListener(
        lambda: EmbeddedBus(path),
        topics,
        RecordOrigin(run_id="r1", incarnation="i1"),
        said.append,
        datagrams.Endpoint(tmp_path / datagrams.LAUNCHER_SOCKET),
        environ={"TOCSIN_STOP_KEYS": str(keys)},
        on_obeyed=lambda _trainer, _command: obeyed.set(),
        on_left=lambda pid: left.set() if pid == os.getpid() else None,
    )
    rank = datagrams.Endpoint(tmp_path / "rank.sock")
    hello: datagrams.Message = {
        "kind": "hello", "role": "trainer", "pid": os.getpid(), "rank": 0, "world_size": 1,
        "incarnation": "i1", "socket": str(rank.path),
    }  # fmt: skip
    assert datagrams.send(listener.socket, hello)
    signed = signer.sign(signer.command("r1", "i1"))
    second = signer.command("r1", "i1")
    forged = StopSigner().sign(signer.command("r1", "i1"))

    sent = (forged, signed, signer.sign(second))

    async def publish() -> None:
        async with EmbeddedBus(path) as bus:
            await bus.init(topics.specs())
            producer = await bus.producer()
            await producer.publish([outgoing(each, "r1") for each in sent])
            await producer.close()

    async def initialise() -> None:
        async with EmbeddedBus(path) as bus:
            await bus.init(topics.specs())

    asyncio.run(initialise())
    listener.start()
    assert listener.listener.ready.wait(5)
    asyncio.run(publish())
    assert obeyed.wait(5)
    message = rank.receive()
    assert message is not None
    assert SignedCommand.from_message(message) == signed
    assert datagrams.send(listener.socket, {"kind": "left", "pid": os.getpid(), "step": 3})
    assert left.wait(5)
    listener.close()
    rank.close()
    assert [data.why for data in said if isinstance(data, StopRefused)] == ["untrusted_key"]
    joined = [data.command_id for data in said if isinstance(data, StopAcknowledged)]
    assert joined == [second.command_id]
    assert not listener.socket.exists()


def test_without_a_launcher_its_stand_in_answers_who_asks_to_leave(
    tmp_path: Path, signer: StopSigner
) -> None:
    signer.key.write(tmp_path / "keys" / "actions.key")
    environ = {
        "TOCSIN_STOP_KEYS": str(tmp_path / "keys"),
        "TOCSIN_BEFORE_UPDATE": "skip",
    }
    rank = datagrams.Endpoint(tmp_path / "rank.sock")
    who: datagrams.Message = {"pid": os.getpid(), "rank": 0, "incarnation": "i1"}

    def answers(**more: str) -> bool:
        here = ThreadListener(
            lambda: EmbeddedBus(tmp_path / "bus.db"),
            Topics(),
            RecordOrigin(run_id="r1", incarnation="i1"),
            lambda data: None,
            datagrams.Endpoint(tmp_path / "launcher.sock"),
            environ={**environ, **more},
        )
        here.listener.ready.set()
        hello = {**who, "kind": "hello", "role": "trainer", "socket": str(rank.path)}
        for message in (hello, {**who, "kind": "may_leave", "step": 4}):
            datagrams.send(here.socket, message)
        here._hellos()
        here.close()
        (answer,) = rank.drain()
        assert answer["kind"] == "may_leave"
        return answer["on"] is True

    assert answers()
    assert not answers(TOCSIN_BEFORE_UPDATE="")
    assert not answers(TOCSIN_STOP="off")
    assert not answers(TOCSIN_STOP_KEYS=str(tmp_path / "none"))
    rank.close()
