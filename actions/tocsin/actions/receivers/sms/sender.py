"""Short messages through AWS SNS or Twilio: what a telephone shows without being opened."""

from __future__ import annotations

import asyncio
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from pydantic import SecretStr

from tocsin.actions.decision.retry import Outcome, is_temporary
from tocsin.actions.delivery.receiver_queues import Notice
from tocsin.actions.receivers.aws import AT_ONCE, ClientFactory, call, make_client
from tocsin.actions.receivers.chat.apprise_process import AppriseProcess
from tocsin.actions.receivers.message import Message, message_for
from tocsin.actions.receivers.recipients import PartialRecipients
from tocsin.actions.receivers.templates.template import Template, words_of

if TYPE_CHECKING:
    from botocore.client import BaseClient

MAX_PARTS: Final = 2
"""Each part is paid for; SNS itself would take ten."""

_BASIC: Final = frozenset(
    "@£$¥èéùìòÇ\nØø\rÅåΔ_ΦΓΛΩΠΨΣΘΞÆæßÉ !\"#¤%&'()*+,-./0123456789:;<=>?"
    "¡ABCDEFGHIJKLMNOPQRSTUVWXYZÄÖÑÜ§¿abcdefghijklmnopqrstuvwxyzäöñüà"
)
_EXTENDED: Final = frozenset("^{}\\[~]|€\f")
_ONE, _PART = 160, 153
_WIDE_ONE, _WIDE_PART = 70, 67
_MAX_LOST: Final = 0.1
"""Of a text's characters, the share of letters that may become question marks."""
_INSTEAD: Final = {
    "\u2018": "'",
    "\u2019": "'",
    "\u201c": '"',
    "\u201d": '"',
    "\u2013": "-",
    "\u2014": "-",
    "`": "'",
}
"""Typographic quotes and dashes, as what they stand for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmsTarget:
    """A receiver of short messages."""

    name: str
    to: Sequence[str]
    region: str | None = None
    sender_id: str | None = None
    template: Template | None = None
    twilio: SecretStr | None = None
    """URL of an account for apprise, without the recipient; None: through SNS."""


def sms_text(message: Message) -> str:
    """The text of a short message about an issue. Pure."""
    step = "" if message.first_step is None else f" Step {message.first_step:,}."
    text = f"tocsin {message.word} {message.run_id}: {message.headline}."
    return short(f"{text}{step}")


def short(text: str) -> str:
    """At most two parts. Pure.

    In the telephone's own alphabet (GSM 03.38) unless much would be lost: one character outside of
    it makes all parts half as long (UCS-2).
    """
    basic = _basic(text)
    lost = sum(character.isalpha() for character in text) - sum(map(str.isalpha, basic))
    if lost > _MAX_LOST * len(text):
        return _cut(text, MAX_PARTS * _WIDE_PART, _wide)
    return _cut(basic, MAX_PARTS * _PART, septets)


def septets(text: str) -> int:
    """How long a text is on the air; characters of the extension table count twice."""
    return sum(2 if character in _EXTENDED else 1 for character in text)


def parts(text: str) -> int:
    """How many parts a text is sent in."""
    wide = any(character not in _BASIC and character not in _EXTENDED for character in text)
    length = _wide(text) if wide else septets(text)
    one, part = (_WIDE_ONE, _WIDE_PART) if wide else (_ONE, _PART)
    return 1 if length <= one else -(-length // part)


def _wide(text: str) -> int:
    """How long a text is in UCS-2; what is outside of its first plane counts twice."""
    return sum(1 + (ord(character) > 0xFFFF) for character in text)


class SmsSender:
    """Sends short messages. One per service."""

    def __init__(self, process: AppriseProcess, make: ClientFactory = make_client) -> None:
        self._process = process
        self._make = make
        self._reached = PartialRecipients()
        self._room = asyncio.Semaphore(AT_ONCE)

    async def send(self, target: SmsTarget, notice: Notice) -> Outcome:
        """One attempt, to all numbers that were not reached. Raises RecordError: no issue."""
        identity = notice.delivery.message_id
        standard = sms_text(message_for(notice))
        text = short(words_of(target.template, notice, standard))
        missing = self._reached.missing(identity, target.to)
        if (url := target.twilio) is not None:
            ways = [f"{url.get_secret_value()}/{number.lstrip('+')}" for number in missing]
            outcomes = [await self._process.deliver(way, "", text) for way in ways]
        else:
            async with self._room:
                outcomes = await asyncio.to_thread(self._publish, target, missing, text)
        good = [number for number, one in zip(missing, outcomes, strict=True) if _good(one)]
        self._reached.add(identity, *good)
        outcome = self._together(identity, target, outcomes)
        if outcome.later is None and outcome.failure is None:
            self._reached.discard(identity)
        return outcome

    async def close(self) -> None:
        """Close the sender; it keeps nothing open."""

    def _publish(self, target: SmsTarget, numbers: Sequence[str], text: str) -> list[Outcome]:
        """Blocks."""
        made: list[BaseClient] = []
        attributes = {"AWS.SNS.SMS.SMSType": {"DataType": "String", "StringValue": "Transactional"}}
        if target.sender_id is not None:
            name = {"DataType": "String", "StringValue": target.sender_id}
            attributes["AWS.SNS.SMS.SenderID"] = name

        def publish(number: str) -> int:
            if not made:
                made.append(self._make("sns", target.region))
            answer = made[0].publish(PhoneNumber=number, Message=text, MessageAttributes=attributes)
            return int(answer["ResponseMetadata"]["HTTPStatusCode"])

        outcomes = [call(partial(publish, number)) for number in numbers]
        for client in made:
            client.close()
        return outcomes

    def _together(self, identity: str, target: SmsTarget, outcomes: Sequence[Outcome]) -> Outcome:
        """One outcome for all numbers: again while any may be better later."""
        bad = [one for one in outcomes if not _good(one)]
        count = len(target.to) - len(self._reached.missing(identity, target.to))
        if not bad:
            by = "SNS" if target.twilio is None else "Twilio"
            return Outcome(done=f"accepted by {by} for {_numbers(count)}")
        some = f"accepted for {count} of {_numbers(len(target.to))}; " if count else ""
        again = [one for one in bad if is_temporary(one)]
        if again:
            return Outcome(later=some + again[0].text()) if some else again[0]
        return Outcome(done=f"{some}others: {bad[0].text()}") if some else bad[0]


def _good(outcome: Outcome) -> bool:
    return outcome.done is not None or 200 <= (outcome.status or 0) < 300


def _numbers(count: int) -> str:
    return "1 number" if count == 1 else f"{count} numbers"


def _basic(text: str) -> str:
    """In the telephone's alphabet: accents are dropped where it has none, else a question mark."""
    out: list[str] = []
    for character in text:
        character = _INSTEAD.get(character, character)
        if all(one in _BASIC or one in _EXTENDED for one in character):
            out.append(character)
            continue
        plain = [one for one in unicodedata.normalize("NFKD", character) if one in _BASIC]
        out.append("".join(plain) or "?")
    return "".join(out)


def _cut(text: str, most: int, length: Callable[[str], int]) -> str:
    if length(text) <= most:
        return text
    kept = text
    while length(kept) > most - 3:
        kept = kept[:-1]
    return kept + "..."
