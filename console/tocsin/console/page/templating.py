"""Templates, and the regions of a page. Whatever a run, a rule or a person wrote is escaped.

A page's template consists of blocks; each block that is in an element with `data-region` of its
name is a region, which the browser replaces when it changes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from tocsin.console.page.assets import asset_url, plotly_styles
from tocsin.console.page.hub import Rendered
from tocsin.schemas.text import number_text, plain_line, time_text

if TYPE_CHECKING:
    from jinja2 import Environment

_SHELL: Final = "shell.html.jinja"


@dataclass(frozen=True, slots=True)
class Content:
    """What a page shows: its template's name without the ending, and the values for it.

    `items` are regions beside the blocks, for lists: name -> (template, value). The frame has them
    in `items` as HTML.
    """

    template: str
    values: Mapping[str, object]
    items: Mapping[str, tuple[str, object]] = field(default_factory=dict)


def rendered(content: Content, *, csrf: str) -> Rendered:
    """The regions of a page. Takes some milliseconds of processor time. `csrf` is what its forms
    repeat.
    """
    from markupsafe import Markup

    environment = _environment()
    template = environment.get_template(f"{content.template}.html.jinja")
    items = {
        name: environment.get_template(f"{kind}.html.jinja").render(item=value)
        for name, (kind, value) in content.items.items()
    }
    values = {
        **content.values,
        "csrf": csrf,
        "items": {name: Markup(html) for name, html in items.items()},
    }
    context = template.new_context(values)
    regions = {name: "".join(block(context)) for name, block in template.blocks.items()}
    return Rendered({**regions, **items}, lambda: template.render(values))


def shell(frame: str, **values: object) -> str:
    """A whole HTML document around a page's frame."""
    from markupsafe import Markup

    return _environment().get_template(_SHELL).render(frame=Markup(frame), **values)


def fragment(template: str, **values: object) -> str:
    """One template rendered, for answers and small pages."""
    return _environment().get_template(f"{template}.html.jinja").render(**values)


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["asset_url"] = asset_url
    environment.globals["plotly_styles"] = plotly_styles
    environment.filters["line"] = plain_line
    environment.filters["number"] = number_text
    environment.filters["moment"] = time_text
    environment.filters["iso"] = lambda at_ms: f"{datetime.fromtimestamp(at_ms / 1000, UTC):%FT%TZ}"
    environment.filters["part"] = lambda text: quote(str(text), safe="")
    # What is SVG was made by us, of escaped texts.
    environment.filters["svg"] = Markup
    # Blocks are rendered one by one, and see no imports of their template.
    environment.globals["ui"] = environment.get_template("macros.html.jinja").module
    return environment
