"""A request to capture more for some steps: from the control topic to the ranks of this node.

It is unsigned: whoever can write to the bus can send one. So it brings no more than more capture
for a bounded number of steps, now and then, and both bounds are kept here, whoever asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final, Literal

from tocsin.bus.port import Record
from tocsin.emitter.stop import datagrams
from tocsin.emitter.stop.processes import Members
from tocsin.schemas.errors import RecordError
from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.schemas.records.events import EVENT_TYPES
from tocsin.schemas.records.stops.commands import DetailRequest, detail_request_key

DETAIL_REQUEST: Final = "look_closer"
"""The kind of the datagram to a rank: `steps`, and `reason` for people."""

MAX_STEPS: Final = 200
"""So many steps more at most, whatever was asked for."""

EVERY_MS: Final = 60_000
"""Between two requests that are handed on."""

Reason = Literal["look", "other_incarnation", "expired", "repeated", "too_soon", "malformed"]


class DetailRequests:
    """Checks the requests to one run, and hands them to the ranks that `members` knows of."""

    def __init__(
        self, run_id: str, members: Members, *, now_ms: Callable[[], int] = unix_ms
    ) -> None:
        self.key: Final = detail_request_key(run_id).encode()
        self.counts: Final[Counter[Reason]] = Counter()
        self._run_id = run_id
        self._members = members
        self._now_ms = now_ms
        self._last_ms: int | None = None
        self._last_issue = ""

    def apply(self, record: Record, *, earlier: bool = False) -> Reason:
        """Judge a record of that key, and hand it on if it is to be; never waits.

        Whether one is too old is asked of those that were there `earlier` than the listener: by two
        clocks that may be apart.
        """
        reason, request = self._check(record.value or b"", earlier=earlier)
        self.counts[reason] += 1
        if request is not None:
            self._last_ms, self._last_issue = self._now_ms(), request.issue_id
            for trainer in self._members.living(request.incarnation):
                datagrams.send(trainer.socket, message(request))
        return reason

    def _check(self, value: bytes, *, earlier: bool) -> tuple[Reason, DetailRequest | None]:
        try:
            request = EVENT_TYPES.decode(value).data
        except RecordError:
            return "malformed", None
        if not isinstance(request, DetailRequest) or request.run_id != self._run_id:
            return "malformed", None
        if request.incarnation != self._members.incarnation:
            return "other_incarnation", None
        now_ms = self._now_ms()
        if earlier and now_ms > request.not_after_ms:
            return "expired", None
        if request.issue_id == self._last_issue:
            return "repeated", None
        # A clock that was set back must not silence this for hours.
        if self._last_ms is not None and 0 <= now_ms - self._last_ms < EVERY_MS:
            return "too_soon", None
        return "look", request


def message(request: DetailRequest) -> datagrams.Message:
    """The datagram to a rank."""
    return {
        "kind": DETAIL_REQUEST,
        "steps": min(request.steps, MAX_STEPS),
        "reason": f"issue {request.issue_id} of {request.rule}",
    }
