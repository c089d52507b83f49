"""Receivers of short messages."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from pydantic import SecretStr

from tocsin.actions.receivers.aws import AT_ONCE
from tocsin.actions.receivers.chat.apprise_process import AppriseProcess
from tocsin.actions.receivers.kind import ReceiverContext, ReceiverKind
from tocsin.actions.receivers.recipients import named_twice
from tocsin.actions.receivers.sms.config import SmsReceiver
from tocsin.actions.receivers.sms.sender import SmsSender, SmsTarget
from tocsin.actions.receivers.templates.template import (
    names_actions,
    template_findings,
    usable_template,
)
from tocsin.schemas.configuration.problems import Loc, Problem
from tocsin.schemas.configuration.settings import value_of
from tocsin.schemas.errors import ConfigurationError


class Sms(ReceiverKind[SmsReceiver, SmsTarget]):
    """Sends each issue as a short message."""

    config = SmsReceiver
    libraries = ("boto3", "apprise")
    called = "a receiver of short messages"
    at_once = AT_ONCE

    def check(self, config: SmsReceiver, loc: Loc) -> Iterator[Problem]:
        """Numbers that are there twice; a wrong template."""
        yield from template_findings(config.template, str, loc)
        yield from named_twice(config.to, (*loc, "to"))

    def target(self, name: str, config: SmsReceiver, context: ReceiverContext) -> SmsTarget | None:
        """The numbers, and what AWS or Twilio needs to know; None without Twilio's token."""
        twilio = None
        if config.twilio is not None:
            token = value_of(config.twilio.token, context.secrets)
            if token is None:
                return None
            if not token.get_secret_value().isalnum():
                raise ConfigurationError(
                    f"receiver {name!r}: expected the token of Twilio to be letters and digits"
                )
            login = f"{config.twilio.account}:{token.get_secret_value()}"
            twilio = SecretStr(f"twilio://{login}@{config.twilio.sender.lstrip('+')}")
        return SmsTarget(
            name=name,
            to=config.to,
            region=config.region,
            sender_id=config.sender_id,
            template=usable_template(config.template, str, name),
            twilio=twilio,
        )

    def load(self) -> None:
        """boto3 alone: apprise runs in its own process."""
        importlib.import_module("boto3")

    def groups(self, target: SmsTarget | None) -> bool:
        """Whether a sender puts several issues into one message there: `Notice.others`."""
        return True

    def digests(self, config: SmsReceiver) -> bool:
        """Whether it takes notices with the occasion `digest`, whose event is a digest."""
        return True

    def shows_question(self, config: SmsReceiver) -> bool:
        """Whether people see in its messages that a stop waits for their approval. Only a text of
        the user's own has it."""
        return names_actions(config.template)

    def sender(self, context: ReceiverContext) -> SmsSender:
        """One for all receivers of short messages."""
        return SmsSender(AppriseProcess(context.guard))
