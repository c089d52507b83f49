"""The stage of the causes: a receiver of a cause needs no message about what follows. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from tocsin.actions.decision.planned import Held
from tocsin.schemas.records.issues import SEVERITIES, SHORT_ID, Issue, Severity


@dataclass(frozen=True, slots=True)
class Noticed:
    """The notices about an issue that a receiver has got.

    Attributes:
        severity: of the newest notice that it got; None if it got none, or that is not known.
        notified: whether it got a notice of its start, or one waits to be sent.
        open: whether it was notified of the start of the issue, and not of its end.
        held: whether a notice of its start was held, and none was sent since.
    """

    kind: str
    decided_by: str
    severity: Severity | None = None
    notified: bool = False
    open: bool = False
    held: bool = False


def folded(issue: Issue, cause: Noticed | None) -> Held | None:
    """Whether a receiver needs no message about an issue, after what it was sent about its cause.

    It gets one anyway when the issue is more severe than its cause, or the cause is over.
    """
    if issue.consequence_of is None or cause is None or not cause.open or cause.severity is None:
        return None
    if SEVERITIES.index(issue.severity) > SEVERITIES.index(cause.severity):
        return None
    short = issue.consequence_of[:SHORT_ID]
    return Held("cause", f"a consequence of the issue {short}, which was notified and is open")
