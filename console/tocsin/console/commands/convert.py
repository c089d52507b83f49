"""The command line: `convert`, configurations of other tools."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tocsin.schemas.errors import ConfigurationError


def register(app: typer.Typer) -> None:
    """Add the group to the command line."""
    group = typer.Typer(
        help="Convert another tool's configuration to a tocsin.yaml.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    epilog = "Example: tocsin convert sagemaker job.json --out tocsin.yaml"
    group.callback()(_group)
    group.command("sagemaker", epilog=epilog)(sagemaker)
    app.add_typer(group, name="convert")


def _group() -> None:
    """Convert another tool's configuration to a tocsin.yaml."""


def sagemaker(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="JSON file: a CreateTrainingJob request or its rule configurations; - for stdin.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="File to write; must not exist [default: stdout]."
        ),
    ] = None,
    only: Annotated[
        bool, typer.Option("--only", help="Disable all rules that are not in FILE.")
    ] = False,
) -> None:
    """Convert rule configurations of SageMaker Debugger.

    Converts rules, parameters, actions and collections; lists what has no equivalent, with its
    line. The exit code is 0, or 2 if FILE cannot be read.
    """
    from tocsin.console.sagemaker.convert import convert
    from tocsin.schemas.configuration.problems import split_lines

    source = "stdin" if str(file) == "-" else str(file)
    text = _read(file)
    done = convert(text, source, only=only)
    if out is None:
        typer.echo(done.text, nl=False)
    else:
        _write(out, done.text)
    for warning in done.warnings:
        typer.echo(warning.render(split_lines(text)), err=True)
    if out is not None:
        typer.echo(f"wrote {out}; to see the settings in effect: tocsin check {out}")


def _read(file: Path) -> str:
    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        return data.decode("utf-8-sig")
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"cannot read {file}: the file is not UTF-8") from error


def _write(out: Path, text: str) -> None:
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigurationError(f"{out} already exists; nothing was written") from None
    except OSError as error:
        raise ConfigurationError(f"cannot write {out}: {error.strerror or error}") from error
