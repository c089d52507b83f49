"""What people decide, as signed records of the control topic."""

from __future__ import annotations

from collections.abc import Iterable

from tocsin.bus.port import Outgoing, Partition
from tocsin.schemas.ids import new_id
from tocsin.schemas.records.events import Data, Event
from tocsin.schemas.records.wire import meta_of, signature_headers
from tocsin.schemas.signing import SigningKey
from tocsin.schemas.topics import ISSUE_PARTITIONS, Topics


def signed_records(
    topics: Topics,
    data: Data,
    name: str,
    key: SigningKey,
    *,
    now_ms: int,
    partitions: Iterable[int] = range(ISSUE_PARTITIONS),
) -> list[Outgoing]:
    """A decision under its key on the topic: one record for each partition, with equal bytes."""
    event = Event.of(data, id=new_id(), source="/people", time_ms=now_ms)
    name_bytes, value = name.encode(), event.encode()
    headers = meta_of(event).headers() + signature_headers(key.sign(name_bytes, value))
    return [
        Outgoing(Partition(topics.control, number), name_bytes, value, headers)
        for number in partitions
    ]
