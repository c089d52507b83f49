"""Who may see the page where a token is asked for: the token's file, and the cookie it buys. Pure,
but for reading the file.

The cookie holds the person's name and an end, with a code that only who has the token can make. So
it survives a restart of the page, and a new token ends all sessions.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.feedback import MAX_BY

LASTS_S: Final = 12 * 3600
SHORTEST: Final = 20
"""Characters of a token."""

_LONGEST: Final = 4_096
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_OTHERS_READ: Final = stat.S_IRGRP | stat.S_IROTH
_PURPOSE: Final = b"tocsin page session 1"


@dataclass(frozen=True, slots=True)
class Token:
    """What a person types to get in."""

    secret: str

    def fits(self, text: str) -> bool:
        """Whether that is it, in a time that does not depend on how much of it is right."""
        return hmac.compare_digest(self.secret.encode(), text.strip().encode())

    @property
    def cookie_name(self) -> str:
        """The name of its cookies: of this page alone, since browsers send cookies to all ports of
        a host, as at the ends of two tunnels.
        """
        return f"tocsin_session_{self._code('name')[:12]}"

    def cookie_of(self, person: str, now_s: float) -> str:
        """The cookie of a person who has typed it now."""
        name = base64.urlsafe_b64encode(person.encode()).decode().rstrip("=")
        signed = f"{name}.{int(now_s) + LASTS_S}"
        return f"{signed}.{self._code(signed)}"

    def person_of(self, cookie: str, now_s: float) -> str | None:
        """Whose cookie it is; None if it is not ours, or over."""
        signed, _, code = cookie.rpartition(".")
        if not hmac.compare_digest(self._code(signed).encode(), code.encode()):
            return None
        name, _, until = signed.partition(".")
        if int(until) <= now_s:
            return None
        return base64.urlsafe_b64decode(name + "=" * (-len(name) % 4)).decode()

    def _code(self, signed: str) -> str:
        key = hashlib.sha256(_PURPOSE + b"\0" + self.secret.encode()).digest()
        return hmac.new(key, signed.encode(), hashlib.sha256).hexdigest()


def read_token(path: Path) -> Token:
    """The token in a file, without spaces at its ends.

    Raises:
        ConfigurationError: the file cannot be read, others can write to it, or what is in it is too
            short to be secret.
    """
    try:
        if path.stat().st_mode & _OTHERS_WRITE:
            raise ConfigurationError(
                f"--token-file {path}: others can write to it, and so give themselves a token; "
                f"try chmod 600 {path}"
            )
        text = path.read_text(encoding="utf-8")[: _LONGEST + 1].strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text in UTF-8"
        raise ConfigurationError(f"--token-file {path}: cannot be read ({reason})") from error
    if not SHORTEST <= len(text) <= _LONGEST or len(text.split()) != 1:
        raise ConfigurationError(
            f"--token-file {path}: expected one word of at least {SHORTEST} characters; try "
            f"(umask 077; python -c 'import secrets; print(secrets.token_urlsafe())' > {path})"
        )
    return Token(text)


def readable_by_others(path: Path) -> bool:
    """Whether other users of this machine can read the token."""
    return bool(path.stat().st_mode & _OTHERS_READ)


def person_typed(text: str) -> str:
    """The name that a person gives, as records may have it. Raises ValueError: it is none."""
    name = text.strip()
    if not name or len(name) > MAX_BY or not name.isprintable():
        raise ValueError(f"expected a name of 1 to {MAX_BY} characters in one line, like ana")
    return name
