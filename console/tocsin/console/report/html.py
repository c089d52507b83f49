"""The HTML form of a report: one file that needs nothing else. Pure, but that a template is read.

The policy in it forbids scripts and all that is not in the file; the style is allowed by its hash.
"""

from __future__ import annotations

import functools
import re
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from tocsin.console.charts import style_source, stylesheet
from tocsin.console.report.report import Report
from tocsin.schemas.errors import require_extra
from tocsin.schemas.text import plain_line, time_text

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

LABELS: Final = {
    "critical": "critical",
    "warning": "warning",
    "info": "worth a look",
    "good": "good",
    "plain": "",
    "not_captured": "not captured",
}

_CODE: Final = re.compile(r"`([^`]+)`")
_FORBIDDEN: Final = ("base-uri 'none'", "form-action 'none'")


def to_html(report: Report) -> str:
    """The whole file. Raises MissingExtra: jinja2 is not installed."""
    style = f"{stylesheet()}\n{_own_style()}"
    policy = "; ".join(("default-src 'none'", f"style-src {style_source(style)}", *_FORBIDDEN))
    template = _environment().get_template("report.html.jinja")
    return template.render(
        report=report, style=style, policy=policy, labels=LABELS, made=time_text(report.made_ms)
    )


@functools.cache
def _own_style() -> str:
    return (files("tocsin.console.report") / "report.css").read_text(encoding="utf-8")


@functools.cache
def _environment() -> Environment:
    require_extra("page", "a report in HTML", "jinja2")
    from jinja2 import Environment, PackageLoader, StrictUndefined

    def shown(value: object) -> object:
        # Names of anybody go through here: none may turn its direction or hide.
        named = isinstance(value, str) and not hasattr(value, "__html__")
        return plain_line(str(value)) if named else value

    environment = Environment(
        loader=PackageLoader("tocsin.console.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["sentence"] = _sentence
    return environment


def _sentence(text: str) -> Markup:
    """A sentence, escaped; what is between backticks is set as code."""
    from markupsafe import Markup, escape

    # A str: joining parts of a Markup would escape the tags.
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(plain_line(text)))))
