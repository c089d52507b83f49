"""The keys `public_url` and `page_url`: where people reach what links in messages lead to."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import PlainValidator, WithJsonSchema

from tocsin.schemas.configuration.problems import Problem
from tocsin.schemas.configuration.yaml_document import Plain

_USABLE: Final = re.compile(r"https?://[A-Za-z0-9.\[\]:-]+(?:/[A-Za-z0-9/.-]*)?")
_LONGEST: Final = 200


def parse_public_url(value: object) -> str:
    """The URL without a slash at its end.

    Raises:
        ValueError: it is none, has more than a host and a path, or sends links unencrypted to
            another machine.
    """
    if not isinstance(value, str) or len(value) > _LONGEST or not _USABLE.fullmatch(value):
        raise ValueError("expected a URL of a host, like https://tocsin.example.com")
    try:
        parts = urlsplit(value)
        usable = bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ValueError("expected a URL of a host, like https://tocsin.example.com")
    if parts.scheme != "https" and not _is_loopback(parts.hostname or ""):
        raise ValueError("expected https: anybody who intercepts a link can answer with it")
    return value.rstrip("/")


PublicUrl = Annotated[
    str,
    PlainValidator(parse_public_url),
    WithJsonSchema({"type": "string", "pattern": "^https?://"}),
]
"""An https URL, or an http URL of this machine."""


def fits_host(url: str, host: str) -> bool:
    """Whether `host` is what browsers send as `Host` to a URL."""
    parts = urlsplit(url)
    port = ":443" if parts.scheme == "https" else ":80"
    return parts.netloc.lower().removesuffix(port) == host.lower().removesuffix(port)


def read_public_url(raw: Plain, key: str, problems: list[Problem]) -> str | None:
    """The value of a key of the file; None without one, or if it is wrong."""
    if raw is None:
        return None
    try:
        return parse_public_url(raw)
    except ValueError as error:
        problems.append(Problem((key,), str(error)))
        return None


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
