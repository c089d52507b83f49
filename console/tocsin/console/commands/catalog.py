"""The command line: `catalog`, the rules that there are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tocsin.console.commands.options import JsonOption


def register(app: typer.Typer) -> None:
    """Add the group to the command line."""
    group = typer.Typer(
        help="The rules that there are, and a template for one of your own.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    example = "Example: tocsin catalog"
    group.command("list", epilog=f"{example} list --family numerical")(list_rules)
    group.command("show", epilog=f"{example} show VanishingGradient")(show_rule)
    group.command("new", epilog=f"{example} new batch_too_hot")(new_rule)
    app.add_typer(group, name="catalog")


def list_rules(
    family: Annotated[
        str | None,
        typer.Option("--family", metavar="F", help="Only of this family.", show_default=False),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """List the rules, by family.

    Each with its severity, whether it stops a run, and SageMaker Debugger's name for it.
    """
    from tocsin.console.catalog.table import list_json, list_notes, list_table
    from tocsin.console.views.terminal import standard_output
    from tocsin.stream_rules.catalogue import built_in

    catalogue = built_in()
    if json_output:
        typer.echo(list_json(catalogue, family))
        return
    console = standard_output()
    console.print(list_table(catalogue, family))
    console.print(list_notes(catalogue, family), highlight=False, markup=False)


def show_rule(
    name: Annotated[
        str,
        typer.Argument(
            metavar="RULE",
            help="Its name, or SageMaker Debugger's for it; or one of your own, as `use` has it in "
            "the configuration: rules/mine.py:Mine.",
        ),
    ],
    json_output: JsonOption = False,
) -> None:
    """Show all about one rule.

    When it fires, what it reads, its parameters and presets, what to try, what it does not see.
    """
    from tocsin.console.catalog.table import find, show, show_json
    from tocsin.console.views.terminal import standard_output
    from tocsin.stream_rules.catalogue import built_in

    rule = find(built_in(), name, Path.cwd())
    if json_output:
        typer.echo(show_json(rule))
        return
    console = standard_output()
    for number, block in enumerate(show(rule)):
        if number:
            console.print()
        console.print(block, highlight=False)


def new_rule(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Of the rule: lower-case letters, digits, _.")
    ],
    folder: Annotated[
        Path, typer.Option("--folder", help="Where to write it; no file is overwritten.")
    ] = Path("."),
) -> None:
    """Write a rule of your own to begin with, and a test that passes."""
    from tocsin.console.catalog.template import config_entry, write_template

    written = write_template(folder, name)
    for path in written:
        typer.echo(f"wrote {path}")
    typer.echo(f"try it: python -m pytest {written[-1]}")
    typer.echo(
        f"in a tocsin.yaml beside it, under rules: {config_entry(Path(written[0].name), name)}"
    )
