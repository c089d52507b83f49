"""What a person's answer to an issue means for receivers. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tocsin.actions.delivery.ledger import Ledger
from tocsin.actions.delivery.routing import STOP, Planned, Routing
from tocsin.schemas.records.deliveries import ACKNOWLEDGED
from tocsin.schemas.records.feedback import Feedback
from tocsin.schemas.records.issues import Issue


def issue_after(feedback: Feedback) -> Issue:
    """The issue as it is for receivers after the answer: over, or as it was."""
    return feedback.closed_issue() if feedback.closes else feedback.issue


def planned_after(
    feedback: Feedback, routing: Routing, ledger: Ledger, shows: Callable[[str], bool]
) -> list[Planned]:
    """Whom to tell of the answer: of those who were notified of the issue.

    An end goes to all of them; an acknowledgement to those that can show one (`shows`).
    """
    issue = issue_after(feedback)
    found = [
        replace(planned, decided_by=f"{feedback.text}; {planned.decided_by}")
        for planned in routing.plan(issue.model_copy(update={"muted": False}))
        if planned.kind != STOP
        if ledger.notified(issue.issue_id, planned.action, issue.times)
    ]
    if feedback.closes:
        return found
    return [replace(one, occasion=ACKNOWLEDGED) for one in found if shows(one.action)]
