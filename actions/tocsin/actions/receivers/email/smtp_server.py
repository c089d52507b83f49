"""Which mail server to use: the configuration's, that of `TOCSIN_SMTP`, or this machine's own."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal
from urllib.parse import parse_qs, unquote, urlsplit

from pydantic import SecretStr

from tocsin.actions.receivers.email.config import SmtpConfig
from tocsin.schemas.configuration.settings import value_of
from tocsin.schemas.errors import ConfigurationError

Security = Literal["none", "starttls", "tls"]

SMTP_VARIABLE: Final = "TOCSIN_SMTP"

ADVICE: Final = (
    f": set {SMTP_VARIABLE}=smtp://USER:PASSWORD@HOST:PORT to name a mail server (smtps:// for "
    "TLS from the first byte), or a receiver of the type email in tocsin.yaml"
)
"""What helps where no server is configured."""

_PORTS: Final[Mapping[Security, int]] = {"tls": 465, "starttls": 587, "none": 25}
_EXPECTED: Final = (
    f"{SMTP_VARIABLE}: expected smtp://USER:PASSWORD@HOST:PORT or smtps://… "
    "(smtp:// encrypts by STARTTLS; `?starttls=no` at the end does without)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SmtpServer:
    """A mail server.

    Attributes:
        advice: what to do when nobody answers there; "" if it is in the configuration.
    """

    host: str
    port: int
    security: Security
    username: SecretStr | None = None
    password: SecretStr | None = None
    context: ssl.SSLContext | None = None
    advice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmailTarget:
    """A receiver of mail. Without a `sender` it comes from `tocsin@` and this machine's name."""

    name: str
    to: Sequence[str]
    server: SmtpServer
    sender: str | None = None
    attach_report: bool = False


def server_of_environment(environ: Mapping[str, str]) -> SmtpServer:
    """What `TOCSIN_SMTP` names; without it, port 25 of this machine.

    Raises:
        ConfigurationError: the variable cannot be used. The message shows nothing of it.
    """
    text = environ.get(SMTP_VARIABLE, "")
    if not text:
        where = " at localhost, port 25, where mail is handed in by default"
        return SmtpServer(host="localhost", port=25, security="none", advice=where + ADVICE)
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
        query = parse_qs(parts.query, strict_parsing=True) if parts.query else {}
    except ValueError:
        raise ConfigurationError(_EXPECTED) from None
    known = query in ({}, {"starttls": ["no"]})
    whole = parts.path in ("", "/") and not parts.fragment and text.isprintable()
    login = (parts.username is None) == (parts.password is None)
    if parts.scheme not in ("smtp", "smtps") or not host or not (known and whole and login):
        raise ConfigurationError(_EXPECTED)
    security: Security = "tls" if parts.scheme == "smtps" else _starttls(host)
    if query:
        security = "none"
    if parts.password is not None and security == "none" and not is_this_machine(host):
        raise ConfigurationError(f"{SMTP_VARIABLE}: a password is sent encrypted only")
    return SmtpServer(
        host=host,
        port=port or _PORTS[security],
        security=security,
        username=None if parts.username is None else SecretStr(unquote(parts.username)),
        password=None if parts.password is None else SecretStr(unquote(parts.password)),
        context=None if security == "none" else ssl.create_default_context(),
        advice=f" at the mail server that {SMTP_VARIABLE} names",
    )


def server_of_config(
    config: SmtpConfig, secrets: Mapping[str, SecretStr], *, folder: Path, what: str
) -> SmtpServer:
    """The server of a receiver. Reads the file of authorities: may block.

    Raises:
        ConfigurationError: it cannot be used. The message shows no secret.
    """
    security: Security = "tls" if config.tls else "none"
    if not config.tls and (config.starttls or config.starttls is None):
        security = "starttls" if config.starttls else _starttls(config.host)
    username = value_of(config.username, secrets)
    password = value_of(config.password, secrets)
    if password is not None and security == "none" and not is_this_machine(config.host):
        raise ConfigurationError(f"{what}: a password is sent encrypted only")
    context = None
    if security != "none":
        try:
            ca = None if config.ca is None else str(folder / config.ca)
            context = ssl.create_default_context(cafile=ca)
        except OSError as error:
            raise ConfigurationError(
                f"{what}: cannot read the authorities in {str(config.ca)!r}: "
                f"{error.strerror or 'no certificates in it'}"
            ) from None
    return SmtpServer(
        host=config.host,
        port=config.port or _PORTS[security],
        security=security,
        username=username,
        password=password,
        context=context,
    )


def is_this_machine(host: str) -> bool:
    """Whether a host is this machine, by its name or address alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() in ("localhost", "localhost.localdomain")


def _starttls(host: str) -> Security:
    """The default: a machine's own server often has no certificate."""
    return "none" if is_this_machine(host) else "starttls"
