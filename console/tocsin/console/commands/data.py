"""The command line: `query` and `export`, the numbers of all runs for other programs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from tocsin.console.commands.options import (
    BusOption,
    ConfigOption,
    JsonOption,
    StoreOption,
)
from tocsin.schemas.errors import ConfigurationError

if TYPE_CHECKING:
    from tocsin.store.export.files import Format

_FILES: Final[Mapping[Format, str]] = {
    "csv": "a CSV file",
    "jsonl": "a file of JSON lines",
    "parquet": "a Parquet file",
}
"""What is written for each table."""


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command(
        epilog='Example: tocsin query "SELECT run_id, max(step) FROM steps GROUP BY run_id"'
    )(query)
    group = typer.Typer(
        help="Write a run in other programs' formats.", no_args_is_help=True, rich_markup_mode=None
    )
    example = "Example: tocsin export"
    group.command("tensorboard", epilog=f"{example} tensorboard gpt-7 runs --follow")(tensorboard)
    for form, file in _FILES.items():
        group.command(
            form,
            help=f"Write {file} for each table.\n\n"
            "The tables are runs, issues, deliveries, steps, tensors and system.",
            epilog=f"{example} {form} gpt-7 out",
        )(_file_export(form))
    group.command(
        "mlflow", epilog=f"{example} mlflow gpt-7 --tracking-uri http://mlflow.example.com:5000"
    )(mlflow)
    app.add_typer(group, name="export")


def query(
    sql: Annotated[
        str,
        typer.Argument(
            metavar="SQL",
            help="One SELECT over the tables runs, steps, tensors, system, issues and deliveries; "
            "DESCRIBE TABLE lists its columns.",
        ),
    ],
    run: Annotated[
        list[str] | None,
        typer.Option(
            "--run", metavar="RUN", help="Only this run, which is faster; may be repeated."
        ),
    ] = None,
    timeout: Annotated[
        str, typer.Option("--timeout", metavar="TIME", help="Give up after this time.")
    ] = "60s",
    memory: Annotated[
        int, typer.Option("--memory", metavar="MB", min=64, help="Memory that it may use, MB.")
    ] = 1_024,
    csv_output: Annotated[
        bool, typer.Option("--csv", help="Print CSV instead of a table.")
    ] = False,
    store: StoreOption = None,
    config: ConfigOption = None,
    bus: BusOption = None,
    json_output: JsonOption = False,
) -> None:
    """Ask all runs a question in SQL (DuckDB's dialect).

    Numbers come from the store; runs, issues and deliveries from the bus, too. The question can
    read nothing else and change nothing.
    """
    from tocsin.console.context import read_viewing_context
    from tocsin.console.query.ask import Question, ask
    from tocsin.console.query.output import as_json, shown, write_csv
    from tocsin.console.views.terminal import standard_output

    if json_output and csv_output:
        raise ConfigurationError("expected one of --json and --csv")
    context = read_viewing_context(config, bus, store=store)
    question = Question(sql, run or (), timeout, memory)
    answer = ask(context, question, progress=sys.stderr.isatty())
    if json_output:
        for text in as_json(answer.columns, answer.rows):
            typer.echo(text, nl=False)
    elif csv_output:
        write_csv(answer.columns, answer.rows, sys.stdout)
    else:
        table, line = shown(answer.columns, answer.rows)
        console = standard_output()
        if table is not None:
            console.print(table)
        console.print(line, highlight=False, style="dim")


RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="Id of the run, or its first characters.")
]
FolderArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="Folder to write to; created if missing.")
]
IncarnationOption = Annotated[
    str | None,
    typer.Option(
        "--incarnation",
        metavar="ID",
        help="Training of the run to read [default: the newest].",
        show_default=False,
    ),
]


def tensorboard(
    run: RunArgument,
    folder: FolderArgument,
    follow: Annotated[
        bool, typer.Option("--follow", help="Continue until the run has ended; Ctrl-C exits.")
    ] = False,
    incarnation: IncarnationOption = None,
    store: StoreOption = None,
    config: ConfigOption = None,
    bus: BusOption = None,
) -> None:
    """Write TensorBoard's files: scalars, histograms, issues.

    Histograms are made of the quantiles that were captured. An export repeated replaces its own
    files, and no others.
    """
    from tocsin.console.context import read_viewing_context
    from tocsin.console.run_lookup import run_named, store_of
    from tocsin.store.export.tensorboard import FOLLOW_S, TensorBoardExport

    context = read_viewing_context(config, bus, store=store)
    found = run_named(context, store_of(context), run, incarnation)
    export = TensorBoardExport(found, folder)

    def wait() -> bool:
        time.sleep(FOLLOW_S)
        return True

    try:
        if follow:
            export.follow(wait)
        else:
            export.write()
    except KeyboardInterrupt:
        pass  # the files are whole after each round
    finally:
        export.close()
    done = export.written
    typer.echo(
        f"wrote {done.scalars:,} scalars, {done.histograms:,} histograms and "
        f"{done.issues:,} texts about issues to {export.folder}; "
        f"try: tensorboard --logdir {folder}"
    )


def _file_export(form: Format) -> Callable[..., None]:
    """The command that writes a file of this form for each table."""

    def export(
        run: RunArgument,
        folder: FolderArgument,
        incarnation: IncarnationOption = None,
        store: StoreOption = None,
        config: ConfigOption = None,
        bus: BusOption = None,
    ) -> None:
        from tocsin.console.context import read_viewing_context
        from tocsin.console.run_lookup import run_named, store_of
        from tocsin.store.export.files import export_files

        context = read_viewing_context(config, bus, store=store)
        found = run_named(context, store_of(context), run, incarnation)
        for path, rows in export_files(found, folder / found.run_id, form).items():
            typer.echo(f"{path}: {rows:,} row{'s' * (rows != 1)}")

    return export


def mlflow(
    run: RunArgument,
    tracking_uri: Annotated[
        str,
        typer.Option(
            "--tracking-uri",
            metavar="URI",
            envvar="MLFLOW_TRACKING_URI",
            help="Address of the MLflow server.",
            show_default=False,
        ),
    ],
    experiment: Annotated[
        str, typer.Option("--experiment", metavar="NAME", help="Experiment; created if missing.")
    ] = "tocsin",
    incarnation: IncarnationOption = None,
    store: StoreOption = None,
    config: ConfigOption = None,
    bus: BusOption = None,
) -> None:
    """Send scalars and issues of a run to an MLflow server.

    A run that was sent before is the same run there: what is new is added. MLFLOW_TRACKING_TOKEN,
    or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, log in.
    """
    from tocsin.console.context import read_viewing_context
    from tocsin.console.run_lookup import run_named, store_of
    from tocsin.store.export.mlflow import MlflowServer, export_mlflow

    server = MlflowServer(tracking_uri)
    context = read_viewing_context(config, bus, store=store)
    found = run_named(context, store_of(context), run, incarnation)
    sent = export_mlflow(found, server, experiment)
    again = ", which was there already" if sent.again else ""
    typer.echo(
        f"sent {sent.metrics:,} metrics and {sent.issues:,} issues to the run {sent.run}{again}: "
        f"{sent.url}"
    )
