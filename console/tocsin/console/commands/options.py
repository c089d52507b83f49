"""Options that several subcommands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Configuration file, or folder of *.yaml [default: $TOCSIN_CONFIG, else "
        "./tocsin.yaml].",
        show_default=False,
    ),
]
ReceiversArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECEIVER",
        help="Receivers of the configuration [default: all].",
        show_default=False,
    ),
]
NotifyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--notify",
        metavar="URL|ADDRESS",
        help="Send to this address instead, as tocsin run --notify does; may be repeated.",
    ),
]
BusOption = Annotated[
    str | None,
    typer.Option(
        "--bus",
        metavar="URL",
        help="URL of the bus: embedded:PATH or kafka://HOST:PORT[,HOST:PORT…] [default: "
        "$TOCSIN_BUS, else the configuration's, else embedded:.tocsin/bus.db].",
        show_default=False,
    ),
]
StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        help="Store of runs: a folder or s3://BUCKET/PREFIX [default: $TOCSIN_STORE, else the "
        "configuration's, else the folder store beside an embedded bus].",
        show_default=False,
    ),
]
WhyOption = Annotated[
    str,
    typer.Option("--why", metavar="TEXT", help="Reason, shown to others.", show_default=False),
]
ByOption = Annotated[
    str | None, typer.Option("--by", metavar="NAME", help="Your name [default: USER@HOST].")
]
SinceOption = Annotated[
    str | None,
    typer.Option(
        "--since",
        metavar="TIME",
        help="Show only what changed since then: a duration like 2h, or a time with its zone like "
        "2026-12-01T00:00:00Z.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
HttpOption = Annotated[
    str | None,
    typer.Option(
        "--http", metavar="HOST:PORT", help="Serve /metrics, /healthz and /readyz at this address."
    ),
]
AllowCidrOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-cidr",
        metavar="CIDR",
        help="Private addresses that webhooks, chat and heartbeats may reach; may be repeated.",
    ),
]
AllowCommandOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-command",
        metavar="PROGRAM",
        help="Full path of a program that receivers of the type command may run; may be repeated.",
    ),
]
