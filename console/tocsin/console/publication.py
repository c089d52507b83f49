"""Puts records on a bus, for one command."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from tocsin.bus.port import Bus, Outgoing, Partition
from tocsin.schemas.ids import new_id
from tocsin.schemas.key_folder import keys_folder, own_key
from tocsin.schemas.records.events import Data, Event
from tocsin.schemas.records.feedback import Feedback
from tocsin.schemas.records.quarantines import RuleReleased
from tocsin.schemas.records.wire import meta_of, signature_headers
from tocsin.schemas.topics import ISSUE_PARTITIONS, Topics

_PEOPLE: Final = "/people"
"""The source of what people say, in its events."""


async def publish(bus: Bus, records: Sequence[Outgoing]) -> None:
    """Returns once the records are on the bus. Raises BusError: they may not be."""
    producer = await bus.producer()
    try:
        await producer.publish(records)
    finally:
        await producer.close()


def person_record(
    data: Feedback | RuleReleased, partition: Partition, *, record_id: str, about: str
) -> Outgoing:
    """What a person has said of a run; `about` is the part of the run, for the event's subject."""
    event = Event.wrap(
        data,
        id=record_id,
        source=_PEOPLE,
        time_ms=data.at_ms,
        subject=f"/runs/{data.run_id}/{about}",
    )
    return Outgoing(partition, data.run_id.encode(), event.encode(), meta_of(event).headers())


async def publish_signed(
    bus: Bus,
    topics: Topics,
    data: Data,
    name: str,
    environ: Mapping[str, str],
    *,
    now_ms: int,
    partitions: Iterable[int] = range(ISSUE_PARTITIONS),
    event_id: str | None = None,
) -> None:
    """Put a person's decision on the control topic, signed by this user's key; `name` is the
    record's key, `event_id` that of its event, if not a new one. Each partition gets a record with
    equal bytes.

    Raises:
        ConfigurationError: the user's key cannot be read or made.
        BusError: the bus does not answer.
    """
    key = own_key(keys_folder(environ))
    event = Event.wrap(data, id=event_id or new_id(), source=_PEOPLE, time_ms=now_ms)
    name_bytes, value = name.encode(), event.encode()
    headers = meta_of(event).headers() + signature_headers(key.sign(name_bytes, value))
    records = [
        Outgoing(Partition(topics.control, number), name_bytes, value, headers)
        for number in partitions
    ]
    await publish(bus, records)
