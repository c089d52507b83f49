"""The silences that people have set with `tocsin silence`, as the control topic has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from tocsin.actions.decision.silences import Silence
from tocsin.bus.port import Outgoing, Partition, Record
from tocsin.schemas.records.silences import SILENCES, SilenceSet
from tocsin.schemas.records.wire import read_event, read_signature
from tocsin.schemas.signing import TrustedKeys

KEEP_ENDED_MS: Final = 7 * 86_400_000
"""So long after its end a silence is still on the topic, for people who ask what it was."""


def read_silence(record: Record, trusted: TrustedKeys) -> SilenceSet | None:
    """The silence in a record of the control topic; None for what is none.

    Raises:
        SignatureError: it is not signed by a key that is trusted here.
        RecordError: it cannot be read.
    """
    if record.value is None or not record.key.startswith(SILENCES.encode()):
        return None
    trusted.verify(record.key, record.value, read_signature(record.headers))
    event = read_event(record)
    data = None if event is None else event.data
    return data if isinstance(data, SilenceSet) and data.key.encode() == record.key else None


class SilenceRecords:
    """The silences of our partitions. Without a signature that is trusted now, none counts.

    Args:
        trusted: the keys of people whose silences count; read again for each record, may block.
    """

    def __init__(self, trusted: Callable[[], TrustedKeys]) -> None:
        self._trusted = trusted
        self._of: dict[Partition, dict[str, SilenceSet]] = {}

    def __iter__(self) -> Iterator[Silence]:
        """Each silence once, whether it has ended or not."""
        known = {one.silence_id: one for found in self._of.values() for one in found.values()}
        for one in known.values():
            yield Silence(
                match=one.match,
                from_ms=one.from_ms,
                until_ms=one.until_ms,
                mutes=frozenset(one.mutes),
                by=one.by,
                why=one.why,
                decided_by=f"silence {one.silence_id[:8]}",
            )

    def follow(self, record: Record) -> None:
        """Take a record of the control topic in. Other commands are not looked at.

        Raises:
            SignatureError: it is a silence, and not signed by a trusted key.
            RecordError: likewise, and cannot be read.
        """
        if not record.key.startswith(SILENCES.encode()):
            return
        found = self._of.setdefault(record.partition, {})
        if record.value is None:
            found.pop(record.key.decode(errors="replace").removeprefix(SILENCES), None)
            return
        silence = read_silence(record, self._trusted())
        if silence is None:
            return
        known = found.get(silence.silence_id)
        # An older one is sent once more: nobody may set a silence again that has been ended.
        if known is None or silence.set_ms >= known.set_ms:
            found[silence.silence_id] = silence

    def outdated(self, now_ms: int) -> Iterator[Outgoing]:
        """Tombstones for silences that have ended long ago; they leave this memory, too."""
        for partition, found in self._of.items():
            for one in [o for o in found.values() if o.until_ms <= now_ms - KEEP_ENDED_MS]:
                del found[one.silence_id]
                yield Outgoing(partition, one.key.encode(), None)

    def release(self, partitions: frozenset[int]) -> None:
        """Drop these partitions."""
        for partition in [one for one in self._of if one.number in partitions]:
            del self._of[partition]
