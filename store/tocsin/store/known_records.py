"""What of a partition is known already: by its place in the log, by its sender's count. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tocsin.bus.port import Record
from tocsin.schemas.records.wire import Meta

MAX_SENDERS: Final = 16_384
"""Of so many senders of a run the newest are remembered."""


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a topic's partition is read or stored: up to `next_offset`, whose last record was
    appended at `append_ms`.

    A record is covered if both cover it: on a bus that was made anew offsets begin again, but times
    do not.
    """

    next_offset: int = 0
    append_ms: int = 0

    def covers(self, offset: int, append_ms: int) -> bool:
        """Whether the record there was read before."""
        return offset < self.next_offset and append_ms <= self.append_ms

    def after(self, record: Record) -> Mark:
        """The mark behind a record that is not covered."""
        return Mark(record.offset + 1, max(self.append_ms, record.append_ms))


@dataclass(slots=True)
class Senders:
    """The last record of each sending process of a run: one that comes again is a repeat, of a send
    whose answer was lost."""

    last: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_last(cls, last: Mapping[str, int]) -> Senders:
        """As they were saved."""
        return cls(dict(last))

    def admit(self, meta: Meta) -> bool:
        """Whether the record is not a repeat."""
        if not meta.boot:
            return True
        if meta.seq <= self.last.get(meta.boot, -1):
            return False
        # The newest last, so that the oldest are forgotten first.
        self.last.pop(meta.boot, None)
        self.last[meta.boot] = meta.seq
        if len(self.last) > MAX_SENDERS:
            del self.last[next(iter(self.last))]
        return True
