"""From the configuration to the lanes that deliver to its receivers, and those of `--notify`."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from pydantic import SecretStr

from tocsin.actions.address_guard import AddressGuard
from tocsin.actions.config import webhook_targets
from tocsin.actions.decision import Outcome
from tocsin.actions.email import EmailSender, EmailTarget
from tocsin.actions.lanes import Lane, Notice
from tocsin.actions.notify import parse_notify
from tocsin.actions.smtp import server_of_config, server_of_environment
from tocsin.actions.webhook import WebhookSender, WebhookTarget
from tocsin.schemas.config import Config
from tocsin.schemas.config_receivers import AnyReceiver, EmailReceiver

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
        lanes |= {name: _email_lane(mailer, target) for name, target in mails.items()}
    return lanes, closers


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


def _email_lane(sender: EmailSender, target: EmailTarget) -> Lane:
    async def attempt(notice: Notice) -> Outcome:
        return await sender.send(target, notice)

    return Lane(attempt, target.give_up_ms)


def _give_up_ms(receiver: AnyReceiver) -> int:
    return receiver.retry.give_up_after // timedelta(milliseconds=1)
