"""Receivers of mail, with their servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import unquote

from tocsin.actions.receivers.email.config import EmailReceiver
from tocsin.actions.receivers.email.smtp_server import (
    EmailTarget,
    server_of_config,
    server_of_environment,
)
from tocsin.actions.receivers.kind import Address, ReceiverContext, ReceiverKind
from tocsin.actions.receivers.recipients import named_twice
from tocsin.schemas.configuration.problems import Loc, Problem
from tocsin.schemas.configuration.values import parse_mail_address

if TYPE_CHECKING:
    from tocsin.actions.receivers.email.sender import EmailSender


class Email(ReceiverKind[EmailReceiver, EmailTarget]):
    """Sends each issue by mail."""

    config = EmailReceiver
    libraries = ("aiosmtplib", "jinja2")
    called = "a receiver of mail"

    def check(self, config: EmailReceiver, loc: Loc) -> Iterator[Problem]:
        """Addresses that are there twice."""
        yield from named_twice(config.to, (*loc, "to"))

    def address(self, text: str) -> Address | None:
        """`mailto:` with one address or several, or an address alone."""
        scheme = text.partition(":")[0].lower()
        if scheme != "mailto" and ("@" not in text or "://" in text):
            return None
        path, _, _ = text.removeprefix("mailto:").partition("?")
        to = tuple(parse_mail_address(unquote(one.strip())) for one in path.split(","))
        return Address.from_text(to[0][:60], ",".join(to), EmailReceiver(type="email", to=to))

    def target(self, name: str, config: EmailReceiver, context: ReceiverContext) -> EmailTarget:
        """Where the mail goes, by which server."""
        server = (
            server_of_environment(context.environ)
            if config.smtp is None
            else server_of_config(
                config.smtp, context.secrets, folder=context.folder, what=f"receiver {name!r}"
            )
        )
        return EmailTarget(
            name=name,
            to=config.to,
            server=server,
            sender=config.sender,
            attach_report=config.attach_report,
        )

    def digests(self, config: EmailReceiver) -> bool:
        """Whether it takes notices with the occasion `digest`, whose event is a digest."""
        return True

    def shows_question(self, config: EmailReceiver) -> bool:
        """Whether people see in its messages that a stop waits for their approval. The message has
        all details."""
        return True

    def groups(self, target: EmailTarget | None) -> bool:
        """Whether a sender puts several issues into one message there: `Notice.others`."""
        return True

    def sender(self, context: ReceiverContext) -> EmailSender:
        """One for all receivers of mail."""
        # What mail is made with takes longer to import than all else here.
        from tocsin.actions.receivers.email.sender import EmailSender

        return EmailSender(report=context.report)
