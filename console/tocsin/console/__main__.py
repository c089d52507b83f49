"""The command line: each subcommand's options, and which function does the work."""

from __future__ import annotations

import os
import sys

from tocsin.schemas.own_python import leave_users_modules

if __name__ == "__main__" or os.path.basename(sys.argv[0]) == "tocsin":
    # A project's modules must not stand in for those that the commands need.
    leave_users_modules()

import asyncio
import importlib.util
import os
import sys
from collections.abc import Coroutine
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tocsin.bus.port import BusError
from tocsin.console.commands import catalog, convert, node, runs
from tocsin.console.commands.options import BusOption, ConfigOption, HttpOption, JsonOption
from tocsin.console.services.log import log_to_stderr
from tocsin.schemas.errors import ConfigurationError, MissingExtra
from tocsin.schemas.ids import check_run_id
from tocsin.schemas.steady_clock import unix_ms

# Each command imports what it needs when it is called: `tocsin run` must not wait for what only
# `tocsin demo` uses.

app = typer.Typer(
    name="tocsin",
    help="An alarm bell for machine-learning training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
bus_app = typer.Typer(
    help="Look after the bus's topics.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(bus_app, name="bus")


class ScenarioOption(StrEnum):
    """The demo's scenarios."""

    HEALTHY = "healthy"
    NAN = "nan"
    DIVERGE = "diverge"
    STALL = "stall"


@app.command(
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
    epilog="Example: tocsin run --label team=vision -- python train.py --lr 0.001",
)
def run(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- CMD…", help="The job.", show_default=False)
    ] = None,
    config: ConfigOption = None,
    bus: BusOption = None,
    run_id: Annotated[
        str | None,
        typer.Option(
            "--run-id",
            help="Name of the run [default: $TOCSIN_RUN_ID, the scheduler's, a new one].",
        ),
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option("--label", metavar="K=V", help="A label; may be repeated.")
    ] = None,
    notify: Annotated[
        list[str] | None,
        typer.Option(
            "--notify",
            metavar="URL|ADDRESS",
            help="Send each issue there too: https://…, mailto:me@example.com, slack://…, "
            "discord://…, tgram://…; may be repeated.",
        ),
    ] = None,
    summary: Annotated[
        Path | None, typer.Option("--summary", help="Write a JSON object there at the end.")
    ] = None,
    no_stop: Annotated[bool, typer.Option("--no-stop", help="Never stop the job.")] = False,
    drain: Annotated[
        float, typer.Option("--drain", min=0, help="Wait so long for deliveries at the end, s.")
    ] = 15.0,
    require_bus: Annotated[
        bool, typer.Option("--require-bus", help="Do not start the job unwatched.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Say only what went wrong.")] = False,
) -> None:
    """Run a job and watch it; no change to its code is needed.

    The exit code is the job's own; 79 if tocsin stopped it; 2 if nothing was started.
    """
    from tocsin.console.services.launch import RunOptions, plan_run
    from tocsin.emitter.launch.launcher import launch

    options = RunOptions(
        config=config,
        bus=bus,
        run_id=run_id,
        labels=label or (),
        notify=notify or (),
        summary=summary,
        stop=not no_stop,
        drain_s=drain,
        require_bus=require_bus,
        quiet=quiet,
    )
    raise typer.Exit(launch(plan_run(command or (), options)))


@app.command(epilog="Example: tocsin demo stall")
def demo(
    scenarios: Annotated[
        list[ScenarioOption] | None,
        typer.Argument(
            metavar="SCENARIO",
            help="What to show; several run side by side [default: healthy and nan].",
            show_default=False,
        ),
    ] = None,
    bus: Annotated[
        str | None,
        typer.Option("--bus", help="As for run [default: a new one in a temporary folder]."),
    ] = None,
) -> None:
    """Train real models, healthy and going bad, and show issue, message and stop as they happen."""
    _need("demo", "tocsin demo", "torch", "sklearn", "aiosmtpd")
    _need("actions", "tocsin demo", "aiohttp", "aiosmtplib")
    from tocsin.console.demo.demo import Demo, ScenarioName

    chosen = scenarios or (ScenarioOption.HEALTHY, ScenarioOption.NAN)
    names: list[ScenarioName] = [scenario.value for scenario in dict.fromkeys(chosen)]

    async def play() -> bool:
        play = Demo(names, bus, Console())
        return await play.run()

    raise typer.Exit(0 if asyncio.run(play()) else 1)


@app.command(epilog="Example: tocsin rules --bus kafka://kafka-1:9092")
def rules(config: ConfigOption = None, bus: BusOption = None, http: HttpOption = None) -> None:
    """Run one rules worker: telemetry in, issues out. Start as many as you like."""
    from tocsin.console.context import read_setting
    from tocsin.console.services.workers import run_rules

    log_to_stderr()
    raise typer.Exit(_work(run_rules(read_setting(config, bus), http=http)))


@app.command(epilog="Example: tocsin actions --bus kafka://kafka-1:9092 --allow-cidr 10.0.0.0/8")
def actions(
    config: ConfigOption = None,
    bus: BusOption = None,
    http: HttpOption = None,
    allow_cidr: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-cidr",
            metavar="CIDR",
            help="Private addresses that webhooks and chat may go to; may be repeated.",
        ),
    ] = None,
) -> None:
    """Run one action worker: issues in, notices and stops out. Start as many as you like."""
    from tocsin.console.context import read_setting
    from tocsin.console.services.workers import run_actions

    log_to_stderr()
    setting = read_setting(config, bus)
    raise typer.Exit(_work(run_actions(setting, allow_cidr=allow_cidr or (), http=http)))


@app.command(epilog="Example: tocsin status --json")
def status(
    run_id: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Only this run.", show_default=False)
    ] = None,
    config: ConfigOption = None,
    bus: BusOption = None,
    json_output: JsonOption = False,
) -> None:
    """Show what runs, what was found and what was done about it."""
    from tocsin.console.context import read_setting
    from tocsin.console.views.bus_view import BusView, read_view
    from tocsin.console.views.selection import choose_run
    from tocsin.console.views.status import print_status, status_json
    from tocsin.console.views.terminal import standard_output

    if run_id is not None:
        check_run_id(run_id)
    setting = read_setting(config, bus)

    async def read() -> tuple[str, BusView]:
        async with setting.open_bus(create=False) as opened:
            view = await read_view(opened, setting.topics, run_id)
            if run_id is not None and not view.runs and not view.issues:
                every = await read_view(opened, setting.topics)
                chosen = choose_run(every.runs, run_id).run_id
                view = await read_view(opened, setting.topics, chosen)
            return opened.url, view

    url, view = asyncio.run(read())
    if json_output:
        typer.echo(status_json(view))
    else:
        print_status(
            view,
            bus_url=url,
            now_ms=unix_ms(),
            console=standard_output(),
            again=_again(config, bus),
        )


runs.register(app)
node.register(app)
catalog.register(app)
convert.register(app)


@app.command(epilog="Example: tocsin check tocsin.yaml")
def check(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FILE…]",
            help="Files to check [default: $TOCSIN_CONFIG, else ./tocsin.yaml].",
            show_default=False,
        ),
    ] = None,
    json_output: JsonOption = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Name all rules, not only their number.")
    ] = False,
) -> None:
    """Check the configuration: all that is wrong, with its place, or what holds.

    The exit code is 0 if it can be used, 2 if not. Without FILE, secrets and trusted keys that are
    not on this machine count; of a FILE that is named, they are noted.
    """
    from tocsin.console.configuration.check import as_json, as_text, check_files

    found = check_files(files or (), os.environ, Path.cwd())
    texts = [as_text(checked, verbose=verbose) for checked in found]
    typer.echo(as_json(found) if json_output else "\n".join(texts))
    raise typer.Exit(2 if any(checked.problems for checked in found) else 0)


@app.command(epilog="Example: tocsin schema > tocsin.schema.json")
def schema() -> None:
    """Print the JSON Schema of the configuration, for editors."""
    from tocsin.console.configuration.editor_schema import as_text, editor_schema
    from tocsin.stream_rules.catalogue import built_in

    typer.echo(as_text(editor_schema(built_in())), nl=False)


@app.command(epilog="Example: tocsin init && tocsin check")
def init(
    file: Annotated[
        Path, typer.Argument(metavar="[FILE]", help="The file to write; it must not be there yet.")
    ] = Path("tocsin.yaml"),
    full: Annotated[
        bool, typer.Option("--full", help="Write all keys and all rules, with their defaults.")
    ] = False,
) -> None:
    """Write a configuration that changes nothing, with examples in comments."""
    from tocsin.console.configuration.init import write_config

    write_config(file, full=full)
    typer.echo(f"wrote {file}; what holds with it: tocsin check {file}")


@bus_app.command("init", epilog="Example: tocsin bus init --bus kafka://kafka-1:9092")
def bus_init(
    config: ConfigOption = None, bus: BusOption = None, json_output: JsonOption = False
) -> None:
    """Create the topics that are missing; never change one that exists."""
    _topics(config, bus, json_output, create=True)


@bus_app.command("show", epilog="Example: tocsin bus show --json")
def bus_show(
    config: ConfigOption = None, bus: BusOption = None, json_output: JsonOption = False
) -> None:
    """Show the topics, and where they are not as they should be."""
    _topics(config, bus, json_output, create=False)


def _topics(config: Path | None, bus: str | None, json_output: bool, *, create: bool) -> None:
    from tocsin.bus.port import TopicState
    from tocsin.console.context import read_setting
    from tocsin.console.views.topics import print_topics, topics_json

    setting = read_setting(config, bus)

    async def look() -> tuple[str, list[TopicState]]:
        async with setting.open_bus(create=create) as opened:
            specs = setting.topics.specs()
            states = await opened.init(specs) if create else await opened.show(specs)
            return opened.url, list(states)

    url, states = asyncio.run(look())
    if json_output:
        typer.echo(topics_json(url, states))
    else:
        print_topics(url, states, Console())


def _again(config: Path | None, bus: str | None) -> tuple[str, ...]:
    """The options with which the next command finds the same bus."""
    from tocsin.console.services.launch import RunOptions

    return RunOptions(config=config, bus=bus).again


def _need(extra: str, what: str, *libraries: str) -> None:
    """Raises MissingExtra: one of the libraries is not installed."""
    if any(importlib.util.find_spec(library) is None for library in libraries):
        raise MissingExtra(extra, what)


def _work(worker: Coroutine[None, None, int]) -> int:
    """Run a worker. A bus that is away is no mistake of the user: 1, so that whatever started the
    worker (systemd, an engine) starts it again; 2 says that this would be in vain."""
    try:
        return asyncio.run(worker)
    except BusError as error:
        if isinstance(error, ConfigurationError):
            raise
        _say(error)
        return 1


def _say(error: Exception) -> None:
    for line in str(error).splitlines():
        print(f"tocsin: {line}", file=sys.stderr)


def main() -> None:
    """The console script. Mistakes of the user are sentences, not tracebacks."""
    try:
        app(prog_name="tocsin")
    except (ConfigurationError, BusError) as error:
        _say(error)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
