"""Which notices are sent together, and when one is repeated. Pure: entries of the ledger and times.

What is decided is in the entry: `sent_as` names its message, `next_attempt_ms` is when that goes
out. So it is the same after a restart. An entry joins a message only before that is due, and a
message is not sent before: what has been attempted is never attempted again with more in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from tocsin.schemas.ids import delivery_id
from tocsin.schemas.records.deliveries import REPEAT, Delivery

TOGETHER: Final = 50
"""Issues in one message; further ones begin another."""


def placed(
    entry: Delivery, group: str, others: Iterable[Delivery], *, wait_ms: int, now_ms: int
) -> Delivery:
    """An entry in its message: one of its group that still waits, else a new one.

    Args:
        entry: not in the ledger yet; not to be sent before its `next_attempt_ms`.
        others: the pending entries of its group and receiver.
        wait_ms: how long a new message waits for others.
    """
    due_ms = max(entry.next_attempt_ms or now_ms, now_ms + wait_ms)
    if entry.occasion == REPEAT:
        due_ms = entry.next_attempt_ms or now_ms
    messages: dict[str, list[Delivery]] = {}
    for other in others:
        if other.sent_as is not None:
            messages.setdefault(other.sent_as, []).append(other)
    for name, members in messages.items():
        if len(members) < TOGETHER and all(
            _waits_with(entry, one, due_ms, wait_ms, now_ms) for one in members
        ):
            due_ms = members[0].next_attempt_ms or due_ms
            return entry.model_copy(
                update={"group": group, "sent_as": name, "next_attempt_ms": due_ms}
            )
    changes = {"group": group, "sent_as": entry.delivery_id, "next_attempt_ms": due_ms}
    return entry.model_copy(update=changes)


def _waits_with(entry: Delivery, one: Delivery, due_ms: int, wait_ms: int, now_ms: int) -> bool:
    """Whether a pending entry still waits for its first attempt, about as long as a new one."""
    if one.attempts or one.next_attempt_ms is None or _sort(one) != _sort(entry):
        return False
    earliest_ms = entry.next_attempt_ms or now_ms
    soon = abs(one.next_attempt_ms - due_ms) <= wait_ms
    late_enough = entry.occasion == REPEAT or one.next_attempt_ms >= earliest_ms
    return soon and late_enough and now_ms < one.next_attempt_ms


def _sort(entry: Delivery) -> tuple[bool, bool]:
    return entry.issue_state == "resolved", entry.occasion == REPEAT


def next_repeat(before: Delivery, now_ms: int, known: Callable[[str], bool]) -> Delivery | None:
    """The entry that repeats a notice; None if it is not repeated (any more).

    Its number is the first whose id is not `known`: two notices of one state, such as a late one
    and a worse one, are repeated one after the other.

    It is in the ledger together with the notice that it repeats, or with the end of that, so that
    an answer finds it there, whenever it comes.
    """
    repeats = before.repeats
    if repeats is None or before.event is None:
        return None
    sent_ms = max(now_ms, before.next_attempt_ms or now_ms)
    every_ms = repeats.every_ms
    if repeats.urgent_every_ms is not None and sent_ms < repeats.urgent_until_ms:
        every_ms = repeats.urgent_every_ms
    if every_ms is None:
        return None
    number = before.repeat + 1
    while known(identity := _repeat_id(before, number)):
        number += 1
    return before.model_copy(
        update={
            "delivery_id": identity,
            "occasion": REPEAT,
            "repeat": number,
            "state": "pending",
            "reason": "repeated unless somebody acknowledges or resolves the issue",
            "attempts": 0,
            "last_attempts": (),
            "created_ms": now_ms,
            "updated_ms": now_ms,
            "next_attempt_ms": sent_ms + every_ms,
            # The next repeat takes its place.
            "give_up_ms": sent_ms + 2 * every_ms,
            "sent_as": None,
            "suspended_until_ms": None,
            "redrives": 0,
            "redriven_ms": None,
            "handle": None,
        }
    )


def _repeat_id(notice: Delivery, number: int) -> str:
    name = f"{notice.issue_state}/repeat/{number}"
    return delivery_id(notice.issue_id, notice.action, name, notice.issue_times)
