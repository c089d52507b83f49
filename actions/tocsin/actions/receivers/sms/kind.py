"""Receivers of short messages."""

from __future__ import annotations

from collections.abc import Iterator

from tocsin.actions.receivers.aws import AT_ONCE
from tocsin.actions.receivers.kind import ReceiverContext, ReceiverKind
from tocsin.actions.receivers.recipients import named_twice
from tocsin.actions.receivers.sms.config import SmsReceiver
from tocsin.actions.receivers.sms.sender import SmsSender, SmsTarget
from tocsin.actions.receivers.templates.template import template_findings, usable_template
from tocsin.schemas.configuration.problems import Loc, Problem


class Sms(ReceiverKind[SmsReceiver, SmsTarget]):
    """Sends each issue as a short message."""

    config = SmsReceiver
    libraries = ("boto3",)
    called = "a receiver of short messages"
    at_once = AT_ONCE

    def check(self, config: SmsReceiver, loc: Loc) -> Iterator[Problem]:
        """Numbers that are there twice; a wrong template."""
        yield from template_findings(config.template, str, loc)
        yield from named_twice(config.to, (*loc, "to"))

    def target(self, name: str, config: SmsReceiver, context: ReceiverContext) -> SmsTarget:
        """The numbers, and what AWS needs to know."""
        return SmsTarget(
            name=name,
            to=config.to,
            region=config.region,
            sender_id=config.sender_id,
            template=usable_template(config.template, str, name),
        )

    def sender(self, context: ReceiverContext) -> SmsSender:
        """One for all receivers of short messages."""
        return SmsSender()
