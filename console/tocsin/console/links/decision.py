"""The record that a button of a page writes: the same as of the command of its name. Pure."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from datetime import timedelta
from typing import Final, Literal

from tocsin.schemas.links import Link, LinkVerb
from tocsin.schemas.records.feedback import (
    Feedback,
    FeedbackAcknowledged,
    FeedbackFalseAlarm,
    FeedbackResolved,
)
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.silences import SilenceSet
from tocsin.schemas.records.stops.control import StopAnswered

SILENCE: Final = timedelta(hours=1)
_WHY: Final = "by link"

_KINDS: Final[Mapping[LinkVerb, type[Feedback]]] = {
    "ack": FeedbackAcknowledged,
    "resolve": FeedbackResolved,
    "false-alarm": FeedbackFalseAlarm,
}
_VERDICTS: Final[Mapping[LinkVerb, Literal["approve", "reject"]]] = {
    "approve": "approve",
    "reject": "reject",
}


def decision_of(
    link: Link, issue: IssueFiring, now_ms: int
) -> Feedback | StopAnswered | SilenceSet:
    """What using a link means; its id, or that of its event, is the link's `use_id`."""
    if link.verb == "silence":
        # A run's name has no pattern in it, a rule's may.
        match: dict[str, tuple[str, ...]] = {
            "run": (link.run_id,),
            "rule": (glob.escape(issue.rule),),
        }
        return SilenceSet(
            silence_id=link.use_id,
            match=match,
            from_ms=now_ms,
            until_ms=now_ms + SILENCE // timedelta(milliseconds=1),
            by=link.person,
            why=_WHY,
            set_ms=now_ms,
        )
    if link.verb in _VERDICTS:
        return StopAnswered(
            run_id=link.run_id,
            incarnation=link.incarnation,
            delivery_id=link.stop_id,
            verdict=_VERDICTS[link.verb],
            by=link.person,
            why=_WHY,
            at_ms=now_ms,
        )
    return _KINDS[link.verb].on(
        issue, feedback_id=link.use_id, by=link.person, at_ms=now_ms, why=_WHY
    )
