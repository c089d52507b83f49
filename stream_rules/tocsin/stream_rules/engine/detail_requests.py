"""Asking a run to capture more for some steps, when a rule has found something in its numbers.

What was seen so far is a sample. The steps after a finding are those that its cause, or its end,
will be looked for in; so they are worth more. The request is a function of the issues and of the
record time alone: replayed records give the same ones, which nobody then sends.
"""

from __future__ import annotations

from typing import Final

from tocsin.schemas.records.issues import IssueFiring, SubjectKind
from tocsin.schemas.records.stops.commands import DetailRequest

DETAIL_STEPS: Final = 50
"""For how many steps more is asked for."""

DETAIL_INTERVAL_MS: Final = 600_000
"""Between two requests to one run at least, by record time."""

DETAIL_WITHIN_MS: Final = 300_000
"""How long after the finding a request is worth something, by record time."""

_OF_NUMBERS: Final[tuple[SubjectKind, ...]] = (
    "tensor",
    "layer",
    "loss",
    "scalar",
    "learning_rate",
)


def detail_request(issue: IssueFiring, before_ms: int | None) -> DetailRequest | None:
    """The request that this issue brings; None: it brings none.

    Only one that has just begun to fire, of severity warning or critical, and about the training's
    own numbers: more of them are no help with a full disk, and makes lost telemetry only worse.

    Args:
        before_ms: when the run was asked last (record time, Unix milliseconds).
    """
    if issue.state != "firing" or issue.severity == "info" or issue.subject.kind not in _OF_NUMBERS:
        return None
    if before_ms is not None and issue.at_ms - before_ms < DETAIL_INTERVAL_MS:
        return None
    return DetailRequest(
        run_id=issue.run_id,
        incarnation=issue.incarnation,
        rule=issue.rule,
        issue_id=issue.issue_id,
        steps=DETAIL_STEPS,
        not_after_ms=issue.at_ms + DETAIL_WITHIN_MS,
    )
