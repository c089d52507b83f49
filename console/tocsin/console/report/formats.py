"""The forms of a report, and which one is meant. Pure."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Final

from tocsin.schemas.errors import ConfigurationError


class ReportFormat(StrEnum):
    """The forms of a report."""

    HTML = "html"
    MD = "md"
    JSON = "json"


_SUFFIXES: Final = {
    ".html": ReportFormat.HTML,
    ".htm": ReportFormat.HTML,
    ".md": ReportFormat.MD,
    ".markdown": ReportFormat.MD,
    ".json": ReportFormat.JSON,
}


def format_of(path: Path | None, wanted: ReportFormat | None) -> ReportFormat:
    """The format that was asked for, else what the name of the file says, else HTML.

    Raises:
        ConfigurationError: the name ends like a file of another format.
    """
    if wanted is not None:
        return wanted
    if path is None or not path.suffix:
        return ReportFormat.HTML
    if path.suffix not in _SUFFIXES:
        raise ConfigurationError(
            f"{path}: expected a file that ends with .html, .md or .json; 'tocsin report --format' "
            "writes to other names, too"
        )
    return _SUFFIXES[path.suffix]
