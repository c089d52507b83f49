"""`tocsin init`: a configuration with examples in comments, of the common settings or of all.

A comment that starts with "# " explains; any other is an example, which works once its "#" is
removed. An example may use what those above it define. The texts are in `templates/`; the rules of
the full one are rendered here, from the catalogue.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Final

from tocsin.console.configuration.field_texts import field_texts
from tocsin.schemas.errors import ConfigurationError
from tocsin.stream_rules.catalogue import RuleCatalogue, built_in
from tocsin.stream_rules.rule import AnyRule

_WIDTH: Final = 100


def first_text() -> str:
    """The text of the short file: what one needs first. Pure."""
    return _template("short.yaml")


def config_text(catalogue: RuleCatalogue | None = None) -> str:
    """The text of the full file, with the rules of the catalogue. Pure."""
    rules = list(catalogue or built_in())
    return _template("full.yaml") + "\n".join(map(_rule, rules)) + _template("more_instances.yaml")


def write_config(path: Path, *, full: bool = False) -> None:
    """Write the short file, or the full one; never over another.

    Raises:
        ConfigurationError: there is one, or it cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(config_text() if full else first_text())
    except FileExistsError:
        raise ConfigurationError(
            f"{path} already exists; nothing was written. Try another name: "
            f"tocsin init {path.with_stem(path.stem + '-new')}"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror or error}") from error


def severity_text(rule: type[AnyRule]) -> str:
    """The severity of its issues, and whether they stop a run by default."""
    meta = rule.meta
    text = f"Severity: {meta.severity}"
    if meta.stop_worthy:
        text += "; stops the run" if meta.severity == "critical" else "; if critical, stops the run"
    return text + "."


def _template(name: str) -> str:
    return files(__package__).joinpath("templates", name).read_text(encoding="utf-8")


def _rule(rule: type[AnyRule]) -> str:
    """A rule with its parameters at their defaults."""
    meta = rule.meta
    about = f"{meta.name}: {meta.meaning} {severity_text(rule)}"
    lines = [*_prose(about), f"  #- name: {meta.name}"]
    fields = field_texts(meta.params)
    if fields:
        lines.append("  #  params:")
    values = [f"  #    {field.key}: {field.default or 'null'}" for field in fields]
    width = max(map(len, values), default=0)
    for field, value in zip(fields, values, strict=True):
        unit = f" ({field.unit})" if field.unit else ""
        lines += _beside(value.ljust(width + 2) + "# ", f"{field.meaning}{unit}")
    # A list of actions would end the default of a rule that stops only by its critical issues.
    if not meta.stop_worthy:
        lines.append("  #  actions: [ml-hook]")
    elif meta.severity == "critical":
        lines.append("  #  actions: [stop, ml-hook]")
    return "".join(f"{line}\n" for line in lines)


def _prose(text: str) -> Iterable[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="  # ", subsequent_indent="  # ")


def _beside(before: str, text: str) -> Iterator[str]:
    """A comment behind a value, going on below where it is long."""
    rest = "  #" + " " * (len(before) - 5) + "# "
    yield from textwrap.wrap(text, _WIDTH, initial_indent=before, subsequent_indent=rest)
