"""The command line: `ack`, `resolve` and `false-alarm`, a person's answers to an issue."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tocsin.console.commands.options import BusOption, ByOption, ConfigOption, JsonOption, WhyOption
from tocsin.schemas.monotonic_clock import unix_ms

if TYPE_CHECKING:
    from tocsin.schemas.records.feedback import Feedback


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    example = "Example: tocsin"
    app.command(epilog=f"{example} ack 1a2b3c4d")(ack)
    app.command(epilog=f'{example} resolve 1a2b3c4d --why "lower rate"')(resolve)
    app.command(name="false-alarm", epilog=f'{example} false-alarm 1a2b3c4d --why "warm-up"')(
        false_alarm
    )


IssueArgument = Annotated[
    str,
    typer.Argument(
        metavar="ISSUE",
        help="Id of an issue (at least its first 4 characters) or of a run (or its beginning).",
    ),
]


def ack(
    issue: IssueArgument,
    why: WhyOption = "",
    by: ByOption = None,
    config: ConfigOption = None,
    bus: BusOption = None,
    json_output: JsonOption = False,
) -> None:
    """Acknowledge an issue: somebody takes care of it.

    It is not repeated, and receivers of the type pagerduty get the acknowledgement. The rule
    continues to watch: an issue that turns critical or recurs is sent again.
    """
    from tocsin.schemas.records.feedback import FeedbackAcknowledged

    _give(FeedbackAcknowledged, issue, why, by, config, bus, json_output)


def resolve(
    issue: IssueArgument,
    why: WhyOption = "",
    by: ByOption = None,
    config: ConfigOption = None,
    bus: BusOption = None,
    json_output: JsonOption = False,
) -> None:
    """Resolve an issue: it was real, and is resolved.

    Receivers that were notified of it get a resolve. The rule continues to watch: an issue that
    turns critical or recurs is sent again.
    """
    from tocsin.schemas.records.feedback import FeedbackResolved

    _give(FeedbackResolved, issue, why, by, config, bus, json_output)


def false_alarm(
    issue: IssueArgument,
    why: WhyOption = "",
    by: ByOption = None,
    config: ConfigOption = None,
    bus: BusOption = None,
    json_output: JsonOption = False,
) -> None:
    """Mark an issue as a false alarm, and resolve it.

    Receivers that were notified of it get a resolve. `tocsin issues --precision` counts false
    alarms by rule.
    """
    from tocsin.schemas.records.feedback import FeedbackFalseAlarm

    _give(FeedbackFalseAlarm, issue, why, by, config, bus, json_output)


def _give(
    kind: type[Feedback],
    issue: str,
    why: str,
    by: str | None,
    config: Path | None,
    bus: str | None,
    json_output: bool,
) -> None:
    from tocsin.console.context import read_context
    from tocsin.console.feedback.send import Answer, as_json, as_text, give_feedback
    from tocsin.console.person import person_named, reason_given

    answer = Answer(issue=issue, kind=kind, by=person_named(by), why=reason_given(why))
    feedback = asyncio.run(give_feedback(read_context(config, bus), answer, unix_ms()))
    typer.echo(as_json(feedback) if json_output else as_text(feedback))
