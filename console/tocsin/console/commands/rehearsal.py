"""The command line: `explain`, `test`, `replay` and `diff`, what a configuration would do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tocsin.console.commands.options import BusOption, ConfigOption, JsonOption, StoreOption
from tocsin.console.commands.runs import SeverityOption
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.exit_codes import FAILED
from tocsin.schemas.monotonic_clock import unix_ms

if TYPE_CHECKING:
    from tocsin.console.configuration.issue_rehearsal import TimedEvent
    from tocsin.console.fleet.telemetry_rehearsal import Past

FromOption = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="TIME",
        help="Only records since then: 2026-11-20T08:00Z, or 24h ago [default: all].",
        show_default=False,
    ),
]
ToOption = Annotated[
    str | None,
    typer.Option(
        "--to", metavar="TIME", help="Only records until then [default: all].", show_default=False
    ),
]
DumpOption = Annotated[
    Path | None,
    typer.Option(
        "--file",
        metavar="FILE",
        help="Read a file instead of the bus: a dump of `tocsin bus dump`, or issues, one event in "
        "JSON on each line.",
        show_default=False,
    ),
]
RunOption = Annotated[
    str | None,
    typer.Option(
        "--run",
        metavar="RUN",
        help="Evaluate the rules once more, over the telemetry of this run.",
        show_default=False,
    ),
]
ArchivedOption = Annotated[
    bool,
    typer.Option("--archived", help="With --run: read the run from the store instead of the bus."),
]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    example = "Example: tocsin"
    app.command(
        epilog=f"{example} explain --label team=vision --rule nonfinite --severity critical"
    )(explain)
    app.command("test", epilog=f"{example} test tocsin_test.yaml --junit report.xml")(run_tests)
    app.command(epilog=f"{example} replay --run gpt-1 --from 7d --config new.yaml")(replay)
    app.command(epilog=f"{example} diff tocsin.yaml new.yaml --from 7d")(diff)


def explain(
    rule: Annotated[str, typer.Option("--rule", metavar="R", help="Rule of the issue.")],
    severity: Annotated[
        SeverityOption | None,
        typer.Option(
            "--severity",
            metavar="info|warning|critical",
            help="Severity of the issue [default: the rule's].",
            show_default=False,
        ),
    ] = None,
    labels: Annotated[
        list[str] | None,
        typer.Option("--label", metavar="K=V", help="Label of the run; may be repeated."),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(
            "--at",
            metavar="TIME",
            help="When: 2026-11-20T08:00Z, or 2h ago [default: now].",
            show_default=False,
        ),
    ] = None,
    config: ConfigOption = None,
    json_output: JsonOption = False,
) -> None:
    """Show which lines of the configuration decide about an issue.

    The labels of the configuration apply, too; `run` is the run's id. Other issues, and silences of
    `tocsin silence`, are not considered.
    """
    from tocsin.console.configuration.explanation import as_json, as_text, sample_issue
    from tocsin.console.configuration.explanation import explain as decide
    from tocsin.console.context import read_configuration
    from tocsin.schemas.configuration.settings import labels_of
    from tocsin.schemas.records.issues import SEVERITIES

    loaded = read_configuration(config)
    at_ms = unix_ms() if at is None else time_ms("--at", at)
    all_labels = {**loaded.config.labels, **labels_of("--label", labels or ())}
    grave = next((one for one in SEVERITIES if severity is not None and one == severity), None)
    issue = sample_issue(loaded.config, rule, grave, all_labels, at_ms)
    steps = decide(loaded.config, issue, path=loaded.path, now_ms=at_ms)
    typer.echo((as_json if json_output else as_text)(issue, steps, at_ms))


def run_tests(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE",
            help="Files of tests [default: *_test.yaml in this folder].",
            show_default=False,
        ),
    ] = None,
    junit: Annotated[
        Path | None,
        typer.Option(
            "--junit", metavar="FILE", help="Write a report for CI systems.", show_default=False
        ),
    ] = None,
    update: Annotated[
        bool, typer.Option("--update", help="Write the golden files instead of comparing them.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Run the unit tests of a configuration.

    Virtual time, no network, and nothing is sent. The exit code is 0 if all tests pass, 1 if not.
    """
    from tocsin.console.configuration.scenarios import read_scenarios
    from tocsin.console.configuration.trials import (
        as_json,
        as_junit,
        as_text,
        try_file,
        write_result,
    )
    from tocsin.console.context import read_configuration

    found = files or sorted(Path().glob("*_test.yaml"))
    if not found:
        raise ConfigurationError("no file of tests: expected *_test.yaml here, or name one")
    tried = []
    for path in found:
        scenarios = read_scenarios(path)
        loaded = read_configuration(scenarios.locate(scenarios.file.config))
        assert loaded.path is not None
        tried.append(try_file(scenarios, loaded.config, path=loaded.path, update=update))
    if junit is not None:
        write_result(junit, as_junit(tried))
    typer.echo(as_json(tried) if json_output else "\n".join(map(as_text, tried)))
    failed = any(trial.failures for one in tried for trial in one.trials)
    raise typer.Exit(FAILED if failed else 0)


def replay(
    config: ConfigOption = None,
    bus: BusOption = None,
    since: FromOption = None,
    until: ToOption = None,
    file: DumpOption = None,
    run: RunOption = None,
    archived: ArchivedOption = False,
    store: StoreOption = None,
    json_output: JsonOption = False,
) -> None:
    """Try a configuration on past issues or telemetry.

    Nothing is sent. The issues are those on the bus, or in a file. With --run, or a dump, the rules
    of the configuration read the telemetry once more: the issues are those that they find. Silences
    of `tocsin silence` are not considered.
    """
    from tocsin.console.configuration.issue_rehearsal import (
        count_issues,
        rehearse,
        replay_json,
        replay_text,
    )
    from tocsin.console.context import read_configuration

    loaded = read_configuration(config)
    past = _telemetry(config, bus, file, run, since, until, archived=archived, store=store)
    if past is not None:
        from tocsin.console.fleet.telemetry_rehearsal import replayed

        typer.echo(asyncio.run(replayed(loaded, past, json_output=json_output)))
        return
    events = _events(config, bus, file, since, until)
    found = asyncio.run(rehearse(loaded.config, events, path=loaded.path))
    typer.echo((replay_json if json_output else replay_text)(found, events=count_issues(events)))


def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="Configuration, or folder.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Configuration, or folder.")],
    bus: BusOption = None,
    since: FromOption = None,
    until: ToOption = None,
    file: DumpOption = None,
    run: RunOption = None,
    archived: ArchivedOption = False,
    store: StoreOption = None,
    json_output: JsonOption = False,
) -> None:
    """Compare two configurations over past issues or telemetry.

    Nothing is sent. The issues are those on the bus of OLD, or in a file. With --run, or a dump,
    the rules of both read the telemetry once more. Prints the issues, notices, stops and
    suppressions that differ, for each run: `-` with OLD, `+` with NEW.
    """
    from tocsin.console.configuration.issue_rehearsal import (
        count_issues,
        diff_json,
        diff_text,
        differences,
        rehearse,
    )
    from tocsin.console.context import read_configuration

    before, after = read_configuration(old), read_configuration(new)
    past = _telemetry(old, bus, file, run, since, until, archived=archived, store=store)
    if past is not None:
        from tocsin.console.fleet.telemetry_rehearsal import compared

        typer.echo(asyncio.run(compared(before, after, past, json_output=json_output)))
        return
    events = _events(old, bus, file, since, until)

    async def both() -> str:
        found = differences(
            await rehearse(before.config, events, path=before.path),
            await rehearse(after.config, events, path=after.path),
        )
        return (diff_json if json_output else diff_text)(found, events=count_issues(events))

    typer.echo(asyncio.run(both()))


def _telemetry(
    config: Path | None,
    bus: str | None,
    file: Path | None,
    run: str | None,
    since: str | None,
    until: str | None,
    *,
    archived: bool,
    store: str | None,
) -> Past | None:
    """What to evaluate once more; None: it is about issues that were found."""
    from tocsin.console.context import read_context
    from tocsin.console.fleet.dump import is_dump
    from tocsin.console.fleet.past_telemetry import Span
    from tocsin.console.fleet.telemetry_rehearsal import past_in_store, past_of_dump, past_on_bus

    from_ms = 0 if since is None else time_ms("--from", since)
    to_ms = None if until is None else time_ms("--to", until)
    span = Span(run, from_ms, to_ms)
    if archived:
        if run is None or file is not None:
            raise ConfigurationError("--archived needs --run, and no --file")
        return past_in_store(read_context(config, bus, store=store), span, run)
    if store is not None:
        raise ConfigurationError("--store is of use with --archived")
    if file is not None and is_dump(file):
        return past_of_dump(file, span)
    if file is not None and run is not None:
        raise ConfigurationError(f"{file}: --run needs a dump of `tocsin bus dump`")
    if run is None:
        return None
    return asyncio.run(past_on_bus(read_context(config, bus), span, unix_ms()))


def _events(
    config: Path | None, bus: str | None, file: Path | None, since: str | None, until: str | None
) -> Sequence[TimedEvent]:
    from tocsin.console.configuration.issue_rehearsal import read_dump
    from tocsin.schemas.records.run_view import RunView

    from_ms = 0 if since is None else time_ms("--from", since)
    to_ms = None if until is None else time_ms("--to", until)
    events = asyncio.run(_on_bus(config, bus)) if file is None else read_dump(file)
    return [
        (at_ms, event)
        for at_ms, event in events
        # A run may have started before.
        if (at_ms >= from_ms or isinstance(event.data, RunView))
        and (to_ms is None or at_ms <= to_ms)
    ]


async def _on_bus(config: Path | None, bus: str | None) -> Sequence[TimedEvent]:
    from tocsin.console.configuration.issue_rehearsal import starts_and_ends
    from tocsin.console.context import read_context
    from tocsin.console.views.bus_view import read_issue_events, read_runs

    context = read_context(config, bus)
    async with context.open_bus(create=False) as opened:
        issues = await read_issue_events(opened, context.topics)
        runs = starts_and_ends(await read_runs(opened, context.topics))
    return sorted([*runs, *issues], key=lambda one: one[0])


def time_ms(option: str, text: str) -> int:
    """A time, or how long ago, as Unix milliseconds.

    Raises:
        ConfigurationError: it is neither.
    """
    from tocsin.schemas.configuration.values import parse_duration

    try:
        return unix_ms() - round(1000 * parse_duration(text).total_seconds())
    except ValueError:
        pass
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigurationError(
            f"{option} {text}: expected a time like 2026-11-20T08:00Z, or how long ago, like 24h"
        ) from None
    zoned = found if found.tzinfo is not None else found.replace(tzinfo=UTC)
    return round(1000 * zoned.timestamp())
