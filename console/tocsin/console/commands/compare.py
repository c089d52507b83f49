"""The command line: `compare`."""

from __future__ import annotations

from typing import Annotated

import typer

from tocsin.console.commands.options import BusOption, ConfigOption, JsonOption, StoreOption
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.exit_codes import FAILED
from tocsin.schemas.ids import check_run_id


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(
        epilog="Example: tocsin compare baseline candidate --fail-if 'step_time>+5%'",
    )(compare)


def compare(
    first: Annotated[
        str, typer.Argument(metavar="A", help="Id of the first run, or its first characters.")
    ],
    second: Annotated[
        str, typer.Argument(metavar="B", help="Id of the second run, or its first characters.")
    ],
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-if",
            metavar="EXPR",
            help="Exit with 1 if a measure changes from A to B by more than this, beyond its noise:"
            " 'step_time > +5%', 'throughput < -3%', 'eval_loss > +0.01'; may be repeated.",
        ),
    ] = None,
    config: ConfigOption = None,
    bus: BusOption = None,
    store: StoreOption = None,
    json_output: JsonOption = False,
) -> None:
    """Compare two runs: what differs first, what is worse.

    The exit code is 0; 1 if a condition of --fail-if holds; 2 if none holds and one cannot be
    judged.
    """
    from tocsin.console.compare.comparison import compare as compare_runs
    from tocsin.console.compare.document import to_json
    from tocsin.console.compare.expression import parse
    from tocsin.console.compare.text import print_comparison
    from tocsin.console.context import read_viewing_context
    from tocsin.console.run_lookup import run_named, store_of
    from tocsin.console.views.terminal import standard_output

    conditions = [parse(text) for text in fail_if or ()]
    for run_id in (first, second):
        check_run_id(run_id)
    context = read_viewing_context(config, bus, store)
    where = store_of(context)
    runs = [run_named(context, where, run_id) for run_id in (first, second)]
    if runs[0].run_id == runs[1].run_id:
        raise ConfigurationError(f"both are run {runs[0].run_id}: expected two different runs")
    comparison = compare_runs(runs[0], runs[1], conditions)
    if json_output:
        typer.echo(to_json(comparison))
    else:
        print_comparison(comparison, standard_output())
    if comparison.failed:
        raise typer.Exit(FAILED)
    comparison.check_decided()
