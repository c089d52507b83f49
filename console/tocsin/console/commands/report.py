"""The command line: `report`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tocsin.console.commands.options import BusOption, ConfigOption, StoreOption
from tocsin.console.report.formats import ReportFormat, format_of
from tocsin.schemas.ids import check_run_id
from tocsin.schemas.monotonic_clock import unix_ms


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(epilog="Example: tocsin report gpt-2026-11-21 -o report.html")(report)


def report(
    run_id: Annotated[
        str, typer.Argument(metavar="RUN", help="Id of the run, or its first characters.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write to this file; - is standard output [default: tocsin-report-RUN.html; "
            "Markdown and JSON go to standard output].",
            show_default=False,
        ),
    ] = None,
    form: Annotated[
        ReportFormat | None,
        typer.Option(
            "--format",
            metavar="html|md|json",
            help="Format of the report [default: as FILE ends, else html].",
            show_default=False,
        ),
    ] = None,
    config: ConfigOption = None,
    bus: BusOption = None,
    store: StoreOption = None,
) -> None:
    """Write a report of a run: verdict, charts, findings.

    Each section has a finding and what to do about it. The run may still be running. The HTML file
    needs nothing else: no internet, no server.
    """
    from tocsin.console.context import read_viewing_context
    from tocsin.console.files import check_writable
    from tocsin.console.report.report import report_of
    from tocsin.console.report.writing import write_report
    from tocsin.console.run_lookup import run_named, store_of

    check_run_id(run_id)
    if output != Path("-"):
        check_writable(output, "--output", "report.html")
    chosen = format_of(output, form)
    context = read_viewing_context(config, bus, store)
    run = run_named(context, store_of(context), run_id)
    made = report_of(run, now_ms=unix_ms(), prices=context.config.prices)
    written = write_report(made, output, chosen)
    if written is not None:
        print(f"tocsin: the report is in {written}", file=sys.stderr)
