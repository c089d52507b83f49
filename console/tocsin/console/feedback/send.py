"""`tocsin ack`, `resolve`, `false-alarm`: puts what a person answers to an issue on the bus."""

from __future__ import annotations

import json
from dataclasses import dataclass

from tocsin.bus.port import Outgoing, Partition
from tocsin.console.context import CommandContext
from tocsin.console.publication import person_record, publish
from tocsin.console.views.bus_view import read_view
from tocsin.console.views.issues import feedback_facts
from tocsin.console.views.selection import choose_issue
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.ids import new_id
from tocsin.schemas.records.feedback import Feedback
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.text import plain_line
from tocsin.schemas.topics import Topics, issue_partition


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a person answers, to which issue: its id, or that of a run, or the beginning of one."""

    issue: str
    kind: type[Feedback]
    by: str
    why: str = ""


async def give_feedback(context: CommandContext, answer: Answer, now_ms: int) -> Feedback:
    """Answer to an issue of the bus; returns once the record is there.

    Raises:
        ConfigurationError: there is no such issue, or there are several.
        BusError: the bus does not answer.
    """
    async with context.open_bus(create=False) as bus:
        found = choose_issue(await read_view(bus, context.topics), answer.issue)
        if isinstance(found, RunView):
            raise ConfigurationError(
                f"no issues in run '{plain_line(found.run_id)}'; `tocsin issues` lists the issues"
            )
        feedback = feedback_on(found, answer, now_ms)
        await publish(bus, [feedback_record(context.topics, feedback)])
    return feedback


def feedback_on(issue: IssueFiring, answer: Answer, now_ms: int) -> Feedback:
    """The answer as a record. Its id is new. Pure but for that."""
    return answer.kind.on(issue, feedback_id=new_id(), by=answer.by, at_ms=now_ms, why=answer.why)


def feedback_record(topics: Topics, feedback: Feedback) -> Outgoing:
    """The record for the issues topic."""
    partition = Partition(topics.issues, issue_partition(feedback.run_id))
    about = f"issues/{feedback.issue.issue_id}"
    return person_record(feedback, partition, record_id=feedback.feedback_id, about=about)


def as_text(feedback: Feedback) -> str:
    """What happened, and what it means for receivers."""
    issue = feedback.issue
    about = f"{issue.severity} {plain_line(issue.rule)} in run {plain_line(issue.run_id)}"
    means = {
        "acknowledged": "it is not repeated until it gets worse or recurs",
        "resolved": "receivers that were notified of it get a resolve",
        "false alarm": "receivers that were notified of it get a resolve, and it counts in "
        "`tocsin issues --precision`",
    }[feedback.verdict]
    return f"{about}: {plain_line(feedback.text)}; {means}"


def as_json(feedback: Feedback) -> str:
    """The answer for programs."""
    return json.dumps({"version": 1, "feedback": feedback_facts(feedback)}, indent=2)
