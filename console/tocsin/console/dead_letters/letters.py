"""The dead letters of a bus as people see them: one fold of its records. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from rich.table import Table
from rich.text import Text

from tocsin.actions.decision.planned import STOP
from tocsin.actions.delivery.order import follows
from tocsin.bus.port import Outgoing, Partition, Record
from tocsin.schemas.errors import ConfigurationError, RecordError
from tocsin.schemas.records.dead_letters import DeadLetter
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.events import clip
from tocsin.schemas.records.wire import BOOT, SEQ, read_event
from tocsin.schemas.text import plain_line, time_text
from tocsin.schemas.topics import Topics

REDRIVEN: Final = "Redriven"
"""The `error` of a record that says that another dead letter was written back to its topic."""

_FAILED: Final = ("Expired", "Rejected")
_SHORTEST: Final = 4
_SHORT: Final = 8


@dataclass(frozen=True, slots=True)
class Letter:
    """One dead letter. `delivery` is the failed delivery; None if it is a record that a service
    could not use. `redriven_ms` is when such a record was written back.
    """

    record: Record
    why: DeadLetter
    delivery: Delivery | None = None
    redriven_ms: int | None = None

    @property
    def letter_id(self) -> str:
        """The id of the delivery, or where the record was: `TOPIC/PARTITION/OFFSET`."""
        if self.delivery is not None:
            return self.delivery.delivery_id
        return f"{self.why.topic}/{self.why.partition}/{self.why.offset}"

    @property
    def shown_id(self) -> str:
        """The id, or as much of it as a person types."""
        return self.letter_id if self.delivery is None else self.letter_id[:_SHORT]

    @property
    def changed_ms(self) -> int:
        """When it came, or was written back, Unix milliseconds."""
        return max(self.record.append_ms, self.redriven_ms or 0)

    @property
    def about(self) -> str:
        """What it is, in a few words."""
        one = self.delivery
        if one is None:
            return f"a record that {self.why.service} could not use"
        return f"{one.rule} ({one.issue_state}) of {one.run_id} to {one.action}"


def letters_of(records: Iterable[Record]) -> list[Letter]:
    """The dead letters, the oldest first: of a delivery that failed several times the newest."""
    found: dict[str, Letter] = {}
    redriven: dict[tuple[str, int, int], int] = {}
    for record in records:
        try:
            why = DeadLetter.read(record.headers)
        except RecordError:
            continue  # of another release: nothing is known of it
        if why.error == REDRIVEN:
            redriven[why.topic, why.partition, why.offset] = record.append_ms
            continue
        letter = Letter(record, why, _delivery(record) if why.error in _FAILED else None)
        found.pop(letter.letter_id, None)
        found[letter.letter_id] = letter
    return [
        Letter(
            one.record,
            one.why,
            one.delivery,
            redriven.get((one.why.topic, one.why.partition, one.why.offset)),
        )
        if one.delivery is None
        else one
        for one in found.values()
    ]


def choose_letter(letters: Sequence[Letter], text: str) -> Letter:
    """The one with that id, or whose id begins so.

    Raises:
        ConfigurationError: there is none, or there are several.
    """
    exact = [one for one in letters if one.letter_id == text]
    found = exact or [
        one for one in letters if len(text) >= _SHORTEST and one.letter_id.startswith(text)
    ]
    if len(found) == 1:
        return found[0]
    if not found:
        raise ConfigurationError(
            f"no dead letter {text!r}: expected an id, or at least its first {_SHORTEST} "
            "characters; `tocsin bus dlq` lists them"
        )
    ids = ", ".join(one.letter_id for one in found[:5])
    raise ConfigurationError(f"{len(found):,} dead letters begin with {text!r}: {ids}")


def redriven(
    letter: Delivery, ledger: Iterable[Delivery], *, by: str, now_ms: int
) -> Delivery | str:
    """The entry with which it is sent once more, under the same id; or why it is not.

    `letter` is its dead letter, `ledger` the newest states of its run's deliveries. Nothing that
    was delivered is sent again, nor what would set a receiver back to an earlier state of an issue.
    """
    if letter.kind == STOP:
        return "a stop is not sent again; `tocsin stop` requests a new one"
    if letter.event is None:
        return "its dead letter holds no event"
    redrives = 0
    for other in ledger:
        if other.delivery_id == letter.delivery_id:
            if other.state not in ("expired", "rejected"):
                return f"it is {other.state} already"
            redrives = other.redrives
        elif other.state == "delivered" and follows(other, letter):
            return f"a later state of the issue was delivered: {other.issue_state}"
    began_ms = letter.created_ms if letter.redriven_ms is None else letter.redriven_ms
    return letter.model_copy(
        update={
            "state": "pending",
            "reason": clip(f"to be sent once more, requested by {by}"),
            "redrives": redrives + 1,
            "redriven_ms": now_ms,
            "attempts": 0,
            "updated_ms": max(now_ms, letter.updated_ms),
            "next_attempt_ms": now_ms,
            "give_up_ms": now_ms + letter.give_up_ms - began_ms,
            "suspended_until_ms": None,
        }
    )


def written_back(
    letter: Letter, topics: Topics, *, by: str, now_ms: int
) -> tuple[Outgoing, Outgoing]:
    """The record as it was, for its topic, and a note of that for the dead letters."""
    why, record = letter.why, letter.record
    left_out = {name for name, _ in why.headers()}
    if why.topic == topics.telemetry:
        # Its sender has sent later ones since, behind which it would pass for a repeat.
        left_out |= {BOOT, SEQ}
    marker = DeadLetter(
        topic=why.topic,
        partition=why.partition,
        offset=why.offset,
        error=REDRIVEN,
        message=f"by {by}",
        service=why.service,
        at_ms=now_ms,
    )
    return (
        Outgoing(
            Partition(why.topic, why.partition),
            record.key,
            record.value,
            tuple(header for header in record.headers if header[0] not in left_out),
        ),
        Outgoing(Partition(topics.dlq, record.partition.number), record.key, b"", marker.headers()),
    )


def state_of(letter: Letter, ledger: dict[str, Delivery]) -> str:
    """What has become of it since; `ledger` has the newest states of deliveries by id."""
    if letter.delivery is None:
        return "waiting" if letter.redriven_ms is None else "redriven"
    newest = ledger.get(letter.letter_id, letter.delivery)
    return f"redriven: {newest.state}" if newest.redrives else newest.state


def letter_facts(letter: Letter, ledger: dict[str, Delivery]) -> dict[str, object]:
    """A dead letter as JSON values. A record's value is shown by `letter_text` alone."""
    one = letter.delivery
    return {
        "id": letter.letter_id,
        "state": state_of(letter, ledger),
        "about": letter.about,
        "error": letter.why.error,
        "message": letter.why.message,
        "service": letter.why.service,
        "software": letter.why.software,
        "at_ms": letter.why.at_ms,
        "topic": letter.why.topic,
        "partition": letter.why.partition,
        "bytes": len(letter.record.value or b""),
        "delivery": None
        if one is None
        else one.model_dump(mode="json", exclude_none=True, exclude={"event"}),
    }


def letters_json(letters: Sequence[Letter], ledger: dict[str, Delivery]) -> str:
    """One JSON object with `version` and `dead_letters`."""
    facts = [letter_facts(letter, ledger) for letter in letters]
    return json.dumps({"version": 1, "dead_letters": facts}, indent=2)


def letters_table(letters: Sequence[Letter], ledger: dict[str, Delivery]) -> Table:
    """A line for each."""
    table = Table(box=None)
    table.add_column("id", no_wrap=True)
    for name in ("since", "what", "why", "state"):
        table.add_column(name, overflow="fold")
    for one in letters:
        why = plain_line(f"{one.why.error}: {one.why.message}")
        cells = (one.shown_id, time_text(one.why.at_ms), one.about, why, state_of(one, ledger))
        table.add_row(*(Text(plain_line(cell)) for cell in cells))
    return table


def letter_text(letter: Letter, ledger: dict[str, Delivery]) -> list[str]:
    """All that is known of one, line by line."""
    why, record = letter.why, letter.record
    software = f" ({why.software})" if why.software else ""
    lines = [
        f"{letter.about}: {state_of(letter, ledger)}",
        f"id: {letter.letter_id}",
        f"since: {time_text(why.at_ms)}",
        f"why: {why.error}: {why.message}",
        f"put here by: {why.service}{software}",
        f"record: {len(record.value or b''):,} bytes, of {why.topic} partition {why.partition}",
    ]
    if letter.delivery is not None:
        one = ledger.get(letter.letter_id, letter.delivery)
        lines.append(f"issue: {one.issue_id} (tocsin why {one.issue_id[:_SHORT]})")
        for attempt in one.last_attempts:
            lines.append(f"attempt: {time_text(attempt.at_ms)}, {attempt.result}")
    else:
        lines.append(f"value: {(record.value or b'')[:200]!r}")
    return [plain_line(line) for line in lines]


def _delivery(record: Record) -> Delivery | None:
    try:
        event = read_event(record)
    except RecordError:
        return None
    return event.data if event is not None and isinstance(event.data, Delivery) else None
