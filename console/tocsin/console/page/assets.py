"""The files that browsers get: a fixed table, read once. No path comes from a request.

Ours are beside this module. Plotly's own JavaScript comes out of its installed wheel, when a page
on which people zoom is opened for the first time.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from tocsin.schemas.errors import require_extra

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

PLOTLY: Final = "plotly.js"

_TYPES: Final = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_OURS: Final = (
    "answers.js",
    "icon.svg",
    "keys.js",
    "live.js",
    "page.css",
    "tensors.js",
    "theme.js",
    "zoom.js",
)
_YEAR_S: Final = 31_536_000


@dataclass(frozen=True, slots=True)
class Asset:
    """One file: its bytes, plain and compressed, its media type, and a name for its content."""

    content: bytes
    compressed: bytes
    media_type: str
    version: str


@cache
def _table() -> Mapping[str, Callable[[], bytes]]:
    static = files(__package__).joinpath("static")
    table = {name: static.joinpath(name).read_bytes for name in _OURS}
    table["charts.css"] = _charts_css
    table[PLOTLY] = _plotly
    return table


@cache
def asset(name: str) -> Asset | None:
    """The file of that name; None: there is none. Raises MissingExtra for Plotly's."""
    read = _table().get(name)
    if read is None:
        return None
    content = read()
    kind = _TYPES[name.rpartition(".")[2]]
    version = hashlib.sha256(content).hexdigest()[:16]
    return Asset(content, gzip.compress(content, 6, mtime=0), kind, version)


def asset_url(name: str) -> str:
    """Where a page finds it; another content has another address, so browsers may keep it."""
    # Plotly's is large and not read before it is wanted: its wheel's version will do.
    if name == PLOTLY:
        return f"/static/{name}?v={_plotly_version()}"
    found = asset(name)
    assert found is not None, name
    return f"/static/{name}?v={found.version}"


async def serve_asset(request: Request) -> Response:
    """`GET /static/NAME`."""
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import PlainTextResponse, Response

    found = await run_in_threadpool(asset, request.path_params["name"])
    if found is None:
        return PlainTextResponse("There is no such file.\n", 404)
    headers = {
        "Cache-Control": f"private, max-age={_YEAR_S}, immutable",
        "ETag": f'"{found.version}"',
        "Vary": "Accept-Encoding",
    }
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["Content-Encoding"] = "gzip"
        return Response(found.compressed, headers=headers, media_type=found.media_type)
    return Response(found.content, headers=headers, media_type=found.media_type)


def _charts_css() -> bytes:
    from tocsin.console.charts import stylesheet

    return stylesheet().encode()


def _plotly() -> bytes:
    require_extra("page", "zooming", "plotly")
    import plotly

    return files(plotly).joinpath("package_data/plotly.min.js").read_bytes()


@cache
def plotly_styles() -> tuple[str, ...]:
    """Ids of the style elements that Plotly makes unless there is an element of that id."""
    found = asset(PLOTLY)
    assert found is not None
    maps = re.findall(rb'getElementById\("([0-9a-f]{64})"\)', found.content)
    return ("plotly.js-style-global", *sorted({name.decode() for name in maps}))


def _plotly_version() -> str:
    from importlib.metadata import version

    return version("plotly")
