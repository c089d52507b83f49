"""From the configuration to the lanes that deliver to its receivers, and those of `--notify`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final

from pydantic import SecretStr

from tocsin.actions.delivery.lanes import Lane, Notice
from tocsin.actions.delivery.retry import Outcome
from tocsin.actions.receivers.address_guard import AddressGuard
from tocsin.actions.receivers.aws import AT_ONCE as AWS_AT_ONCE
from tocsin.actions.receivers.chat import AT_ONCE as CHATS_AT_ONCE
from tocsin.actions.receivers.chat import ChatSender, ChatTarget
from tocsin.actions.receivers.email import EmailSender, EmailTarget
from tocsin.actions.receivers.lambda_function import LambdaSender, LambdaTarget
from tocsin.actions.receivers.notify_option import chat_fault, parse_notify
from tocsin.actions.receivers.sms import SmsSender, SmsTarget
from tocsin.actions.receivers.smtp_server import server_of_config, server_of_environment
from tocsin.actions.receivers.webhook import WebhookSender, WebhookTarget
from tocsin.actions.receivers.webhook_targets import webhook_targets
from tocsin.schemas.configuration.file import Config
from tocsin.schemas.configuration.receivers import (
    AnyReceiver,
    ChatReceiver,
    EmailReceiver,
    LambdaReceiver,
    SmsReceiver,
)
from tocsin.schemas.configuration.settings import value_of
from tocsin.schemas.errors import ConfigurationError, MissingExtra

Close = Callable[[], Awaitable[None]]


def receiver_lanes(
    config: Config,
    secrets: Mapping[str, SecretStr],
    *,
    guard: AddressGuard,
    notify: Sequence[str] = (),
    folder: Path | None = None,
    environ: Mapping[str, str] | None = None,
    software: str = "tocsin",
) -> tuple[dict[str, Lane], list[Close]]:
    """A lane for each receiver, by name, and what is to be called at the end.

    Args:
        guard: which addresses may be connected to.
        folder: where relative paths of the configuration start.
        environ: the environment; `TOCSIN_SMTP` counts.

    Raises:
        ConfigurationError: a receiver cannot be used. The message shows no secret.
        MissingExtra: what a receiver needs is not installed.
    """
    lanes: dict[str, Lane] = {}
    closers: list[Close] = []
    webhooks = webhook_targets(config, secrets, notify)
    if webhooks:
        sender = WebhookSender(guard, software=software)
        closers.append(sender.close)
        lanes |= {name: _webhook_lane(sender, target) for name, target in webhooks.items()}
    env = os.environ if environ is None else environ
    mails = _email_targets(config, secrets, notify, folder or Path.cwd(), env)
    if mails:
        mailer = EmailSender()
        lanes |= {
            name: Lane(partial(mailer.send, target), target.give_up_ms)
            for name, target in mails.items()
        }
    chats = _chat_targets(config, secrets, notify)
    if chats:
        chatter = ChatSender(guard)
        lanes |= {
            name: Lane(partial(chatter.send, target), target.give_up_ms, at_once=CHATS_AT_ONCE)
            for name, target in chats.items()
        }
    return lanes | _aws_lanes(config), closers


def check_usable(
    config: Config,
    secrets: Mapping[str, SecretStr],
    *,
    notify: Sequence[str] = (),
    folder: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> None:
    """Say now what `receiver_lanes` would say later, in another process. Connects to nobody.

    Raises:
        ConfigurationError, MissingExtra: as `receiver_lanes` does.
    """
    env = os.environ if environ is None else environ
    webhook_targets(config, secrets, notify)
    _email_targets(config, secrets, notify, folder or Path.cwd(), env)
    _chat_targets(config, secrets, notify)
    used: set[str] = {receiver.type for receiver in config.receivers.values()}
    used |= {address.kind for address in map(parse_notify, notify)}
    for kind, (library, what) in _NEEDS.items():
        if kind in used and importlib.util.find_spec(library) is None:
            raise MissingExtra("actions", what)


_NEEDS: Final = {
    "webhook": ("aiohttp", "a webhook receiver"),
    "email": ("aiosmtplib", "a receiver of mail"),
    "chat": ("apprise", "a receiver of chat messages"),
    "sms": ("boto3", "a receiver of short messages"),
    "lambda": ("boto3", "a receiver of the type lambda"),
}


def _aws_lanes(config: Config) -> dict[str, Lane]:
    lanes: dict[str, Lane] = {}
    texts: SmsSender | None = None
    functions: LambdaSender | None = None
    for name, receiver in config.receivers.items():
        give_up_ms = _give_up_ms(receiver)
        if isinstance(receiver, SmsReceiver):
            texts = texts or SmsSender()
            number = SmsTarget(
                name=name,
                to=receiver.to,
                region=receiver.region,
                sender_id=receiver.sender_id,
                give_up_ms=give_up_ms,
            )
            lanes[name] = Lane(partial(texts.send, number), give_up_ms, at_once=AWS_AT_ONCE)
        elif isinstance(receiver, LambdaReceiver):
            functions = functions or LambdaSender()
            function = LambdaTarget(
                name=name,
                function=receiver.function,
                region=receiver.region,
                give_up_ms=give_up_ms,
            )
            lanes[name] = Lane(partial(functions.invoke, function), give_up_ms, at_once=AWS_AT_ONCE)
    return lanes


def _chat_targets(
    config: Config, secrets: Mapping[str, SecretStr], notify: Sequence[str]
) -> dict[str, ChatTarget]:
    """Without those whose URL is an optional secret that is missing."""
    targets: dict[str, ChatTarget] = {}
    for name, receiver in config.receivers.items():
        if not isinstance(receiver, ChatReceiver):
            continue
        url = value_of(receiver.url, secrets)
        if url is None:
            continue
        why_not = chat_fault(url.get_secret_value())
        if why_not is not None:
            raise ConfigurationError(f"receiver {name!r}: {why_not}")
        targets[name] = ChatTarget(name, url, _give_up_ms(receiver))
    for address in map(parse_notify, notify):
        if address.kind == "chat":
            targets[address.name] = ChatTarget(address.name, address.url)
    return targets


def _email_targets(
    config: Config,
    secrets: Mapping[str, SecretStr],
    notify: Sequence[str],
    folder: Path,
    environ: Mapping[str, str],
) -> dict[str, EmailTarget]:
    targets: dict[str, EmailTarget] = {}
    for name, receiver in config.receivers.items():
        if not isinstance(receiver, EmailReceiver):
            continue
        what = f"receiver {name!r}"
        server = (
            server_of_environment(environ)
            if receiver.smtp is None
            else server_of_config(receiver.smtp, secrets, folder=folder, what=what)
        )
        targets[name] = EmailTarget(
            name=name,
            to=receiver.to,
            server=server,
            sender=receiver.sender,
            give_up_ms=_give_up_ms(receiver),
        )
    for address in map(parse_notify, notify):
        if address.kind == "email":
            targets[address.name] = EmailTarget(
                name=address.name, to=address.to, server=server_of_environment(environ)
            )
    return targets


def _webhook_lane(sender: WebhookSender, target: WebhookTarget) -> Lane:
    async def attempt(notice: Notice) -> Outcome:
        delivery = notice.delivery
        return await sender.post(target, delivery.delivery_id, delivery.event or {}, notice.now_ms)

    return Lane(attempt, target.give_up_ms)


def _give_up_ms(receiver: AnyReceiver) -> int:
    return receiver.retry.give_up_after // timedelta(milliseconds=1)
