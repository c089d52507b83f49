"""A message about an issue: one value, from which each channel makes its own form. Pure.

Nothing here is escaped: a channel escapes what it is handed, in the way of that channel.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final

from tocsin.actions.delivery.receiver_queues import Notice
from tocsin.actions.delivery.records import digest_of, issue_of
from tocsin.schemas.configuration.values import format_duration
from tocsin.schemas.records.deliveries import (
    DIGEST,
    DRILL,
    REPEAT,
    STOPPED,
    Delivery,
    DeliveryState,
)
from tocsin.schemas.records.digests import Digest
from tocsin.schemas.records.events import clip
from tocsin.schemas.records.issues import SEVERITIES, Issue, IssueState, Series, Severity
from tocsin.schemas.text import (
    checkpoint_text,
    counted,
    fact_text,
    number_text,
    place_text,
    plain_line,
    time_text,
    where_text,
)

_SUBJECT: Final = 150
_LINE: Final = 1_000
_VALUES: Final = 8
_NAMED: Final = 5
_LABELS: Final = 20
_LABEL_WIDTH: Final = 18
ALSO: Final = "Also "
"""How the labels of the rows start that are about other issues of the message."""

_WHY_SENT: Final = {
    "new": "a new issue",
    "worse": "the issue is worse than before",
    "resolved": "the issue is resolved",
    "drill": "a drill",
    "late": "the issue is still active; its first notice is no longer held back",
    "stopped": "the stop of its run has finished",
    "digest": "a digest; this receiver got no other notice in this interval",
}

_STOPS: Final[Mapping[DeliveryState, str]] = {
    "pending": "stop requested",
    "delivered": "run stopped",
    "rejected": "stop refused",
    "expired": "stop not confirmed",
    "suppressed": "run not stopped",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One detail of a message, with its label."""

    label: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """An issue in words. No text in it has line breaks or control characters.

    Attributes:
        subject: the same in all states of one issue, so that mail readers put them together.
        title: with the state or severity, for channels without threads.
        headline: what has happened, in one sentence.
        rows: the details, the most important ones first.
        series: what the picture is drawn from; its last values are in `rows`, too.
        first_step: where the issue began, to be marked in the picture.
        answer_url: where people answer; empty: nowhere.
        digest: whether it is about an interval rather than an issue; `run_id` is its length.
    """

    issue_id: str
    run_id: str
    state: IssueState
    severity: Severity
    subject: str
    title: str
    headline: str
    rows: tuple[Row, ...]
    series: Series | None
    first_step: int | None
    answer_url: str = ""
    digest: bool = False

    @property
    def word(self) -> str:
        """`RESOLVED`, `DIGEST`, or its severity."""
        if self.digest:
            return "DIGEST"
        return "RESOLVED" if self.state == "resolved" else self.severity.upper()

    def markdown(self) -> str:
        """The text as a block of code, in which Markdown finds no link, mention or picture."""
        fence = "```"
        return f"{fence}\n{self.text().replace('`', chr(39))}{fence}\n"

    def text(self) -> str:
        """The message as plain text: the headline, an empty line, and a line for each row."""
        lines = [f"{self.word}: {self.headline}", ""]
        lines += [f"{row.label + ':':<{_LABEL_WIDTH}}{row.value}" for row in self.rows]
        if self.answer_url:
            lines += [f"{'Answer:':<{_LABEL_WIDTH}}{self.answer_url}"]
        return "\n".join(lines) + "\n"


def iso_time(ms: int) -> str:
    """Unix milliseconds in ISO 8601, UTC."""
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")


def message_for(notice: Notice) -> Message:
    """The message of a notice, about one issue or several: the most severe in full, a row for each
    other one. Or that of a digest.

    Raises:
        RecordError: the notice holds no issue.
    """
    if notice.delivery.occasion == DIGEST:
        return _digest_message(notice.delivery, digest_of(notice.delivery))
    found = gravest_first(notice)
    issue, delivery = found[0]
    stake = notice.stake if issue.run_id == notice.delivery.run_id else None
    message = message_of(issue, notice.did, stake)
    if delivery.occasion == REPEAT:
        message = replace(message, headline=f"Repeated: {message.headline}")
    elif delivery.occasion == STOPPED and notice.stop is not None:
        how = _STOPS[notice.stop]
        title = clip(f"{how}; {message.title}", _SUBJECT)
        headline = f"{how.capitalize()}. {message.headline}"
        message = replace(message, title=title, headline=headline)
    if notice.others:
        message = _message_about_several(message, [one for one, _ in found])
    link = notice.answer_url(delivery)
    commands = () if link else _commands(issue, delivery)
    page = notice.page_url(delivery)
    shown = (Row("Page", page),) if page else ()
    rows = (*message.rows, *shown, *commands, *_why_sent(delivery))
    return replace(message, rows=rows, answer_url=link)


def gravest_first(notice: Notice) -> list[tuple[Issue, Delivery]]:
    """What a notice is about, the most severe first, a cause before what followed from it.

    Raises:
        RecordError: the notice holds no issue.
    """
    found = [(issue_of(one), one) for one in (notice.delivery, *notice.others)]
    return sorted(found, key=lambda pair: (*_rank(pair[0]), pair[1].delivery_id))


def message_of(
    issue: Issue, did: Sequence[str] = (), stake: tuple[str, str] | None = None
) -> Message:
    """The message about an issue in any of its states.

    Args:
        did: what tocsin has done about it, one sentence each.
        stake: an estimate of the compute at stake, or saved, with its label.
    """
    run, rule = plain_line(issue.run_id), plain_line(issue.rule)
    at = "" if issue.first_step is None else f" at step {issue.first_step:,}"
    again = "now" if issue.turned_critical else "still"
    words = {
        "firing": issue.severity,
        "ongoing": f"{again} {issue.severity}",
        "resolved": "resolved",
    }
    reason = plain_line(issue.reason) or f"{rule} fired"
    goes_on = "Worse than before: " if issue.turned_critical else "Still active: "
    before = {"firing": "", "ongoing": goes_on, "resolved": "Over: "}[issue.state]
    return Message(
        issue_id=issue.issue_id,
        run_id=run,
        state=issue.state,
        severity=issue.severity,
        subject=clip(f"[tocsin] {rule} in {run}{at}", _SUBJECT),
        title=clip(f"{words[issue.state]}: {rule} in {run}{at}", _SUBJECT),
        headline=before + reason,
        rows=tuple(
            Row(label, clip(plain_line(value), _LINE)) for label, value in _rows(issue, did, stake)
        ),
        series=issue.evidence.series,
        first_step=issue.first_step,
    )


def _rank(issue: Issue) -> tuple[int, bool, int]:
    """The most severe first, a cause before what followed from it, then the earliest."""
    grave = SEVERITIES.index(issue.severity)
    return -grave, issue.consequence_of is not None, issue.onset_ms


def _message_about_several(message: Message, issues: Sequence[Issue]) -> Message:
    """A message about the first of these issues, with a row for each of the others."""
    first, *others = issues
    runs = len({issue.run_id for issue in issues})
    where = f"in {message.run_id}" if runs == 1 else f"in {runs} runs"
    at = "" if first.first_step is None else f" at step {first.first_step:,}"
    what = f"{len(issues)} issues {where}, the most severe: {plain_line(first.rule)}{at}"
    rows = []
    for issue in others:
        parts = [plain_line(issue.reason) or f"{plain_line(issue.rule)} fired", where_text(issue)]
        parts += [fact_text(fact) for fact in issue.evidence.facts[:1]]
        parts += [f"run {issue.run_id}"] if runs > 1 else []
        text = f"{issue.rule}: {'; '.join(parts)}; issue {issue.short_id}"
        rows.append(Row(f"{ALSO}{issue.severity}", clip(plain_line(text), _LINE)))
    return replace(
        message,
        subject=clip(f"[tocsin] {what}", _SUBJECT),
        title=clip(f"{message.word.lower()}: {what}", _SUBJECT),
        headline=f"{len(issues)} issues, the most severe: {message.headline}",
        rows=(*rows, *message.rows),
    )


def _digest_message(delivery: Delivery, digest: Digest) -> Message:
    length = format_duration(timedelta(milliseconds=digest.until_ms - digest.from_ms))
    runs = counted(digest.all_runs, "run")
    if digest.open:
        headline = f"{runs}, {counted(digest.open, 'open issue')}, nothing else was sent here"
    elif digest.issues:
        headline = f"{runs}, {counted(digest.issues, 'issue')}, not sent here"
    else:
        headline = f"All is well: {runs}, nothing wrong"
    return Message(
        issue_id=delivery.issue_id,
        run_id=length,
        state="firing",
        severity="info",
        subject=clip(f"[tocsin] digest of {length}", _SUBJECT),
        title=clip(f"digest of {length}: {runs}", _SUBJECT),
        headline=headline,
        rows=(
            *(Row(label, clip(plain_line(text), _LINE)) for label, text in _digest_rows(digest)),
            *_why_sent(delivery),
        ),
        series=None,
        first_step=None,
        digest=True,
    )


def _digest_rows(digest: Digest) -> Iterator[tuple[str, str]]:
    yield "From", time_text(digest.from_ms)
    yield "Until", time_text(digest.until_ms)
    for run in digest.runs:
        parts: list[str] = [run.outcome or run.state]
        parts += [f"step {run.last_step:,}"] if run.last_step is not None else []
        parts += [f"loss {number_text(run.last_loss)}"] if run.last_loss is not None else []
        yield "Run", f"{run.run_id}: {', '.join(parts)}"
    if digest.more_runs:
        yield "Run", f"and {digest.more_runs:,} more: tocsin status"
    if digest.issues or digest.open:
        yield "Issues", f"{digest.issues:,} started, {digest.open:,} open now: tocsin issues"
    if digest.suppressed:
        held = (f"{count:,} ({by.replace('_', ' ')})" for by, count in digest.suppressed.items())
        yield "Suppressed", ", ".join(held)


def _commands(issue: Issue, delivery: Delivery) -> Iterator[Row]:
    """How people answer on a command line. A drill is on no bus, and what is over needs nobody."""
    if issue.state != "resolved" and delivery.occasion != DRILL:
        matches = shlex.join([f"run={issue.run_id}", f"rule={issue.rule}"])
        answers = f"tocsin ack {issue.short_id} (or resolve, false-alarm)"
        silence = f"tocsin silence add {matches} --for 2h --why known"
        yield Row("To answer", clip(plain_line(f"{answers}; {silence}"), _LINE))


def _why_sent(delivery: Delivery) -> Iterator[Row]:
    why = _WHY_SENT.get(delivery.occasion, delivery.occasion)
    if delivery.occasion == REPEAT:
        why = f"{why} {delivery.repeat}: nobody has acknowledged or resolved it"
    by = f"decided by {delivery.decided_by}" if delivery.decided_by else ""
    if text := "; ".join(filter(None, (why, by))):
        yield Row("Why sent", clip(plain_line(text), _LINE))


def _rows(
    issue: Issue, did: Sequence[str], stake: tuple[str, str] | None
) -> Iterator[tuple[str, str]]:
    evidence = issue.evidence
    yield "Where first", where_text(issue)
    if issue.onset_ms:
        yield "Since", time_text(issue.onset_ms)
    if issue.state != "firing" and issue.at_ms:
        label = "Over since" if issue.state == "resolved" else "Seen again"
        yield label, time_text(issue.at_ms)
    if evidence.facts:
        yield "How bad", "; ".join(map(fact_text, evidence.facts))
    if stake is not None:
        yield stake
    if evidence.series is not None and evidence.series.values:
        yield "Last values", _last_values(evidence.series)
    if evidence.followed or evidence.also:
        yield "What followed", _followed(evidence.followed, evidence.also)
    if evidence.explanation:
        yield "How decided", evidence.explanation
    if issue.consequence_of is not None:
        yield "Caused by", evidence.cause or f"issue {issue.consequence_of}"
    if (good := issue.last_good_checkpoint) is not None:
        yield "Good checkpoint", checkpoint_text(good)
    if did:
        yield "What tocsin did", " ".join(did)
    if issue.remedy and issue.state != "resolved":
        yield "What to try", issue.remedy
    if issue.last_notice:
        yield (
            "Last notice",
            (
                f"{plain_line(issue.rule)} has reached its limit of {issue.severity} notices for "
                "this run. Further ones are not sent, but recorded: tocsin issues"
            ),
        )
    yield "Run", issue.run_id
    if issue.labels:
        shown = [f"{key}={value}" for key, value in list(issue.labels.items())[:_LABELS]]
        more = len(issue.labels) - len(shown)
        yield "Labels", ", ".join(shown) + (f" and {more} more" if more else "")
    name = issue.rule if issue.rule == issue.use else f"{issue.rule} (of {issue.use})"
    yield "Rule", f"{name}, {issue.severity}"
    yield "Issue", issue.issue_id
    yield "More", f"tocsin why {issue.short_id}"


def _last_values(series: Series) -> str:
    last = list(zip(series.steps, series.values, strict=True))[-_VALUES:]
    shown = ", ".join(f"{number_text(value)} ({place_text(series, x)})" for x, value in last)
    limit = "" if series.limit is None else f"; limit {number_text(series.limit)}"
    unit = f" ({series.unit})" if series.unit else ""
    return f"{series.name}{unit}: {shown}{limit}"


def _followed(count: int, also: Sequence[str]) -> str:
    named = ", ".join(also[:_NAMED])
    rest = max(count, len(also)) - len(also[:_NAMED])
    if not named:
        return f"{count:,} more went the same way"
    return named + (f" and {rest:,} more" if rest else "")
