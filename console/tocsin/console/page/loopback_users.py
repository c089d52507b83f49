"""Which user of this machine is at the other end of a connection on loopback.

Loopback belongs to all users of a machine. A page without a token acts with the key of the user who
started it, so it serves that user alone (and root, who has the key anyway). Linux says who owns the
other end of a connection in /proc/net/tcp; elsewhere nobody says it, and nobody is refused.
"""

from __future__ import annotations

import ipaddress
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TABLES: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ROOT: Final = 0
_LOCAL, _REMOTE, _STATE, _UID = 1, 2, 3, 7
_ESTABLISHED, _LISTEN = "01", "0A"


@dataclass(frozen=True, slots=True)
class Ends:
    """What such a table shows of a connection to a port of this machine.

    `owner` is the user id at the client's end and `theirs` whether that is open, both None if it is
    not there; `ours` is whether the server's end is open, None if not even its port is there.
    """

    owner: int | None = None
    theirs: bool | None = None
    ours: bool | None = None


def ends_of(table: str, client: tuple[str, int], server_port: int) -> Ends:
    """Both ends of the connection from `client`, by the text of such tables. Pure."""
    owner, theirs, ours = None, None, None
    for line in table.splitlines():
        fields = line.split()
        if len(fields) <= _UID or ":" not in fields[_LOCAL]:
            continue
        local, remote = _place(fields[_LOCAL]), _place(fields[_REMOTE])
        state = fields[_STATE]
        # The client's own end: what is local to it is remote to us.
        if remote[1] == server_port and _same(local, client):
            owner, theirs = int(fields[_UID]), state == _ESTABLISHED
        elif local[1] == server_port and _same(remote, client):
            ours = state == _ESTABLISHED
        elif local[1] == server_port and state == _LISTEN:
            ours = ours or False
    return Ends(owner, theirs, ours)


def is_stranger(client: tuple[str, int], server_port: int) -> bool:
    """Whether another user of this machine has that connection. Reads two small files, or four."""
    if not sys.platform.startswith("linux"):
        return False
    found = ends_of(_tables(), client, server_port)
    if found.theirs is not None:
        # Of an end that is closed the table shows no owner: of nobody it passes for root's.
        return not found.theirs or found.owner not in (_ROOT, os.getuid())
    # In another network namespace, as of a forwarded port: not known. But who has reset the
    # connection behind the request is in no table either, and then our end is not open any more.
    return ends_of(_tables(), client, server_port).ours is False


def _tables() -> str:
    """The text of both; empty where they cannot be read."""
    texts = []
    for table in _TABLES:
        with suppress(OSError):
            texts.append(table.read_text(encoding="ascii"))
    return "".join(texts)


def _place(text: str) -> tuple[str, int]:
    """`0100007F:2116` as address and port: words of four bytes, in this machine's order."""
    digits, _, port = text.partition(":")
    words = [bytes.fromhex(digits[i : i + 8]) for i in range(0, len(digits), 8)]
    if sys.byteorder == "little":
        words = [word[::-1] for word in words]
    return str(ipaddress.ip_address(b"".join(words))), int(port, 16)


def _same(place: tuple[str, int], other: tuple[str, int]) -> bool:
    return place[1] == other[1] and _plain(place[0]) == _plain(other[0])


def _plain(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The address, of one of IPv4 in the form of IPv6 the former."""
    found = ipaddress.ip_address(address)
    return getattr(found, "ipv4_mapped", None) or found
