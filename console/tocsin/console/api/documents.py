"""What the answers about runs, issues, deliveries, stops and rules look like."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from tocsin.console.api.described import Answer, Fields, described, many
from tocsin.schemas.records.checkpoints import Checkpoint
from tocsin.schemas.records.configurations import ConfigurationRefused
from tocsin.schemas.records.deliveries import Delivery as DeliveryRecord
from tocsin.schemas.records.events import Model
from tocsin.schemas.records.feedback import Feedback as FeedbackRecord
from tocsin.schemas.records.feedback import Verdict
from tocsin.schemas.records.fields import ExitCode, Id, Incarnation, Millis, RunId, Step, Whole
from tocsin.schemas.records.goodput import Goodput
from tocsin.schemas.records.issues import IssueFiring, IssueState, Severity
from tocsin.schemas.records.run_view import RuleStatus, RunView

WHICH: Final = "major version of this answer; within it fields are only added"
_VERSION: Final[tuple[object, object]] = (Literal[1], Field(description=WHICH))


class Saved(Model):
    """An estimate of the compute that a stop has saved."""

    estimate: float | None = Field(description="device-hours; None: not known, `method` says why")
    unit: str = Field(description="GPU-hours, or rank-hours of a training on the CPU")
    hours: float | None = Field(description="hours of each device; None: not known")
    devices: dict[str, int] = Field(description="accelerators: name -> how many")
    ranks: Whole = Field(description="ranks of the training")
    cost: float | None = Field(description="in `currency`; None: a device has no price")
    currency: str | None = Field(description="of the configuration's prices")
    method: str = Field(description="how the hours were found, or why they are not known")


class StateSeen(Model):
    """An issue came into a state."""

    state: IssueState = Field(description="the state")
    at_ms: Millis = Field(description="append time of what decided it, Unix milliseconds")
    step: Step | None = Field(description="the run's step then")


class Stop(Model):
    """How far a stop of a run has come."""

    command_id: Id = Field(description="the command that asked for it")
    issue_id: Id | None = Field(description="the issue it is for; None: a person asked")
    state: str = Field(description="the newest state: requested, acknowledged, left, exited, …")
    requested_by: str | None = Field(description="who asked; None: the command is gone")
    reason: str | None = Field(description="why, in the words of who asked")
    answer: str | None = Field(description="what the job answered")
    step: Step | None = Field(description="the step at which the ranks left")
    how: str | None = Field(description="edge, SIGTERM or SIGKILL")
    exit_code: ExitCode | None = Field(description="of the job; None: it runs, or is not known")
    checkpoint_decision: str | None = Field(description="saved, protected, skipped, …")
    checkpoint: Checkpoint | None = Field(description="the one that was saved or protected")
    states: dict[str, Millis] = Field(description="state -> when it came, Unix milliseconds")
    saved: Saved | None = Field(description="estimate of what it has saved")


class RuleStanding(Model):
    """How one rule stands in a run."""

    rule: str = Field(description="the rule instance's name")
    status: RuleStatus = Field(description="how it stands")
    issues: Whole = Field(description="its issues in this run so far")
    worst_severity: Severity | None = Field(description="the highest severity of these")


class RunRules(Model):
    """How the rules of a run stand."""

    version: Literal[1] = Field(description=WHICH)
    run_id: RunId
    incarnation: Incarnation
    rules: tuple[RuleStanding, ...] = Field(description="by name")


class RunGoodput(Model):
    """Where the time of a run went."""

    version: Literal[1] = Field(description=WHICH)
    run_id: RunId
    goodput: Goodput | None = Field(description="None: nothing is known of its time yet")
    productive_share: float | None = Field(description="productive time over all time, 0 to 1")


class RuleStopCounts(Model):
    """What the stops did that one rule decided."""

    rule: str = Field(description="the rule instance's name")
    stopped: Whole = Field(description="trainings that it stopped")
    shadow: Whole = Field(description="those that it would have stopped in another mode")
    not_sent: Whole = Field(description="those that a limit, a silence or people kept going")
    confirmed: Whole = Field(description="issues that people acknowledged or resolved")
    false_alarms: Whole = Field(description="issues that people called false alarms")
    saved_hours: float = Field(description="estimate of what the stops saved, device-hours")
    saved_unknown: Whole = Field(description="stops without an estimate")
    would_save_hours: float = Field(description="what the stops that were not sent would save")
    wrong_hours: float = Field(description="the part of both that is of false alarms")
    cost: float = Field(description="of both, in the currency of the prices")
    wrong_share: float | None = Field(description="false alarms over answered issues, 0 to 1")


class StopsReport(Model):
    """What stops did, rule by rule."""

    version: Literal[1] = Field(description=WHICH)
    rules: tuple[RuleStopCounts, ...] = Field(description="by name")
    currency: str = Field(description="of the costs")
    method: str = Field(description="how the hours are counted")


class StopTarget(Model):
    """Who would be asked to end the job of a run if its launcher did not."""

    target: str | None = Field(description="its name in the configuration; None: none fits")
    why: str = Field(description="the line of the policy that permits it, or why none fits")


class SuspendedReceiver(Model):
    """A receiver that fails and is left alone for now."""

    receiver: str = Field(description="its name in the configuration")
    until_ms: Millis = Field(description="when one delivery is attempted again")
    waiting: Whole = Field(description="deliveries that wait for it")


class SuspendedReceivers(Model):
    """Receivers that fail and are left alone for now."""

    version: Literal[1] = Field(description=WHICH)
    as_of: str = Field(description="when this was read, RFC 3339")
    suspended_receivers: tuple[SuspendedReceiver, ...] = Field(description="by name")


class RefusedConfigurations(Model):
    """Configurations that workers refuse: the earlier ones are in effect."""

    version: Literal[1] = Field(description=WHICH)
    as_of: str = Field(description="when this was read, RFC 3339")
    refused_configurations: tuple[ConfigurationRefused, ...] = Field(description="by worker")


class RuleInput(Model):
    """What a rule reads."""

    kind: str = Field(description="scalar, tensor, system, event, …")
    pattern: str = Field(description="names that it reads")
    mode: str | None = Field(description="train, eval, …; None: any")
    beside: bool = Field(description="whether it is useful only together with another input")


class RuleParameter(Model):
    """A parameter of a rule."""

    name: str = Field(description="its key in the configuration")
    type: str = Field(description="kind of value")
    unit: str = Field(description="empty: none")
    default: object = Field(description="what it is where nothing is configured")
    meaning: str = Field(description="what it does")


class CatalogueRule(Model):
    """A rule of the catalogue."""

    name: str = Field(description="what the configuration calls it")
    version: Whole = Field(description="goes up when its results change")
    family: str = Field(description="which kind of fault it finds")
    alias: str | None = Field(description="its name in SageMaker Debugger")
    meaning: str = Field(description="what it finds, in a sentence")
    about: str = Field(description="more of it")
    definition: str = Field(description="formula and source")
    severity: Severity = Field(description="of its issues, by default")
    stop_worthy: bool = Field(description="whether a critical one may stop the run by default")
    stops_because: str = Field(description="why")
    by_default: bool = Field(description="whether it runs where nothing is configured")
    branches: dict[str, str] = Field(description="its conditions, where it has several")
    inputs: tuple[RuleInput, ...] = Field(description="what it reads")
    comes: str = Field(description="when its input is there")
    capture_hint: str = Field(description="how to capture its input")
    parameters: tuple[RuleParameter, ...] = Field(description="what can be configured")
    presets: dict[str, dict[str, object]] = Field(description="values for kinds of trainings")
    remedy: str = Field(description="what to try")
    does_not_see: str = Field(description="what it cannot find")
    repeat_s: float = Field(description="least time between two ongoing states, seconds")
    resolve_after_steps: Whole = Field(description="steps without the condition until it resolves")


class Catalogue(Model):
    """The built-in rules."""

    version: Literal[1] = Field(description=WHICH)
    rules: tuple[CatalogueRule, ...] = Field(description="by family")


class Problem(Model):
    """Why a request was not answered (RFC 9457)."""

    type: str = Field(description="which kind of problem: urn:tocsin:problem:…")
    title: str = Field(description="that kind in words")
    status: int = Field(description="the HTTP status", ge=400, le=599)
    detail: str = Field(description="what was expected, and what to try")


Run: Final = described(
    "Run",
    "A run in its newest incarnation.",
    RunView,
    more={
        "saved": (Saved | None, Field(default=None, description="of a stopped run: an estimate")),
        "stop_target": (
            StopTarget | None,
            Field(default=None, description="of a run that runs, where targets are configured"),
        ),
    },
)

Feedback: Final = described(
    "Feedback",
    "What a person answered to an issue.",
    FeedbackRecord,
    leave_out={"issue"},
    more={
        "verdict": (Verdict, Field(description="the answer")),
        "issue_id": (Id, Field(description="the issue")),
    },
)

Delivery: Final = described(
    "Delivery",
    "The newest state of one notice or stop.",
    DeliveryRecord,
    leave_out={"event", "issue_event"},
)

_ISSUE: Final[Fields] = {
    "state": (IssueState, Field(description="the newest state by its rule")),
    "short_id": (Id, Field(description="the beginning of the id, which `tocsin why` takes")),
    "states": (tuple[StateSeen, ...], Field(description="all states, in order of time")),
    "feedback": (many(Feedback), Field(description="what people answered, in order of time")),
    "deliveries": (many(Delivery), Field(description="its notices and stops")),
}

Issue: Final = described("Issue", "An issue in its newest state.", IssueFiring, more=_ISSUE)

ToldIssue: Final = described(
    "ToldIssue",
    "An issue, with what it caused.",
    IssueFiring,
    more={
        **_ISSUE,
        "consequences": (tuple[Id, ...], Field(description="ids of the issues that it caused")),
    },
)

Story: Final = described(
    "Story",
    "An issue from its first sign to what became of it.",
    more={
        "version": _VERSION,
        "issue": (ToldIssue, Field(description="the issue")),
        "stop": (Stop | None, Field(description="the stop of its run, for whatever reason")),
    },
)

RunStop: Final = described(
    "RunStop",
    "The stop of a run.",
    Stop,
    more={
        "run_id": (RunId, Field(description="the run")),
        "incarnation": (Incarnation, Field(description="its incarnation")),
    },
)

OneRun: Final = described(
    "OneRun",
    "One run.",
    more={
        "version": _VERSION,
        "run": (Run, Field(description="the run in its newest incarnation")),
        "incarnations": (
            tuple[Incarnation, ...],
            Field(description="all that are known, the first started first"),
        ),
        "archived": (bool, Field(description="whether the store has it")),
        "stop": (Stop | None, Field(description="its stop, with who asked for it")),
    },
)


def _listing(name: str, of: Answer, order: str) -> Answer:
    return described(
        f"{name}Page",
        f"A page of {name.lower()}.",
        more={
            "version": _VERSION,
            "as_of": (str, Field(description="when this was read, RFC 3339: the next `since`")),
            "next": (str | None, Field(description="`cursor` of the next page; None: no more")),
            name.lower(): (many(of), Field(description=order)),
        },
    )


Runs: Final = _listing("Runs", Run, "the last started first")
Issues: Final = _listing("Issues", Issue, "the last that occurred first")
Deliveries: Final = _listing("Deliveries", Delivery, "the last decided first")
Stops: Final = _listing("Stops", RunStop, "the last requested first")
