"""Signed records of the control topic, as readers get them."""

from __future__ import annotations

from tocsin.bus.port import Partition, Record
from tocsin.schemas.ids import new_id
from tocsin.schemas.records.events import Data, Event
from tocsin.schemas.records.stops.control import SWITCH_KEY, StopAnswered, StopsSwitched
from tocsin.schemas.records.wire import meta_of, signature_headers
from tocsin.schemas.signing import SigningKey
from tocsin.schemas.topics import Topics


def signed_record(data: Data, name: bytes, key: SigningKey | None, *, offset: int = 0) -> Record:
    """The record under that name; without a key, unsigned."""
    event = Event.wrap(data, id=new_id(), source="/people", time_ms=1)
    value, headers = event.encode(), meta_of(event).headers()
    if key is not None:
        headers += signature_headers(key.sign(name, value))
    return Record(Partition(Topics().control, 0), offset, 1, name, value, headers)


def answer_record(
    answer: StopAnswered, key: SigningKey | None, *, name: bytes | None = None
) -> Record:
    """An answer to a stop."""
    return signed_record(answer, answer.key.encode() if name is None else name, key)


def switch_record(key: SigningKey | None, *, off: bool = True, at_ms: int = 1) -> Record:
    """The switch of all stops."""
    data = StopsSwitched(off=off, by="ana", why="a wrong rule", at_ms=at_ms)
    return signed_record(data, SWITCH_KEY.encode(), key)
