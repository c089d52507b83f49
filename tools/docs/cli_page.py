"""`docs/reference/cli.md`, made of the command line itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from typer.main import get_command

from tocsin.console.__main__ import app

_HEAD: Final = """\
# Command line

`tocsin COMMAND --help` prints the same. Options come before the job's command; everything after
`--` belongs to the job. For [exit codes](exit-codes.md) and
[environment variables](environment.md), see their pages.

"""


def cli_page() -> str:
    """The text of `docs/reference/cli.md`. Pure."""
    sections = list(_sections(get_command(app), "tocsin"))
    rows = [f"| [`{path}`](#{_anchor(path)}) | {_cell(line)} |\n" for path, line, _ in sections]
    table = "| command | |\n| --- | --- |\n" + "".join(rows)
    return _HEAD + table + "".join(text for _, _, text in sections)


# click's classes are typed as part of typer here, and as a package of their own there.
def _sections(command: Any, path: str) -> Iterator[tuple[str, str, str]]:
    """Each command below this one: its path, its help in one line, its section."""
    for name, child in command.commands.items():
        below = f"{path} {name}"
        if hasattr(child, "commands"):
            yield from _sections(child, below)
            continue
        paragraphs = re.sub(r" *\n *", "\n", child.help or "").strip().split("\n\n")
        yield below, paragraphs[0].replace("\n", " "), _section(child, below, paragraphs)


def _section(command: Any, path: str, paragraphs: list[str]) -> str:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option" and not one.hidden]
    usage = [path, *(["[OPTIONS]"] if options else []), *map(_usage, arguments)]
    text = f"\n## `{path}`\n\n" + "\n\n".join(paragraphs)
    text += f"\n\n```text\n{' '.join(usage)}\n```\n"
    rows = [(_metavar(one), one) for one in arguments]
    rows += [
        (", ".join(one.opts) + (f" {one.metavar}" if one.metavar else ""), one) for one in options
    ]
    if rows:
        text += "\n| | |\n| --- | --- |\n"
        text += "".join(f"| `{_cell(name)}` | {_cell(_meaning(one))} |\n" for name, one in rows)
    if command.epilog:
        text += f"\n```console\n$ {command.epilog.removeprefix('Example: ')}\n```\n"
    return text


def _metavar(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper()).strip("[]")


def _usage(argument: Any) -> str:
    name = _metavar(argument)
    name += "…" if argument.nargs == -1 and not name.endswith("…") else ""
    return name if argument.required else f"[{name}]"


def _meaning(parameter: Any) -> str:
    """Its help, with the default if the help does not name it."""
    text = (parameter.help or "").strip()
    default = getattr(parameter.default, "value", parameter.default)
    if "[default:" in text or default in (None, False, (), "") or callable(default):
        return text
    return f"{text} [default: {default}]"


def _anchor(path: str) -> str:
    return path.replace(" ", "-")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
