"""`tocsin bus dlq` and `redrive`: reads the dead letters of a bus, and sends them once more."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from tocsin.actions.delivery.records import delivery_record
from tocsin.bus.port import Bus, Outgoing, Partition
from tocsin.console.dead_letters.letters import (
    Letter,
    choose_letter,
    letters_of,
    redriven,
    written_back,
)
from tocsin.console.publication import publish
from tocsin.console.views.bus_view import read_all
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.runs_fold import RunsView
from tocsin.schemas.topics import DLQ_PARTITIONS, ISSUE_PARTITIONS, Topics


@dataclass(slots=True)
class Redriven:
    """What was sent once more, and what was not and why; ids."""

    sent: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Contents:
    """The dead letters of a bus, and the newest states of its deliveries by id."""

    letters: Sequence[Letter]
    ledger: dict[str, Delivery]


async def read_contents(bus: Bus, topics: Topics) -> Contents:
    """Read both topics from their start.

    Raises:
        BusError: the bus does not answer, or was never set up.
    """
    parts = [Partition(topics.dlq, number) for number in range(DLQ_PARTITIONS)]
    records = [record async for record in read_all(bus, parts)]
    letters = sorted(letters_of(records), key=lambda letter: letter.why.at_ms)
    view = RunsView()
    ledger = [Partition(topics.actions, number) for number in range(ISSUE_PARTITIONS)]
    async for record in read_all(bus, ledger):
        view.apply(record)
    return Contents(letters, {one.delivery_id: one for one in view.deliveries})


async def redrive(
    bus: Bus,
    topics: Topics,
    letter_id: str | None,
    *,
    receiver: str | None = None,
    by: str,
    now_ms: int,
) -> Redriven:
    """Send one once more, or all that wait; returns when that is on the bus.

    Raises:
        ConfigurationError: there is no such dead letter, or there are several; no delivery to
            that receiver is among them.
        BusError: the bus does not answer.
    """
    result = Redriven()
    contents = await read_contents(bus, topics)
    if letter_id is not None:
        wanted: Sequence[Letter] = [choose_letter(contents.letters, letter_id)]
    else:
        wanted = _for_receiver(contents.letters, receiver)
    records: list[Outgoing] = []
    for letter in wanted:
        found = _records(letter, contents, topics, by=by, now_ms=now_ms)
        if isinstance(found, str):
            result.skipped[letter.letter_id] = found
        else:
            records += found
            result.sent.append(letter.letter_id)
    if records:
        await publish(bus, records)
    return result


def as_text(result: Redriven, *, single: bool) -> list[str]:
    """What happened, line by line; with `single` why each of the others was not sent, too."""
    many = f"{len(result.sent):,} dead letter{'s' * (len(result.sent) != 1)}"
    lines = [f"{many} to be sent once more, by the next worker that is up"] if result.sent else []
    if single or not result.sent:
        lines += [f"{one}: not sent, {why}" for one, why in result.skipped.items()]
    elif result.skipped:
        lines.append(
            f"{len(result.skipped):,} not sent, as nothing is to be done: --json lists them"
        )
    return lines or ["no dead letters to send"]


def as_json(result: Redriven) -> str:
    """The result of a redrive as one JSON object: `version`, `sent`, `skipped`."""
    return json.dumps({"version": 1, "sent": result.sent, "skipped": result.skipped}, indent=2)


def _for_receiver(letters: Sequence[Letter], receiver: str | None) -> Sequence[Letter]:
    if receiver is None:
        return letters
    found = [one for one in letters if one.delivery is not None and one.delivery.action == receiver]
    if letters and not found:
        names = sorted({one.delivery.action for one in letters if one.delivery is not None})
        known = f"; there are some to {', '.join(names)}" if names else ""
        raise ConfigurationError(f"--receiver: no dead letters to {receiver!r}{known}")
    return found


def _records(
    letter: Letter, contents: Contents, topics: Topics, *, by: str, now_ms: int
) -> Sequence[Outgoing] | str:
    if letter.delivery is None:
        if letter.redriven_ms is not None:
            return "it was written back already"
        if not letter.record.value:
            return "its value did not fit into the dead letter"
        return written_back(letter, topics, by=by, now_ms=now_ms)
    same_run = (one for one in contents.ledger.values() if one.run_id == letter.delivery.run_id)
    entry = redriven(letter.delivery, same_run, by=by, now_ms=now_ms)
    return entry if isinstance(entry, str) else [delivery_record(topics, entry)]
