"""Consumer groups of an embedded bus: who is a member, who owns which partition, who may commit.

The table `claims` decides: a partition is read and committed by the member that has it there. The
share-out follows from the set of members alone, so all compute the same one; a member first gives
back what it owns no longer, then the other takes it. So no partition ever has two owners, and those
that stay are not disturbed. `groups.generation` grows with each change of the set.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tocsin.bus.embedded import leases
from tocsin.bus.embedded.tables import TopicCatalogue, transaction
from tocsin.bus.port import FencedMember, Partition

_FENCED: Final = (
    "the group gave this partition to another member: discard the state, then poll again to rejoin "
    "the group"
)


def share_out(
    members: Mapping[str, Sequence[str]], topics: Mapping[str, int]
) -> dict[str, frozenset[Partition]]:
    """Which partitions each member should own.

    `members` maps a member to the topics it reads, `topics` a topic to its partition count.
    Partition n of a topic goes to the n-th of its readers in the order of their names, counted
    round: partitions of the same number in topics of the same readers stay together.
    """
    shares: dict[str, set[Partition]] = {member: set() for member in members}
    for topic, partitions in topics.items():
        readers = sorted(member for member, wanted in members.items() if topic in wanted)
        for number in range(partitions if readers else 0):
            shares[readers[number % len(readers)]].add(Partition(topic, number))
    return {member: frozenset(share) for member, share in shares.items()}


def join(
    db: sqlite3.Connection, group: str, member: str, topics: Sequence[str], now_ms: int
) -> None:
    """Become a member, or one again. What the dead have is free for the first share-out."""
    with transaction(db, write=True):
        _end_dead(db, group, now_ms)
        db.execute(
            "INSERT OR REPLACE INTO members (team, member, topics, process, expires_ms)"
            " VALUES (?, ?, ?, ?, ?)",
            (
                group,
                member,
                json.dumps(list(topics)),
                leases.this_process(),
                now_ms + leases.TTL_MS,
            ),
        )
        _next_generation(db, group)


def leave(db: sqlite3.Connection, group: str, member: str) -> None:
    """End the membership; its partitions are free."""
    with transaction(db, write=True):
        _remove(db, group, member)
        _next_generation(db, group)


def renew(db: sqlite3.Connection, group: str, member: str, now_ms: int) -> bool:
    """Keep the membership, and end that of the dead. Whether the group changed. In the caller's
    transaction.
    """
    db.execute(
        "UPDATE members SET expires_ms = ? WHERE team = ? AND member = ?",
        (now_ms + leases.TTL_MS, group, member),
    )
    ended = _end_dead(db, group, now_ms)
    if ended:
        _next_generation(db, group)
    return ended


def _end_dead(db: sqlite3.Connection, group: str, now_ms: int) -> bool:
    dead = [
        name
        for name, process, expires_ms in db.execute(
            "SELECT member, process, expires_ms FROM members WHERE team = ?", (group,)
        ).fetchall()
        if not leases.is_live(process, expires_ms, now_ms)
    ]
    for name in dead:
        _remove(db, group, name)
    return bool(dead)


def generation(db: sqlite3.Connection, group: str) -> int:
    """Grows with each change of the members; 0 for a group that never had one."""
    row = db.execute("SELECT generation FROM groups WHERE name = ?", (group,)).fetchone()
    return 0 if row is None else int(row[0])


@dataclass(frozen=True, slots=True)
class Standing:
    """A member's place in its group. `owned` is what it has, `share` what it should have.

    `complete` is False while a topic that it reads does not exist yet.
    """

    generation: int
    member: bool
    complete: bool
    owned: frozenset[Partition]
    share: frozenset[Partition]


def standing(
    db: sqlite3.Connection,
    catalogue: TopicCatalogue,
    group: str,
    member: str,
    topics: Sequence[str],
) -> Standing:
    """Where the member stands now."""
    with transaction(db, write=False):
        members: dict[str, list[str]] = {
            name: json.loads(wanted)
            for name, wanted in db.execute(
                "SELECT member, topics FROM members WHERE team = ?", (group,)
            )
        }
        known = catalogue.known(db, topics)
        owned = {
            number
            for (number,) in db.execute(
                "SELECT partition FROM claims WHERE team = ? AND member = ?", (group, member)
            )
        }
        now = generation(db, group)
    shares = share_out(members, {name: spec.partitions for name, spec in known.items()})
    return Standing(
        now,
        member in members,
        len(known) == len(set(topics)),
        frozenset(catalogue.names[number] for number in owned),
        shares.get(member, frozenset()),
    )


def claim(
    db: sqlite3.Connection,
    catalogue: TopicCatalogue,
    group: str,
    member: str,
    partitions: frozenset[Partition],
) -> frozenset[Partition]:
    """Take those of the partitions that are free; which ones."""
    taken = set()
    with transaction(db, write=True):
        row = db.execute(
            "SELECT 1 FROM members WHERE team = ? AND member = ?", (group, member)
        ).fetchone()
        if row is None:
            return frozenset()
        for partition in sorted(partitions):
            inserted = db.execute(
                "INSERT OR IGNORE INTO claims (team, partition, member) VALUES (?, ?, ?)",
                (group, catalogue.id(db, partition), member),
            )
            if inserted.rowcount == 1:
                taken.add(partition)
    return frozenset(taken)


def give_up(
    db: sqlite3.Connection,
    catalogue: TopicCatalogue,
    group: str,
    member: str,
    partitions: frozenset[Partition],
) -> None:
    """Give these back to the group."""
    with transaction(db, write=True):
        db.executemany(
            "DELETE FROM claims WHERE team = ? AND partition = ? AND member = ?",
            [(group, catalogue.id(db, partition), member) for partition in partitions],
        )


def commit(
    db: sqlite3.Connection,
    catalogue: TopicCatalogue,
    group: str,
    offsets: Mapping[Partition, int],
    *,
    member: str | None,
) -> None:
    """Store the offsets, all or none. `member` None is a reader without membership, which nobody
    fences.

    Raises:
        FencedMember: a partition is not this member's.
    """
    with transaction(db, write=True):
        rows = [
            (group, catalogue.id(db, partition), offset) for partition, offset in offsets.items()
        ]
        if member is not None:
            for _, number, _ in rows:
                owner = db.execute(
                    "SELECT member FROM claims WHERE team = ? AND partition = ?", (group, number)
                ).fetchone()
                if owner is None or owner[0] != member:
                    raise FencedMember(_FENCED)
        db.executemany(
            "INSERT INTO offsets (team, partition, next_offset) VALUES (?, ?, ?)"
            " ON CONFLICT (team, partition) DO UPDATE SET next_offset = excluded.next_offset",
            rows,
        )


def committed(
    db: sqlite3.Connection, catalogue: TopicCatalogue, group: str, partition: Partition
) -> int | None:
    """What was stored last."""
    row = db.execute(
        "SELECT next_offset FROM offsets WHERE team = ? AND partition = ?",
        (group, catalogue.id(db, partition)),
    ).fetchone()
    return None if row is None else int(row[0])


def _remove(db: sqlite3.Connection, group: str, member: str) -> None:
    db.execute("DELETE FROM members WHERE team = ? AND member = ?", (group, member))
    db.execute("DELETE FROM claims WHERE team = ? AND member = ?", (group, member))


def _next_generation(db: sqlite3.Connection, group: str) -> None:
    db.execute(
        "INSERT INTO groups (name, generation) VALUES (?, 1)"
        " ON CONFLICT (name) DO UPDATE SET generation = generation + 1",
        (group,),
    )
