"""The fields of a request: of its form, its path, its numbers. All of it is bounded."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qs

from tocsin.console.refusal import RefusedError

if TYPE_CHECKING:
    from starlette.requests import Request

LONGEST_BODY: Final = 16_384
MAX_FIELDS: Final = 12
_BODY_S: Final = 10.0
_FORM: Final = "application/x-www-form-urlencoded"


async def fields_of(request: Request) -> Mapping[str, str]:
    """The fields of a form. Raises RefusedError: the body is none, or too long."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _FORM:
        raise RefusedError(415, "Expected the form of the page.")
    body = b""
    try:
        async with asyncio.timeout(_BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > LONGEST_BODY:
                    raise RefusedError(413, "That is too long.")
        found = parse_qs(body.decode(), max_num_fields=MAX_FIELDS, keep_blank_values=True)
    except (TimeoutError, ValueError):
        raise RefusedError(400, "Expected the form of the page.") from None
    return {name: values[0] for name, values in found.items()}


def target_of(request: Request) -> str:
    """Path and query, with what was escaped in the path as it was meant."""
    path, query = str(request.scope["path"]), request.url.query
    return f"{path}?{query}" if query else path


def own_path(text: str) -> str:
    """A path of this page to go to; `/` for what could lead elsewhere."""
    usable = text.startswith("/") and not text.startswith(("//", "/\\")) and text.isprintable()
    return text if usable and len(text) <= 2_000 else "/"


def whole(text: str, otherwise: int) -> int:
    """A whole number of at most nine digits; `otherwise` if it is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else otherwise


def real(text: str | None, otherwise: float) -> float:
    """A number, an infinite one too; `otherwise` if it is none."""
    try:
        value = float(text) if text is not None else otherwise
    except ValueError:
        return otherwise
    return otherwise if math.isnan(value) else value
