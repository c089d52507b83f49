"""The fields of an issue that templates can name. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from tocsin.actions.delivery.receiver_queues import Notice
from tocsin.actions.receivers.message import Message, gravest_first, message_for, message_of
from tocsin.schemas.records.deliveries import NEW
from tocsin.schemas.records.issues import Issue, IssueFiring, IssueResolved, Subject
from tocsin.schemas.text import number_text, plain_line, time_text, where_text

Value = str | int | Mapping[str, str] | Sequence[str] | Sequence[Mapping[str, str]]

MAPPINGS: Final = frozenset({"facts", "labels"})
LISTS: Final = frozenset({"did", "rows"})


class _Texts(dict[str, str]):
    """Text by name; what is not there is empty, since each run has labels of its own."""

    def __missing__(self, name: str) -> str:
        return ""


def fields_of(notice: Notice) -> dict[str, Value]:
    """The fields of a notice: of its most severe issue, but title, headline, rows and text of all.

    Raises:
        RecordError: it holds no issue.
    """
    issue, delivery = gravest_first(notice)[0]
    message = message_for(notice)
    return fields_of_issue(issue, notice.did, delivery.message_id, delivery.occasion, message)


def fields_of_issue(
    issue: Issue,
    did: Sequence[str],
    delivery: str,
    occasion: str = NEW,
    message: Message | None = None,
) -> dict[str, Value]:
    """All of them, whatever the issue lacks: a missing number is an empty text."""
    message = message or message_of(issue, did)
    evidence = issue.evidence
    return {
        "answer_url": message.answer_url,
        "caused_by": issue.consequence_of or "",
        "delivery": delivery,
        "did": tuple(map(plain_line, did)),
        "facts": _Texts(
            (fact.name, plain_line(fact.value) if isinstance(fact.value, str) else
             number_text(fact.value))
            for fact in evidence.facts
        ),
        "first_rank": "" if issue.first_rank is None else issue.first_rank,
        "first_step": "" if issue.first_step is None else issue.first_step,
        "headline": message.headline,
        "issue": issue.issue_id,
        "labels": _Texts((key, plain_line(value)) for key, value in issue.labels.items()),
        "occasion": occasion,
        "reason": plain_line(issue.reason),
        "remedy": plain_line(issue.remedy),
        "rows": tuple(_Texts(label=row.label, value=row.value) for row in message.rows),
        "rule": plain_line(issue.rule),
        "run": message.run_id,
        "severity": issue.severity,
        "since": time_text(issue.onset_ms) if issue.onset_ms else "",
        "state": issue.state,
        "step": "" if issue.step is None else issue.step,
        "subject": plain_line(issue.subject.name),
        "text": message.text(),
        "title": message.title,
        "where": plain_line(where_text(issue)),
        "word": message.word,
    }  # fmt: skip


def sample_issues() -> Sequence[Issue]:
    """An issue with all that one can have, and one with as little as one may have."""
    extra = IssueFiring.model_config["json_schema_extra"]
    assert isinstance(extra, dict)
    examples = extra["examples"]
    assert isinstance(examples, list)
    full = IssueFiring.model_validate(examples[0])
    bare = IssueResolved(
        run_id="sample",
        incarnation=full.incarnation,
        issue_id=full.issue_id,
        rule="nonfinite",
        use="nonfinite",
        rule_version=1,
        severity="warning",
        subject=Subject(kind="run", name="sample"),
        reason="",
    )
    full = full.model_copy(update={"labels": {"team": "vision"}, "remedy": "Lower the rate."})
    return full, bare


def sample_fields() -> Sequence[Mapping[str, Any]]:
    """The fields of sample issues, for checks of templates."""
    did = ["It asked the run to stop."]
    answer_url = "https://tocsin.example.com/answer/sample"
    return [
        fields_of_issue(
            issue,
            did,
            "sample",
            message=replace(message_of(issue, did), answer_url=answer_url),
        )
        for issue in sample_issues()
    ]
