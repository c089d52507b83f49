"""Attacks on the stop over a real bus: whoever can write the control topic stops nothing.

A listener as each node has it, one rank, and an attacker's records on the run's own partition. A
good command after each attack shows that the listener still hears.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from support.buses import World
from support.records.stops import StopSigner, outgoing
from support.waiting import until
from tocsin.bus.port import Bus
from tocsin.emitter.stop import datagrams
from tocsin.emitter.stop.listener import ThreadListener
from tocsin.emitter.stop.verification import SKEW_MS, SignedCommand
from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.schemas.records.events import Data
from tocsin.schemas.records.frames import RecordOrigin
from tocsin.schemas.records.stops.commands import StopExpired, StopRefused
from tocsin.schemas.topics import Topics

RUN, INCARNATION = "run-1", "i1"


@dataclass
class Attack:
    """What an attacker puts on the bus.

    Attributes:
        record: makes it, from the key that the run trusts, the attacker's own, and a good command
            that the attacker has read on the bus.
        answer: what the run answers; None: it is another run's, or the bytes of a command that was
            obeyed, which a sender may send twice.
        counted: how the listener counts it; None: it is left aside.
    """

    record: Callable[[StopSigner, StopSigner, SignedCommand], SignedCommand]
    answer: str | None
    counted: str | None


def altered_grace(seen: SignedCommand) -> SignedCommand:
    value = seen.value.replace(b'"grace_s":20.0', b'"grace_s":0.0')
    assert value != seen.value
    return replace(seen, value=value)


def long_ago(signer: StopSigner) -> SignedCommand:
    past_ms = unix_ms() - 2 * SKEW_MS
    return signer.sign(
        signer.command(RUN, INCARNATION, requested_ms=past_ms, not_after_ms=past_ms + 60_000)
    )


ATTACKS: Final = {
    "unsigned": Attack(
        lambda trusted, _, __: replace(
            trusted.sign(trusted.command(RUN, INCARNATION)), signature=None
        ),
        "bad_signature",
        "bad_signature",
    ),
    "wrong key": Attack(
        lambda _, own, __: own.sign(own.command(RUN, INCARNATION)),
        "untrusted_key",
        "untrusted_key",
    ),
    "expired": Attack(lambda trusted, _, __: long_ago(trusted), "expired", "expired"),
    "replayed": Attack(lambda _, __, seen: seen, None, "repeated"),
    "replayed under another key": Attack(
        lambda _, __, seen: replace(seen, key=f"{RUN}/i2/stop".encode()),
        "bad_signature",
        "bad_signature",
    ),
    "altered grace": Attack(
        lambda _, __, seen: altered_grace(seen), "bad_signature", "bad_signature"
    ),
    "other run": Attack(
        lambda trusted, _, __: trusted.sign(trusted.command("run-2", INCARNATION)), None, None
    ),
    "other run under this run's key": Attack(
        lambda trusted, _, __: moved(trusted, trusted.sign(trusted.command("run-2", INCARNATION))),
        "malformed",
        "malformed",
    ),
    "other incarnation": Attack(
        lambda trusted, _, __: trusted.sign(trusted.command(RUN, "i0")),
        "other_incarnation",
        "other_incarnation",
    ),
    "prefix of the name": Attack(
        lambda trusted, _, __: trusted.sign(trusted.command("run", INCARNATION)), None, None
    ),
    "name with this one as its prefix": Attack(
        lambda trusted, _, __: trusted.sign(trusted.command("run-1-retry", INCARNATION)),
        None,
        None,
    ),
}


def moved(signer: StopSigner, signed: SignedCommand) -> SignedCommand:
    """Signed once more, for another key of the topic."""
    key = f"{RUN}/{INCARNATION}/stop".encode()
    return SignedCommand(key, signed.value, signer.key.sign(key, signed.value))


@dataclass
class Node:
    """A listener with one rank, and what they were told and answered."""

    listener: ThreadListener
    rank: datagrams.Endpoint
    said: list[Data]

    def told(self) -> list[SignedCommand]:
        """The stops that the rank was handed since the last call."""
        handed = [SignedCommand.from_message(message) for message in self.rank.drain()]
        return [signed for signed in handed if signed is not None]

    @property
    def refusals(self) -> list[tuple[str, str]]:
        """Why, and of which command."""
        found = []
        for data in self.said:
            if isinstance(data, StopExpired):
                found.append(("expired", data.command_id))
            elif isinstance(data, StopRefused):
                found.append((data.why, data.command_id))
        return found


@contextmanager
def listening(world: World, topics: Topics, signer: StopSigner, folder: Path) -> Iterator[Node]:
    """The listener of a node, ready, with one rank that has said hello."""
    keys = folder / "keys"
    signer.key.write(keys / "actions.key")
    said: list[Data] = []
    listener = ThreadListener(
        world.bus,
        topics,
        RecordOrigin(run_id=RUN, incarnation=INCARNATION),
        said.append,
        datagrams.Endpoint(folder / datagrams.LAUNCHER_SOCKET),
        environ={"TOCSIN_STOP_KEYS": str(keys)},
    )
    rank = datagrams.Endpoint(folder / "rank.sock")
    hello: datagrams.Message = {
        "kind": "hello", "role": "trainer", "pid": os.getpid(), "rank": 0, "world_size": 1,
        "incarnation": INCARNATION, "socket": str(rank.path),
    }  # fmt: skip
    assert datagrams.send(listener.socket, hello)
    listener.start()
    try:
        assert listener.listener.ready.wait(30)
        yield Node(listener, rank, said)
    finally:
        listener.close()
        rank.close()


async def test_no_attack_stops_a_run_and_each_is_answered_and_counted(
    world: World, bus: Bus, tmp_path: Path
) -> None:
    topics, trusted, attacker = Topics(world.prefix), StopSigner(), StopSigner()
    await bus.init(topics.specs())
    producer = await bus.producer()

    async def publish(signed: SignedCommand) -> None:
        await producer.publish([outgoing(signed, RUN, topics)])

    with listening(world, topics, trusted, tmp_path) as node:
        counts = node.listener.listener.counts
        # The attacker has read a good command; it comes last, and stops the run once.
        good = trusted.sign(trusted.command(RUN, INCARNATION))
        expected: list[str] = []
        for name, attack in ATTACKS.items():
            if name != "replayed":
                await publish(attack.record(trusted, attacker, good))
                expected += [attack.answer] if attack.answer is not None else []
        await publish(good)
        told: list[SignedCommand] = []
        while not told:
            told += node.told()
            await asyncio.sleep(0.01)
        assert [why for why, _ in node.refusals] == expected
        assert all(command for _, command in node.refusals), "each names the command it answers"
        assert told == [good], "the rank has heard of the good command alone"
        await publish(ATTACKS["replayed"].record(trusted, attacker, good))
        await until(lambda: counts["repeated"] == 1)
        assert node.told() == []
    wanted = Counter(attack.counted for attack in ATTACKS.values() if attack.counted is not None)
    assert counts == wanted + Counter(obey=1)
    await producer.close()
