"""Runs, issues and deliveries as tables: of each the newest state, as the views of runs have it.
Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.records.runs_fold import RunsView

Cell = str | int | float | bool | None
T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


@dataclass(frozen=True, slots=True)
class Column(Generic[T_contra]):
    """A column of a table.

    Attributes:
        type: in SQL. Of a TIMESTAMP the value is in milliseconds since 1970, UTC.
        value: what it is of one row.
    """

    name: str
    type: str
    meaning: str
    value: Callable[[T_contra], Cell]


class _OfRule(Protocol):
    """What issues and deliveries have in common."""

    @property
    def run_id(self) -> str: ...
    @property
    def incarnation(self) -> str: ...
    @property
    def rule(self) -> str: ...


_OF_RULE: Final[Sequence[Column[_OfRule]]] = (
    Column("run_id", "VARCHAR", "its run", lambda one: one.run_id),
    Column("incarnation", "VARCHAR", "its training", lambda one: one.incarnation),
    Column("rule", "VARCHAR", "the rule instance", lambda one: one.rule),
)

RUNS: Final[Sequence[Column[RunView]]] = (
    Column("run_id", "VARCHAR", "the run", lambda run: run.run_id),
    Column("incarnation", "VARCHAR", "its newest training", lambda run: run.incarnation),
    Column("state", "VARCHAR", "running, ended or lost", lambda run: run.state),
    Column(
        "outcome", "VARCHAR", "completed, failed, stopped or interrupted", lambda run: run.outcome
    ),
    Column("exit_code", "BIGINT", "of the job", lambda run: run.exit_code),
    Column(
        "started_at", "TIMESTAMP", "start of this training, UTC", lambda run: run.started_ms or None
    ),
    Column("ended_at", "TIMESTAMP", "NULL while it runs", lambda run: run.ended_ms),
    Column("last_step", "BIGINT", "the last finished step", lambda run: run.last_step),
    Column("last_loss", "DOUBLE", "the loss then", lambda run: run.last_loss),
    Column("ranks", "BIGINT", "ranks that have reported", lambda run: len(run.ranks)),
    Column("issues", "BIGINT", "issues so far", lambda run: run.issues),
    Column("labels", "JSON", "labels ->> 'team' is one of them", lambda run: _json(run.labels)),
    Column("node", "VARCHAR", "host name", lambda run: run.node),
    Column("command", "VARCHAR", "how it was started", lambda run: run.command),
    Column(
        "stop_state",
        "VARCHAR",
        "how far a stop has come; NULL: none",
        lambda run: None if run.stop is None else run.stop.state,
    ),
    Column(
        "wall_s",
        "DOUBLE",
        "time over all incarnations, seconds",
        lambda run: None if run.goodput is None else run.goodput.wall_s,
    ),
    Column(
        "productive_share",
        "DOUBLE",
        "productive time over all time, 0 to 1",
        lambda run: None if run.goodput is None else run.goodput.share,
    ),
)

ISSUES: Final[Sequence[Column[IssueFiring]]] = (
    Column("issue_id", "VARCHAR", "the issue", lambda issue: issue.issue_id),
    *_OF_RULE,
    Column("use", "VARCHAR", "the rule in the catalogue", lambda issue: issue.use),
    Column("severity", "VARCHAR", "the highest so far", lambda issue: issue.severity),
    Column("state", "VARCHAR", "firing, ongoing or resolved", lambda issue: issue.state),
    Column("times", "BIGINT", "how often its condition came", lambda issue: issue.times),
    Column("started_at", "TIMESTAMP", "when it started, UTC", lambda issue: issue.onset_ms or None),
    Column("changed_at", "TIMESTAMP", "its newest state, UTC", lambda issue: issue.at_ms or None),
    Column("first_step", "BIGINT", "where it started", lambda issue: issue.first_step),
    Column("first_rank", "BIGINT", "where it started", lambda issue: issue.first_rank),
    Column("subject_kind", "VARCHAR", "tensor, loss, …", lambda issue: issue.subject.kind),
    Column("subject", "VARCHAR", "what it is about", lambda issue: issue.subject.name),
    Column("reason", "VARCHAR", "in a sentence", lambda issue: issue.reason),
    Column("consequence_of", "VARCHAR", "issue that caused it", lambda issue: issue.consequence_of),
)

DELIVERIES: Final[Sequence[Column[Delivery]]] = (
    Column("delivery_id", "VARCHAR", "the delivery", lambda one: one.delivery_id),
    Column("issue_id", "VARCHAR", "its issue", lambda one: one.issue_id),
    *_OF_RULE,
    Column("action", "VARCHAR", "name of the receiver, or stop", lambda one: one.action),
    Column("kind", "VARCHAR", "webhook, email, stop, …", lambda one: one.kind),
    Column("issue_state", "VARCHAR", "what it reports", lambda one: one.issue_state),
    Column(
        "state",
        "VARCHAR",
        "pending, delivered, rejected, suppressed, expired",
        lambda one: one.state,
    ),
    Column("reason", "VARCHAR", "why it is in this state", lambda one: one.reason),
    Column("held", "VARCHAR", "what kept it back", lambda one: one.held),
    Column("decided_by", "VARCHAR", "line of the configuration", lambda one: one.decided_by),
    Column("created_at", "TIMESTAMP", "when it was decided, UTC", lambda one: one.created_ms),
    Column("updated_at", "TIMESTAMP", "its newest state, UTC", lambda one: one.updated_ms),
    Column("attempts", "BIGINT", "made so far", lambda one: one.attempts),
)


@dataclass(frozen=True, slots=True)
class Facts:
    """A table in memory: columns with name, type and meaning, and the values of each."""

    columns: Sequence[tuple[str, str, str]]
    values: Sequence[Sequence[Cell]]


def facts_of(view: RunsView, only: frozenset[str] | None = None) -> Mapping[str, Facts]:
    """The tables `runs`, `issues` and `deliveries`; of the runs `only`, where these are given."""

    def wanted(run_id: str) -> bool:
        return only is None or run_id in only

    return {
        "runs": _table(RUNS, [run for run in view.runs if wanted(run.run_id)]),
        "issues": _table(ISSUES, [issue for issue in view.issues if wanted(issue.run_id)]),
        "deliveries": _table(DELIVERIES, [one for one in view.deliveries if wanted(one.run_id)]),
    }


def columns_of(columns: Sequence[Column[T]]) -> Sequence[tuple[str, str, str]]:
    """Name, type and meaning of each."""
    return [(column.name, column.type, column.meaning) for column in columns]


def _table(columns: Sequence[Column[T]], rows: Sequence[T]) -> Facts:
    values = [[column.value(row) for row in rows] for column in columns]
    return Facts(columns_of(columns), values)


def _json(value: Mapping[str, str]) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
