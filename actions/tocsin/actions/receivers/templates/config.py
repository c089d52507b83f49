"""Configuration of a template."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from tocsin.schemas.configuration.sections import Section

_LONGEST: Final = 8_000
"""Characters of a template."""

Language = Literal["fields", "jinja"]


class TemplateConfig(Section):
    """A text of your own, in which the fields of an issue are replaced by their values."""

    text: str = Field(
        min_length=1, max_length=_LONGEST, examples=["{word} {run}: {headline} ({labels.team})"]
    )
    """The text. Its fields are listed in
    [receivers](receivers.md#texts-of-your-own)."""
    language: Language = Field(default="fields", examples=["jinja"])
    """`fields` replaces `{field}`; `jinja` also has conditions, loops and filters."""
