"""An issue as Prometheus and Alertmanager know alerts: its labels and annotations. Pure."""

from __future__ import annotations

import re
from typing import Final

from pydantic import JsonValue

from tocsin.actions.receivers.message import Message
from tocsin.schemas.records.issues import Issue

_NOT_IN_A_NAME: Final = re.compile(r"[^A-Za-z0-9_]")


def labels_of(issue: Issue, severity: str) -> dict[str, JsonValue]:
    """The run's labels, under names that a label can have, and ours."""
    labels: dict[str, JsonValue] = {
        _NOT_IN_A_NAME.sub("_", key): value for key, value in issue.labels.items()
    }
    return labels | {
        "alertname": issue.rule,
        "run": issue.run_id,
        "issue": issue.issue_id,
        "severity": severity,
    }


def annotations_of(message: Message) -> dict[str, JsonValue]:
    """What people read."""
    answer: dict[str, JsonValue] = {"answer": message.answer_url} if message.answer_url else {}
    return {"summary": message.title, "description": message.text(), **answer}


def began_ms(issue: Issue, now_ms: int) -> int:
    """When it began; Alertmanager refuses alerts of the future."""
    return min(issue.onset_ms or now_ms, now_ms)
