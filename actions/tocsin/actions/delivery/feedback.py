"""What a person's answer to an issue means for receivers. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from tocsin.actions.decision.consequences import Noticed
from tocsin.actions.decision.decide import Decisions
from tocsin.actions.decision.planned import Planned
from tocsin.schemas.records.deliveries import ACKNOWLEDGED
from tocsin.schemas.records.feedback import Feedback
from tocsin.schemas.records.issues import Issue


def issue_after(feedback: Feedback) -> Issue:
    """The issue as it is for receivers after the answer: over, or as it was."""
    return feedback.closed_issue() if feedback.closes else feedback.issue


def planned_after(
    feedback: Feedback,
    noticed: Mapping[str, Noticed],
    decisions: Decisions,
    shows: Callable[[str], bool],
) -> list[Planned]:
    """Whom to tell of the answer: of those who were notified of the issue.

    An end goes to all of them; an acknowledgement to those that can show one (`shows`).
    """
    found = [
        replace(planned, decided_by=f"{feedback.text}; {planned.decided_by}")
        for planned in decisions.notified(feedback.issue, noticed)
    ]
    if feedback.closes:
        return found
    return [replace(one, occasion=ACKNOWLEDGED) for one in found if shows(one.action)]
