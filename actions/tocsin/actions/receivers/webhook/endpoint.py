"""What a webhook is reached with beside its address: headers, signing keys, TLS.

Receivers and stop targets are configured in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final
from urllib.parse import urlsplit

from pydantic import SecretStr

from tocsin.actions.receivers.webhook.config import SignConfig
from tocsin.actions.receivers.webhook.signature import webhook_key
from tocsin.schemas.configuration.problems import Loc, Problem
from tocsin.schemas.configuration.sections import TlsConfig
from tocsin.schemas.configuration.settings import value_of
from tocsin.schemas.configuration.values import SecretRef
from tocsin.schemas.errors import ConfigurationError

_HEADER: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_OURS: Final = frozenset(
    {"content-type", "content-length", "host", "transfer-encoding", "connection", "user-agent"}
)


def header_problems(headers: Iterable[str], loc: Loc) -> Iterator[Problem]:
    """Headers that are none, ours, or there twice. Pure."""
    seen: set[str] = set()
    for header in headers:
        here = (*loc, "headers", header)
        low = header.lower()
        if not _HEADER.fullmatch(header):
            yield Problem(here, "expected the name of an HTTP header", "header", at="key")
        elif low in _OURS or low.startswith(("webhook-", "ce-")):
            yield Problem(here, f"the header {low!r} is set by tocsin", "header", at="key")
        elif low in seen:
            yield Problem(here, f"the header {low!r} is already set", "header", at="key")
        seen.add(low)


def tls_problems(
    tls: TlsConfig | None, urls: Iterable[str | SecretRef], loc: Loc
) -> Iterator[Problem]:
    """TLS files for a URL without TLS. Pure."""
    plain = any(isinstance(url, str) and urlsplit(url).scheme != "https" for url in urls)
    if tls is not None and plain:
        yield Problem((*loc, "tls"), "expected an https:// URL with it", at="key")


def signing_keys(
    sign: SignConfig, secrets: Mapping[str, SecretStr], what: str
) -> tuple[SecretStr, ...]:
    """The signing key, and behind it the one before while they are being replaced.

    Raises:
        ConfigurationError: there is none, or one that cannot be used. Shows nothing of it.
    """
    keys = tuple(
        webhook_key(key, what)
        for reference in (sign.key, sign.previous_key)
        if (key := value_of(reference, secrets)) is not None
    )
    if not keys:
        raise ConfigurationError(f"{what}: signing is configured, but there is no key")
    return keys


def header_values(
    headers: Mapping[str, str | SecretRef], secrets: Mapping[str, SecretStr], what: str
) -> dict[str, SecretStr]:
    """The headers; without those that an optional secret leaves out.

    Raises:
        ConfigurationError: one would break the request. Shows nothing of it.
    """
    found: dict[str, SecretStr] = {}
    for header, text in headers.items():
        if (value := value_of(text, secrets)) is not None:
            if not value.get_secret_value().isprintable():
                raise ConfigurationError(
                    f"{what}: the header {header!r} has a line break or control character"
                )
            found[header] = value
    return found
