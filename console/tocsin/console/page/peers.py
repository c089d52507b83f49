"""Which user of this machine is at the other end of a connection on loopback.

Loopback belongs to all users of a machine. A page without a token acts with the key of the user who
started it, so it serves that user alone (and root, who has the key anyway). Linux says who owns the
other end of a connection in /proc/net/tcp; elsewhere nobody says it, and nobody is refused.
"""

from __future__ import annotations

import ipaddress
import os
import sys
from pathlib import Path
from typing import Final

_TABLES: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ROOT: Final = 0
_LOCAL, _REMOTE, _STATE, _UID, _ESTABLISHED = 1, 2, 3, 7, "01"


def owner_of(table: str, client: tuple[str, int], server_port: int) -> int | None:
    """The user id of the process whose connection goes from `client` to a port of this machine, by
    the text of such a table; None if it is not in it. Pure.
    """
    _, port = client
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) <= _UID or fields[_STATE] != _ESTABLISHED:
            continue
        local, remote = _place(fields[_LOCAL]), _place(fields[_REMOTE])
        # The client's own end: what is local to it is remote to us.
        if local[1] == port and remote[1] == server_port and _same(local[0], client[0]):
            return int(fields[_UID])
    return None


def is_stranger(client: tuple[str, int], server_port: int) -> bool:
    """Whether another user of this machine has that connection. Reads two small files."""
    if not sys.platform.startswith("linux"):
        return False
    for table in _TABLES:
        try:
            text = table.read_text(encoding="ascii")
        except OSError:
            continue
        if (owner := owner_of(text, client, server_port)) is not None:
            return owner not in (_ROOT, os.getuid())
    # In another network namespace (a container's forwarded port): not known.
    return False


def _place(text: str) -> tuple[str, int]:
    """`0100007F:2116` as address and port: words of four bytes, in this machine's order."""
    digits, _, port = text.partition(":")
    words = [bytes.fromhex(digits[i : i + 8]) for i in range(0, len(digits), 8)]
    if sys.byteorder == "little":
        words = [word[::-1] for word in words]
    return str(ipaddress.ip_address(b"".join(words))), int(port, 16)


def _same(address: str, other: str) -> bool:
    return _plain(address) == _plain(other)


def _plain(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The address, of one of IPv4 in the form of IPv6 the former."""
    found = ipaddress.ip_address(address)
    return getattr(found, "ipv4_mapped", None) or found
