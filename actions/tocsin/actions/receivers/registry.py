"""The kinds of receivers: those that tocsin has, and those that installed packages offer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint
from typing import Final

from tocsin.actions.kinds import Kinds
from tocsin.actions.receivers.kind import AnyKind, ReceiverKind
from tocsin.schemas.configuration.receivers import ReceiverConfig

GROUP: Final = "tocsin.receivers"
"""The entry points by which a package offers kinds: the kind's name, and its class."""

BUILT_IN: Final[Mapping[str, str]] = {
    "email": "tocsin.actions.receivers.email.kind:Email",
    "chat": "tocsin.actions.receivers.chat.kind:Chat",
    "webhook": "tocsin.actions.receivers.webhook.kind:Webhook",
    "sms": "tocsin.actions.receivers.sms.kind:Sms",
    "lambda": "tocsin.actions.receivers.lambda_function.kind:LambdaFunction",
    "sqs": "tocsin.actions.receivers.sqs.kind:Sqs",
    "eventbridge": "tocsin.actions.receivers.eventbridge.kind:EventBridge",
    "cloudwatch": "tocsin.actions.receivers.cloudwatch.kind:CloudWatch",
    "command": "tocsin.actions.receivers.command.kind:Command",
    "pagerduty": "tocsin.actions.receivers.pagerduty.kind:PagerDuty",
    "incident_io": "tocsin.actions.receivers.incident_io.kind:IncidentIo",
    "goalert": "tocsin.actions.receivers.goalert.kind:GoAlert",
    "alertmanager": "tocsin.actions.receivers.alertmanager.kind:Alertmanager",
}
"""By the `type` of the configuration. `--notify` asks them in this order."""


class ReceiverKinds(Kinds[AnyKind, ReceiverConfig]):
    """All kinds of receivers by name."""

    def __init__(self, installed: Callable[[], Iterable[EntryPoint]] | None = None) -> None:
        super().__init__("receiver", ReceiverKind, BUILT_IN, GROUP, installed)
