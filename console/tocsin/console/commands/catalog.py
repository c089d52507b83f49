"""The command line: `catalog`, the built-in rules and a template."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tocsin.console.commands.options import JsonOption


def register(app: typer.Typer) -> None:
    """Add the group to the command line."""
    group = typer.Typer(
        help="List the built-in rules, or create a template for your own.",
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
        typer.Option("--family", metavar="F", help="List only this family.", show_default=False),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """List the rules by family.

    Prints each rule's severity, whether it stops a run, and its name in SageMaker Debugger.
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
            help="Name of the rule, its name in SageMaker Debugger, or your own rule as written "
            "after `use` in the configuration: rules/mine.py:Mine.",
        ),
    ],
    json_output: JsonOption = False,
) -> None:
    """Show the details of one rule.

    Prints when it fires, its inputs, parameters and presets, what to try, and its limits.
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
        str, typer.Argument(metavar="NAME", help="Name of the rule: lower-case letters, digits, _.")
    ],
    folder: Annotated[
        Path,
        typer.Option(
            "--folder", metavar="FOLDER", help="Folder to write to; never overwrites a file."
        ),
    ] = Path("."),
) -> None:
    """Write a template for your own rule, with a passing test."""
    from tocsin.console.catalog.template import config_entry, write_template

    written = write_template(folder, name)
    for path in written:
        typer.echo(f"wrote {path}")
    typer.echo(f"try it: python -m pytest {written[-1]}")
    typer.echo(
        "add to `rules` in the tocsin.yaml of that folder: "
        f"{config_entry(Path(written[0].name), name)}"
    )
