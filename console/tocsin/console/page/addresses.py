"""Where the page listens, and under which names it may be asked for. Pure.

A page on loopback can be reached by any web site that the user opens, if that site's name is made
to mean 127.0.0.1 (DNS rebinding). The browser then sends the site's name as `Host`: only names that
can mean nothing but this page are served. A number cannot be rebound.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from tocsin.schemas.errors import ConfigurationError

DEFAULT: Final = "127.0.0.1:8470"

_HOST: Final = re.compile(r"(?:\[([^\]]*)\]|([^:/\[\]]*))(?::[0-9]*)?")


@dataclass(frozen=True, slots=True)
class Address:
    """A host, as a name or a number, and a port; 0 is any free one."""

    host: str
    port: int

    @property
    def loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return self.host == "localhost" or _number(self.host, loopback=True)

    @property
    def url(self) -> str:
        """What a person types."""
        shown = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{shown}:{self.port}/"


def read_address(text: str) -> Address:
    """What `--http` says. Raises ConfigurationError: it is no HOST:PORT."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ConfigurationError(f"--http {text[:200]}: expected HOST:PORT, for example {DEFAULT}")
    return Address(host, int(port))


def read_name(text: str) -> str:
    """A name of `--host-name`, in lower case. Raises ConfigurationError: it is none."""
    allowed = text.replace("-", "").replace(".", "")
    if not (allowed.isascii() and allowed.isalnum()) or len(text) > 253:
        raise ConfigurationError(
            f"--host-name {text[:200]}: expected a name, for example tocsin.example.com"
        )
    return text.lower()


def host_of(header: str) -> str:
    """The host in a `Host` header, without its port, in lower case; empty if it has none."""
    found = _HOST.fullmatch(header.strip().lower())
    return "" if found is None else found[1] or found[2]


def may_be_asked_as(header: str, address: Address, names: Collection[str]) -> bool:
    """Whether a request with that `Host` is meant for a page at `address` that has `names`.

    The port does not matter: a tunnel (`ssh -L`) has another one.
    """
    host = host_of(header)
    if host == "localhost" or host in names or host == address.host.lower():
        return True
    return _number(host, loopback=address.loopback)


def _number(host: str, *, loopback: bool) -> bool:
    try:
        number = ipaddress.ip_address(host)
    except ValueError:
        return False
    return number.is_loopback or not loopback
