"""The switch for all stops (`tocsin stops off`), as whoever sends or obeys stops follows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tocsin.schemas.errors import MalformedRecord
from tocsin.schemas.records.events import EVENT_TYPES
from tocsin.schemas.records.stops.control import SWITCH_KEY, StopsSwitched
from tocsin.schemas.records.wire import ReceivedRecord, read_signature
from tocsin.schemas.signing import TrustedKeys

_KEY: Final = SWITCH_KEY.encode()


class StopsSwitch:
    """Whether stops are on: until a signed record of the control topic switches them off."""

    def __init__(self) -> None:
        self._newest: StopsSwitched | None = None

    @property
    def newest(self) -> StopsSwitched | None:
        """The record that counts; None if nobody has ever switched."""
        return self._newest

    @property
    def off(self) -> str:
        """Why nothing is stopped, in a sentence; empty while stops are on."""
        newest = self._newest
        if newest is None or not newest.off:
            return ""
        why = f": {newest.why}" if newest.why else ""
        return f"all stops are switched off by {newest.by}{why}"

    def apply(self, record: ReceivedRecord, trusted: Callable[[], TrustedKeys]) -> bool:
        """Follow a record of the control topic. Returns whether it is of the switch, and counts.

        An older one than the newest does not count, so that nobody can send it once more.

        Raises:
            SignatureError: it is of the switch, and not signed by a trusted key.
            RecordError: likewise, and cannot be read.
        """
        if record.key != _KEY or record.value is None:
            return False
        trusted().verify(record.key, record.value, read_signature(record.headers))
        data = EVENT_TYPES.decode(record.value).data
        if not isinstance(data, StopsSwitched):
            raise MalformedRecord(f"expected {StopsSwitched.event_type}, found {data.event_type}")
        if self._newest is not None and data.at_ms < self._newest.at_ms:
            return False
        self._newest = data
        return True
