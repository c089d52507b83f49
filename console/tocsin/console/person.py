"""The person who gives a command, as records name them."""

from __future__ import annotations

import getpass
import socket
from typing import Final

from tocsin.schemas.records.events import clip

_LONGEST: Final = 200


def this_person() -> str:
    """`user@host`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "somebody"  # a user without a name, as in some containers
    return clip(f"{user}@{socket.gethostname()}", _LONGEST)
