"""What people have decided, as the control topic has it: silences, the switch of stops, answers."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tocsin.actions.delivery.approvals import Approvals
from tocsin.actions.delivery.silence_records import SilenceRecords
from tocsin.bus.port import Record
from tocsin.schemas.errors import RecordError, SignatureError
from tocsin.schemas.records.events import clip
from tocsin.schemas.signing import TrustedKeys
from tocsin.schemas.stops_switch import StopsSwitch

logger = logging.getLogger(__name__)


class ControlRecords:
    """The decisions on our partitions. What no trusted key has signed does not count.

    Args:
        trusted: the keys of people whose decisions count; read again for each record, may block.
    """

    def __init__(self, trusted: Callable[[], TrustedKeys]) -> None:
        self.silences = SilenceRecords(trusted)
        self.switch = StopsSwitch()
        self.approvals = Approvals(trusted)
        self._trusted = trusted

    def follow(self, record: Record) -> None:
        """Take a record of the control topic in. Commands to runs are not looked at."""
        try:
            self.silences.follow(record)
            self.switch.apply(record, self._trusted)
            self.approvals.follow(record)
        except (SignatureError, RecordError) as error:
            key, reason = clip(record.key.decode(errors="replace"), 200), clip(str(error), 300)
            logger.warning(
                "decision ignored (%s): %s",
                key,
                reason,
                extra={"action": "actions", "key": key, "reason": reason},
            )

    def release(self, partitions: frozenset[int]) -> None:
        """Drop these partitions. The switch and the answers are of the bus, not of a partition."""
        self.silences.release(partitions)
