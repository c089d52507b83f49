"""Writing a report: in the form that was asked for, to a file or to standard output."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Final

from tocsin.console.report.document import to_json
from tocsin.console.report.formats import ReportFormat
from tocsin.console.report.html import to_html
from tocsin.console.report.markdown import to_markdown
from tocsin.console.report.report import Report
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.whole_file import whole_file

STDOUTS: Final = (Path("-"), Path("/dev/stdout"))
"""The latter leads to a file, maybe, that a shell appends to: not to be replaced."""


def rendered(report: Report, form: ReportFormat) -> str:
    """The text of the report. Raises MissingExtra: HTML needs jinja2."""
    if form is ReportFormat.HTML:
        return to_html(report)
    return to_markdown(report) if form is ReportFormat.MD else to_json(report) + "\n"


def write_report(report: Report, path: Path | None, form: ReportFormat) -> Path | None:
    """Write it, whole or not at all, into a device or a pipe as it is; the file, or None for
    standard output.

    Without a path HTML goes to `tocsin-report-RUN.html` here, the others to standard output.

    Raises:
        ConfigurationError: the file cannot be written.
        MissingExtra: HTML needs jinja2.
    """
    text = rendered(report, form)
    if path is None and form is ReportFormat.HTML:
        path = Path(f"tocsin-report-{report.run_id}.html")
    if path is None or path in STDOUTS:
        if form is ReportFormat.HTML and isinstance(sys.stdout, io.TextIOWrapper):
            # The page says itself that it is UTF-8, whatever the locale is.
            sys.stdout.flush()
            sys.stdout.buffer.write(text.encode())
        else:
            sys.stdout.write(text)
        return None
    try:
        with whole_file(path) as draft:
            draft.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"cannot write {path}: {error.strerror or error}; name another file with -o"
        ) from error
    return path
