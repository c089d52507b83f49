"""Which addresses a webhook may reach: checked when a connection is made, not when a URL is read.

A name can change its address between a check and its use, and an address can be written in many
ways (`0x7f.1`, `::ffff:127.0.0.1`); what the kernel is about to connect to cannot be disguised.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from tocsin.schemas.errors import ConfigurationError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

METADATA: Final = frozenset(
    ipaddress.ip_address(text)
    for text in (
        "169.254.169.254",  # AWS, Google Cloud, Azure, DigitalOcean, OpenStack
        "169.254.170.2",  # AWS ECS task credentials
        "fd00:ec2::254",  # AWS
        "fd20:ce::254",  # Google Cloud
        "100.100.100.200",  # Alibaba Cloud
        "168.63.129.16",  # Azure wire server
        "192.0.0.192",  # Oracle Cloud
    )
)
"""Where clouds hand out credentials to whoever asks."""

_NEVER: Final = tuple(
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8",
        "169.254.0.0/16",
        "224.0.0.0/4",
        "240.0.0.0/4",
        "::/128",
        "fe80::/10",
        "ff00::/8",
    )
)

_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")

_HOLD_IPV4: Final = tuple(
    ipaddress.ip_network(text)
    for text in (
        "64:ff9b::/96",
        "64:ff9b:1::/48",  # translators of a site (RFC 8215)
        "::ffff:0:0:0/96",  # IPv4-translated (RFC 2765)
        "::/96",  # IPv4-compatible (RFC 4291), given up long ago
    )
)
"""IPv6 addresses of which the last 32 bits are an IPv4 address."""

_PLAIN_IPV6: Final = frozenset((ipaddress.ip_address("::"), ipaddress.ip_address("::1")))

_GLOBAL_IPV6: Final = ipaddress.ip_network("2000::/3")
"""All of IPv6 that was ever given out as public; `is_global` is True for most of the rest, too."""


@dataclass(slots=True)
class Tried:
    """What the guard saw of one attempt."""

    allowed: int = 0
    refused: list[str] = field(default_factory=list)

    @property
    def why_refused(self) -> str | None:
        """Why nothing could be connected to; None if an address was allowed, or none was tried."""
        return self.refused[0] if self.refused and not self.allowed else None


class AddressRefused(OSError):
    """A connection to an address that is not allowed."""


_tried: ContextVar[Tried | None] = ContextVar("tocsin_tried", default=None)


class AddressGuard:
    """Says which addresses are allowed; `socket` makes sockets for those alone.

    Args:
        private: allow private and loopback addresses, as embedded runs may.
        allow: networks that are allowed beside the public ones (`--allow-cidr`). Link-local and
            metadata addresses stay refused.
    """

    def __init__(self, *, private: bool, allow: Iterable[Network] = ()) -> None:
        self.private = private
        self.allow = tuple(allow)

    def why_refused(self, text: str) -> str | None:
        """Why an address (as `getaddrinfo` gives it) is refused; None if it is allowed."""
        address = ipaddress.ip_address(text.partition("%")[0])
        for meant in _meanings(address):
            if meant in METADATA or any(_inside(meant, network) for network in _NEVER):
                return f"address {address} is never allowed (link-local, metadata or unusable)"
            if any(_inside(meant, network) for network in self.allow):
                continue
            if not self.private and not _is_public(meant):
                return f"address {address} is not public; --allow-cidr {meant} would allow it"
        return None

    def socket(self, address_info: tuple[Any, ...]) -> socket.socket:
        """A socket for one entry of `getaddrinfo`, called right before it is connected.

        Raises:
            AddressRefused.
        """
        family, kind, protocol, _, address = address_info
        why = self.why_refused(address[0])
        tried = _tried.get()
        if why is not None:
            if tried is not None:
                tried.refused.append(why)
            raise AddressRefused(why)
        if tried is not None:
            tried.allowed += 1
        return socket.socket(family, kind, protocol)


@contextmanager
def watching() -> Iterator[Tried]:
    """Within, the guard notes what this task tried."""
    tried = Tried()
    token = _tried.set(tried)
    try:
        yield tried
    finally:
        _tried.reset(token)


def parse_networks(texts: Sequence[str]) -> tuple[Network, ...]:
    """What `--allow-cidr` said. Raises ConfigurationError."""
    networks: list[Network] = []
    for text in texts:
        try:
            networks.append(ipaddress.ip_network(text))
        except ValueError as error:
            raise ConfigurationError(
                f"--allow-cidr {text!r}: {error}; expected a network like 10.0.0.0/8"
            ) from error
    return tuple(networks)


def _meanings(address: Address) -> list[Address]:
    """The address, and the IPv4 addresses that a translator would make of it."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    meanings: list[Address] = [address]
    if address.sixtofour is not None:
        meanings.append(address.sixtofour)
    if address.teredo is not None:
        meanings += address.teredo
    if any(address in network for network in _HOLD_IPV4) and address not in _PLAIN_IPV6:
        meanings.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return meanings


def _is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        return address in _NAT64 or (address in _GLOBAL_IPV6 and address.is_global)
    return address.is_global


def _inside(address: Address, network: Network) -> bool:
    return address.version == network.version and address in network
