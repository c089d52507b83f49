"""A message as a mail: plain text, HTML with the picture inside, and the last values as CSV. Pure.

The words are those of `receivers.message`, as in each channel.

Whatever a run or a rule wrote is text here: escaped in HTML, kept to one line in headers, and
never a formula in the table.
"""

from __future__ import annotations

import csv
import functools
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.headerregistry import Address
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import format_datetime
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from tocsin.actions.receivers.message import Message
from tocsin.schemas.records.issues import Series

if TYPE_CHECKING:
    from jinja2 import Template

PAGE: Final = "email.html.jinja"
"""The template of the HTML half; it is beside this module."""

PICTURE: Final = "series.png"
VALUES: Final = "last_values.csv"
REPORT: Final = "report.html"
ID_DOMAIN: Final = "tocsin.invalid"
"""Of Message-IDs where no sender's address is set: equal on all machines."""

_POLICY: Final = SMTP.clone(cte_type="7bit")
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
_COLOURS: Final = {
    "CRITICAL": "#b3261e",
    "WARNING": "#9a5b00",
    "INFO": "#1f5fa8",
    "RESOLVED": "#1e6b3a",
    "DIGEST": "#1e6b3a",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """Whom a mail is from and to, and how it is known to mail readers.

    Attributes:
        sent_ms: when the notice was decided: each attempt has the same time.
        delivery_id: what its Message-ID is made of: each attempt has the same.
        answers: the delivery ids of the mails that it answers; mail readers put it to them.
        id_domain: the part of Message-IDs behind the `@`.
    """

    sender: str
    to: Sequence[str]
    delivery_id: str
    sent_ms: int
    answers: Sequence[str] = ()
    id_domain: str = ID_DOMAIN


def mail_of(
    message: Message,
    envelope: Envelope,
    picture: bytes | None = None,
    report: bytes | None = None,
) -> EmailMessage:
    """The whole mail, in 7 bits."""
    mail = EmailMessage(policy=_POLICY)
    local, _, domain = envelope.sender.rpartition("@")
    mail["From"] = Address("tocsin", local, domain)
    mail["To"] = ", ".join(envelope.to)
    again = "" if message.state == "firing" else "Re: "
    mail["Subject"] = again + message.subject
    mail["Date"] = format_datetime(datetime.fromtimestamp(envelope.sent_ms // 1000, UTC))
    mail["Message-ID"] = _id(envelope.delivery_id, envelope.id_domain)
    if envelope.answers:
        answered = [_id(one, envelope.id_domain) for one in envelope.answers]
        mail["In-Reply-To"] = answered[0]
        mail["References"] = " ".join(answered)
    # Out-of-office programs shall not answer.
    mail["Auto-Submitted"] = "auto-generated"
    if message.word == "CRITICAL":
        mail["Importance"] = "high"
    if not message.digest:
        mail["X-Tocsin-Issue"] = message.issue_id
        mail["X-Tocsin-Run"] = message.run_id
    mail.set_content(message.text())
    shown = picture is not None
    mail.add_alternative(html_of(message, f"cid:{PICTURE}" if shown else None), subtype="html")
    if picture is not None:
        alternatives = mail.get_payload()
        assert isinstance(alternatives, list)
        page = alternatives[1]
        assert isinstance(page, EmailMessage)
        page.add_related(
            picture, "image", "png", cid=f"<{PICTURE}>", filename=PICTURE, disposition="inline"
        )
    if message.series is not None and message.series.values:
        mail.add_attachment(csv_of(message.series), subtype="csv", filename=VALUES)
    if report is not None:
        mail.add_attachment(report, maintype="text", subtype="html", filename=REPORT)
    return mail


def html_of(message: Message, picture_url: str | None) -> str:
    """The HTML, without scripts and without anything from elsewhere."""
    return _page().render(
        message=message,
        colour=_COLOURS[message.word],
        picture_url=picture_url,
        alternative=_alternative(message),
    )


@functools.cache
def _page() -> Template:
    # jinja2 is of the extra `actions`, which only those who send mail need.
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.from_string(files(__package__).joinpath(PAGE).read_text(encoding="utf-8"))


def csv_of(series: Series) -> str:
    """The values of a series: step or second, the value, and the limit where there is one."""
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    limits = [] if series.limit is None else ["limit"]
    table.writerow(["step" if series.x is None else "second", _cell(series.name), *limits])
    for step, value in zip(series.steps, series.values, strict=True):
        limit = [] if series.limit is None else [_number(series.limit)]
        table.writerow([step, _number(value), *limit])
    return out.getvalue()


def _number(value: float) -> str:
    """So that it reads back as the same number; only a number may begin with a minus here."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "'-Infinity"
    return repr(value)


def _cell(text: str) -> str:
    """Text that no spreadsheet takes for a formula."""
    line = " ".join(text.split())
    return f"'{line}" if line.startswith(_FORMULA) else line


def _alternative(message: Message) -> str:
    name = "" if message.series is None else message.series.name
    return f"Plot of {name}; its last values are in the table below"


def _id(delivery_id: str, domain: str) -> str:
    return f"<{delivery_id}@{domain}>"
