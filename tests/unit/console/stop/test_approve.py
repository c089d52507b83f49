"""What a person reads after the answer to a stop."""

from __future__ import annotations

from support.records.issues import NOW_MS, delivery, issue
from tocsin.console.stop.approve import StopReply, answered_line
from tocsin.schemas.records.deliveries import Approval


def test_a_rejection_that_is_not_read_yet_is_not_called_an_approval() -> None:
    # The person has approved before, and now changes their mind.
    approval = Approval(why="mode ask", until_ms=NOW_MS + 1, quorum=2, by=("ana@node",))
    stop = delivery(issue("run-1"), "stop", state="pending", approval=approval)
    assert stop.waits_for_people
    reject = StopReply(text="run-1", verdict="reject", by="ana@node")
    approve = StopReply(text="run-1", verdict="approve", by="ana@node")

    assert "no action service has read it" in answered_line(stop, reject)
    assert answered_line(stop, approve) == "approved; the stop of run run-1 waits for 1 more"
