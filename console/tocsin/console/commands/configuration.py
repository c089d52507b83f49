"""The command line: `check`, `fmt`, `schema` and `init`, about tocsin.yaml."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tocsin.console.commands.options import JsonOption
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.exit_codes import FAILED, WRONG_USAGE


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command(epilog="Example: tocsin check tocsin.yaml")(check)
    app.command("fmt", epilog="Example: tocsin fmt --check tocsin.yaml")(format_files)
    app.command(epilog="Example: tocsin schema > tocsin.schema.json")(schema)
    app.command(epilog="Example: tocsin init && tocsin check")(init)


class Form(StrEnum):
    """How `check` prints what it found."""

    TEXT = "text"
    JSON = "json"
    GITHUB = "github"
    SARIF = "sarif"


def check(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE",
            help="Files or folders to check [default: $TOCSIN_CONFIG, else ./tocsin.yaml].",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        list[Path] | None,
        typer.Option("--config", metavar="FILE", help="The same as FILE.", show_default=False),
    ] = None,
    form: Annotated[
        Form,
        typer.Option(
            "--format",
            help="text, json, github (annotations of a workflow) or sarif (code scanning).",
            metavar="FORMAT",
        ),
    ] = Form.TEXT,
    json_output: JsonOption = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="List all rules, not only how many there are.")
    ] = False,
) -> None:
    """Check the configuration.

    Prints every problem with file and line, or the settings in effect. The exit code is 0 if the
    configuration is valid, 2 if not. A secret or trusted key that is missing on this machine is a
    problem when no FILE is given, and a note for a given FILE.
    """
    from tocsin.console.configuration.annotations import as_github, as_sarif
    from tocsin.console.configuration.check import as_json, as_text, check_files

    found = check_files([*(files or ()), *(config or ())], os.environ, Path.cwd())
    match Form.JSON if json_output else form:
        case Form.TEXT:
            text = "\n".join(as_text(checked, verbose=verbose) for checked in found)
        case Form.JSON:
            text = as_json(found)
        case Form.GITHUB:
            text = as_github(found)
        case Form.SARIF:
            text = as_sarif(found)
    typer.echo(text)
    raise typer.Exit(WRONG_USAGE if any(checked.problems for checked in found) else 0)


def format_files(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE",
            help="Files or folders to format [default: $TOCSIN_CONFIG, else ./tocsin.yaml].",
            show_default=False,
        ),
    ] = None,
    check_only: Annotated[
        bool,
        typer.Option("--check", help="Write nothing; exit with 1 if a file is not formatted."),
    ] = False,
) -> None:
    """Format configuration files: indentation and spaces.

    Values, comments and line breaks stay as they are.
    """
    from tocsin.console.configuration.layout import formatted, rewrite
    from tocsin.schemas.configuration.sources import config_files, config_path, read_config

    found = files or [path for path in [config_path(None, os.environ, folder=Path.cwd())] if path]
    if not found:
        raise ConfigurationError("no file: name one, or write one with `tocsin init`")
    changed = 0
    for path in (file for one in found for file in config_files(one)):
        text = read_config(path)
        new = formatted(text, source=str(path))
        if new == text:
            continue
        changed += 1
        if not check_only:
            rewrite(path, new)
        typer.echo(f"not formatted: {path}" if check_only else f"formatted: {path}")
    raise typer.Exit(FAILED if changed and check_only else 0)


def schema() -> None:
    """Print the JSON Schema of the configuration, for editors."""
    from tocsin.actions.receivers.registry import ReceiverKinds
    from tocsin.actions.targets.registry import TargetKinds
    from tocsin.console.configuration.editor_schema import as_text, editor_schema
    from tocsin.stream_rules.catalogue import built_in

    kinds = ReceiverKinds().models(), TargetKinds().models()
    typer.echo(as_text(editor_schema(built_in(), *kinds)), nl=False)


def init(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="File to write; must not exist.")
    ] = Path("tocsin.yaml"),
    full: Annotated[
        bool, typer.Option("--full", help="Write all keys and all rules, with their defaults.")
    ] = False,
) -> None:
    """Write a configuration file with examples in comments."""
    from tocsin.console.configuration.init import write_config

    write_config(file, full=full)
    typer.echo(f"wrote {file}; to see the settings in effect: tocsin check {file}")
