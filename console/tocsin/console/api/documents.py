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

WHICH: Final = "major version of this answer; new releases only add fields to it"
_VERSION: Final[tuple[object, object]] = (Literal[1], Field(description=WHICH))


class Saved(Model):
    """An estimate of the device time that a stop has saved."""

    estimate: float | None = Field(
        description="device-hours; None if not known: `method` gives the reason"
    )
    unit: str = Field(description="GPU-hours, or rank-hours for a training on CPUs")
    hours: float | None = Field(description="hours of each device; None if not known")
    devices: dict[str, int] = Field(description="accelerators: name -> how many")
    ranks: Whole = Field(description="ranks of the training")
    cost: float | None = Field(description="in `currency`; None if a device has no price")
    currency: str | None = Field(description="currency of the configured prices")
    method: str = Field(description="how the hours were estimated, or why they are not known")


class StateSeen(Model):
    """One state of an issue, with its time."""

    state: IssueState = Field(description="the state")
    at_ms: Millis = Field(
        description="append time of the record that decided it, Unix milliseconds"
    )
    step: Step | None = Field(description="the run's step at that time")


class Stop(Model):
    """The progress of a stop of a run."""

    command_id: Id = Field(description="the command that requested it")
    issue_id: Id | None = Field(description="the issue that caused it; None: a person requested it")
    state: str = Field(description="the newest state: requested, acknowledged, left, exited, …")
    requested_by: str | None = Field(
        description="who requested it; None if the command is no longer on the bus"
    )
    reason: str | None = Field(description="the reason given by the requester")
    answer: str | None = Field(description="the answer of the job")
    step: Step | None = Field(description="the step at which the ranks exited")
    how: str | None = Field(description="edge (the ranks exited between steps), SIGTERM or SIGKILL")
    exit_code: ExitCode | None = Field(
        description="exit code of the job; None if it is running or not known"
    )
    checkpoint_decision: str | None = Field(description="saved, protected, skipped, …")
    checkpoint: Checkpoint | None = Field(description="the checkpoint that was saved or protected")
    states: dict[str, Millis] = Field(description="state -> its time, Unix milliseconds")
    saved: Saved | None = Field(description="estimate of the device time saved")


class RuleStanding(Model):
    """The status of one rule in a run."""

    rule: str = Field(description="name of the rule instance")
    status: RuleStatus = Field(description="its status")
    issues: Whole = Field(description="number of its issues in this run so far")
    worst_severity: Severity | None = Field(description="the highest severity of these issues")


class RunRules(Model):
    """The status of each rule of a run."""

    version: Literal[1] = Field(description=WHICH)
    run_id: RunId
    incarnation: Incarnation
    rules: tuple[RuleStanding, ...] = Field(description="sorted by name")


class RunGoodput(Model):
    """Where the time of a run went."""

    version: Literal[1] = Field(description=WHICH)
    run_id: RunId
    goodput: Goodput | None = Field(description="None: nothing is known about its time yet")
    productive_share: float | None = Field(description="productive time over all time, 0 to 1")


class RuleStopCounts(Model):
    """What the stops of one rule did."""

    rule: str = Field(description="name of the rule instance")
    stopped: Whole = Field(description="number of trainings that it stopped")
    shadow: Whole = Field(
        description="number of trainings that it would have stopped in mode `enforce`"
    )
    not_sent: Whole = Field(
        description="number of stops that a limit, a silence or a person prevented"
    )
    confirmed: Whole = Field(description="issues that people acknowledged or resolved")
    false_alarms: Whole = Field(description="issues that people called false alarms")
    saved_hours: float = Field(description="estimate of the device-hours saved by its stops")
    saved_unknown: Whole = Field(description="stops without an estimate")
    would_save_hours: float = Field(
        description="estimate for the stops that were not sent, device-hours"
    )
    wrong_hours: float = Field(
        description="the part of both estimates that comes from false alarms"
    )
    cost: float = Field(description="cost of both estimates, in the currency of the prices")
    wrong_share: float | None = Field(
        description="false alarms as a share of the answered issues, 0 to 1"
    )


class StopsReport(Model):
    """What stops did, for each rule."""

    version: Literal[1] = Field(description=WHICH)
    rules: tuple[RuleStopCounts, ...] = Field(description="sorted by name")
    currency: str = Field(description="currency of the costs")
    method: str = Field(description="how the hours are counted")


class StopTarget(Model):
    """The backend that would end the job of a run if its launcher did not."""

    target: str | None = Field(description="its name in the configuration; None: no target matches")
    why: str = Field(description="the line of the policy that permits it, or why no target matches")


class SuspendedReceiver(Model):
    """A receiver that fails; deliveries to it are paused."""

    receiver: str = Field(description="its name in the configuration")
    until_ms: Millis = Field(description="when the next delivery is attempted")
    waiting: Whole = Field(description="number of waiting deliveries")


class SuspendedReceivers(Model):
    """Failing receivers to which deliveries are paused."""

    version: Literal[1] = Field(description=WHICH)
    as_of: str = Field(description="when this was read, RFC 3339")
    suspended_receivers: tuple[SuspendedReceiver, ...] = Field(description="sorted by name")


class RefusedConfigurations(Model):
    """Configurations that workers have refused; the earlier ones remain in effect."""

    version: Literal[1] = Field(description=WHICH)
    as_of: str = Field(description="when this was read, RFC 3339")
    refused_configurations: tuple[ConfigurationRefused, ...] = Field(description="sorted by worker")


class RuleInput(Model):
    """What a rule reads."""

    kind: str = Field(description="scalar, tensor, system, event, …")
    pattern: str = Field(description="names that it reads")
    mode: str | None = Field(description="train, eval, …; None: any mode")
    beside: bool = Field(description="whether it is useful only together with another input")


class RuleParameter(Model):
    """A parameter of a rule."""

    name: str = Field(description="its key in the configuration")
    type: str = Field(description="kind of value")
    unit: str = Field(description="empty if it has none")
    default: object = Field(description="the value if nothing is configured")
    meaning: str = Field(description="what it does")


class CatalogueRule(Model):
    """A rule of the catalogue."""

    name: str = Field(description="its name in the configuration")
    version: Whole = Field(description="increases when its results change")
    family: str = Field(description="the kind of fault that it finds")
    alias: str | None = Field(description="its name in SageMaker Debugger")
    meaning: str = Field(description="what it finds, in one sentence")
    about: str = Field(description="more about it")
    definition: str = Field(description="formula and source")
    severity: Severity = Field(description="default severity of its issues")
    stop_worthy: bool = Field(description="whether a critical one may stop the run by default")
    stops_because: str = Field(description="why it may or may not")
    by_default: bool = Field(description="whether it runs if nothing is configured")
    branches: dict[str, str] = Field(description="its conditions, if it has several")
    inputs: tuple[RuleInput, ...] = Field(description="what it reads")
    comes: str = Field(description="when its input becomes available")
    capture_hint: str = Field(description="how to capture its input")
    parameters: tuple[RuleParameter, ...] = Field(description="what can be configured")
    presets: dict[str, dict[str, object]] = Field(
        description="parameter values for kinds of trainings"
    )
    remedy: str = Field(description="what to try")
    does_not_see: str = Field(description="what it cannot find")
    repeat_s: float = Field(description="minimum time between two ongoing states, seconds")
    resolve_after_steps: Whole = Field(description="clean steps after which an issue resolves")


class Catalogue(Model):
    """The built-in rules."""

    version: Literal[1] = Field(description=WHICH)
    rules: tuple[CatalogueRule, ...] = Field(description="sorted by family")


class Problem(Model):
    """Why a request was not answered (RFC 9457)."""

    type: str = Field(description="kind of problem: urn:tocsin:problem:…")
    title: str = Field(description="the kind in words")
    status: int = Field(description="the HTTP status", ge=400, le=599)
    detail: str = Field(description="what was expected, and what to try")


Run: Final = described(
    "Run",
    "A run in its newest incarnation.",
    RunView,
    more={
        "saved": (Saved | None, Field(default=None, description="estimate for a stopped run")),
        "stop_target": (
            StopTarget | None,
            Field(default=None, description="for a running run, if targets are configured"),
        ),
    },
)

Feedback: Final = described(
    "Feedback",
    "A person's answer to an issue.",
    FeedbackRecord,
    leave_out={"issue"},
    more={
        "verdict": (Verdict, Field(description="the answer")),
        "issue_id": (Id, Field(description="the issue")),
    },
)

Delivery: Final = described(
    "Delivery",
    "The newest state of a notice or a stop.",
    DeliveryRecord,
    leave_out={"event", "issue_event"},
)

_ISSUE: Final[Fields] = {
    "state": (IssueState, Field(description="the newest state from its rule")),
    "short_id": (
        Id,
        Field(description="the first characters of the id; `tocsin why` accepts them"),
    ),
    "states": (tuple[StateSeen, ...], Field(description="all states, oldest first")),
    "feedback": (many(Feedback), Field(description="people's answers, oldest first")),
    "deliveries": (many(Delivery), Field(description="its notices and stops")),
}

Issue: Final = described("Issue", "An issue in its newest state.", IssueFiring, more=_ISSUE)

ToldIssue: Final = described(
    "ToldIssue",
    "An issue with its consequences.",
    IssueFiring,
    more={
        **_ISSUE,
        "consequences": (tuple[Id, ...], Field(description="ids of the issues that it caused")),
    },
)

Story: Final = described(
    "Story",
    "An issue from its first sign to its outcome.",
    more={
        "version": _VERSION,
        "issue": (ToldIssue, Field(description="the issue")),
        "stop": (Stop | None, Field(description="the stop of its run, whatever caused it")),
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
            Field(description="all known incarnations, oldest first"),
        ),
        "archived": (bool, Field(description="whether the store has it")),
        "stop": (Stop | None, Field(description="its stop, with the requester")),
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


Runs: Final = _listing("Runs", Run, "newest start first")
Issues: Final = _listing("Issues", Issue, "newest first")
Deliveries: Final = _listing("Deliveries", Delivery, "newest decision first")
Stops: Final = _listing("Stops", RunStop, "newest request first")
