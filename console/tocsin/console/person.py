"""The person who gives a command, and why, as records have it."""

from __future__ import annotations

import getpass
import socket

from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.events import clip
from tocsin.schemas.records.feedback import MAX_BY
from tocsin.schemas.records.fields import MAX_TEXT


def this_person() -> str:
    """`user@host`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "somebody"  # a user without a name, as in some containers
    return clip(f"{user}@{socket.gethostname()}", MAX_BY)


def person_named(by: str | None) -> str:
    """The name of `--by`, or this person's.

    Raises:
        ConfigurationError: it is empty, too long, or of several lines.
    """
    if by is None:
        return this_person()
    if not by.strip() or len(by) > MAX_BY or not by.isprintable():
        raise ConfigurationError(
            f"--by: expected a name of 1 to {MAX_BY} characters in one line, like ana@node-1"
        )
    return by.strip()


def reason_given(why: str) -> str:
    """The text of `--why`. Raises ConfigurationError: it is too long."""
    if len(why) > MAX_TEXT:
        raise ConfigurationError(
            f"--why: expected at most {MAX_TEXT:,} characters, found {len(why):,}"
        )
    return why.strip()
