"""Links by which people answer to issues and stops: signed, bound to one thing. Pure.

A link is a token behind a URL. The token holds what may be done about which issue, and whose link
it is; an Ed25519 signature covers all of it. It holds only characters that no chat escapes.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import uuid
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

from tocsin.schemas.errors import SignatureError
from tocsin.schemas.signing import Signature, SigningKey, TrustedKeys

LinkVerb = Literal["open", "approve", "reject", "ack", "resolve", "false-alarm", "silence"]
"""What a token permits: to see the page of an issue (`open`), or one button of it."""

LONGEST_TOKEN: Final = 2_048
PATH: Final = "/answer/"
"""Where the pages are, behind the public URL."""

_NAME: Final = b"tocsin-link-v1"
"""What is signed beside the text of a token. No record on the bus has such a key."""

_NAMESPACE: Final = uuid.UUID("3d9d8d3e-54f0-5a0c-8f53-0a6d3c1b7e21")
_SIGNATURE: Final = 86
_KEY_ID: Final = 16
_TOKEN: Final = re.compile(r"[A-Za-z0-9.-]{86,2032}[0-9a-f]{16}")


class LinkExpired(SignatureError):
    """The link is too old."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What a token permits.

    Attributes:
        stop_id: the delivery of the stop that `approve` and `reject` are about; else empty.
        person: the receiver that the link was sent to: who answers with it.
        until_ms: after that it is refused.
    """

    verb: LinkVerb
    run_id: str
    incarnation: str
    issue_id: str
    person: str
    until_ms: int
    stop_id: str = ""

    @property
    def use_id(self) -> str:
        """The id of the record that using it writes: the same if it is used again."""
        return str(uuid.uuid5(_NAMESPACE, self._text()))

    @property
    def opened(self) -> Link:
        """The link of the page that this one's button is on."""
        return replace(self, verb="open", stop_id="")

    def token(self, key: SigningKey) -> str:
        """The token: equal for an equal link and key."""
        text = self._text().encode()
        signature = key.sign(_NAME, text)
        raw = base64.b64decode(signature.text)
        return _encoded(raw) + _encoded(text) + signature.key_id

    def _text(self) -> str:
        parts = (self.run_id, self.incarnation, self.issue_id, self.stop_id, self.person)
        return json.dumps([self.verb, *parts, self.until_ms], separators=(",", ":"))


def read_link(token: str, trusted: TrustedKeys, now_ms: int) -> Link:
    """What a token permits now.

    Raises:
        LinkExpired: its time is over.
        SignatureError: it is no token, or no trusted key has signed it.
    """
    if len(token) > LONGEST_TOKEN or _TOKEN.fullmatch(token) is None:
        raise SignatureError("not a link of tocsin")
    key_id, body = token[-_KEY_ID:], token[_SIGNATURE:-_KEY_ID]
    raw, text = _decoded(token[:_SIGNATURE]), _decoded(body)
    trusted.verify(_NAME, text, Signature(key_id, base64.b64encode(raw).decode()))
    link = _parsed(text)
    if _encoded(text) != body:
        raise SignatureError("not a link of tocsin")
    if now_ms >= link.until_ms:
        raise LinkExpired("the link has expired")
    return link


def _parsed(text: bytes) -> Link:
    """A text that a trusted key has signed; of another release it may have another form."""
    try:
        parts: Any = json.loads(text)
        verb, run_id, incarnation, issue_id, stop_id, person, until_ms = parts
        words = (verb, run_id, incarnation, issue_id, stop_id, person)
        if verb not in get_args(LinkVerb) or type(until_ms) is not int:
            raise ValueError("of another form")
        if not all(isinstance(word, str) for word in words):
            raise ValueError("of another form")
    except (ValueError, TypeError) as error:
        raise SignatureError("the link is of another release of tocsin") from error
    return Link(
        verb=verb,
        run_id=run_id,
        incarnation=incarnation,
        issue_id=issue_id,
        stop_id=stop_id,
        person=person,
        until_ms=until_ms,
    )


def _encoded(raw: bytes) -> str:
    return base64.b64encode(raw, b"-.").rstrip(b"=").decode()


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), b"-.", validate=True)
    except (binascii.Error, ValueError) as error:
        raise SignatureError("not a link of tocsin") from error
