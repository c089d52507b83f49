"""The kinds of receivers: those that tocsin has, and those that installed packages offer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from tocsin.actions.receivers.kind import AnyKind, ReceiverKind
from tocsin.schemas.configuration.receivers import ReceiverConfig
from tocsin.schemas.errors import ConfigurationError

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
"""By the `type` of the configuration. `--notify` asks them in this order. Each is imported when it
is first asked for: most configurations name one or two, and each process reads them."""


def _installed() -> Iterable[EntryPoint]:
    return entry_points(group=GROUP)


class ReceiverKinds:
    """All kinds by name. What tocsin has itself comes first: no package replaces it.

    A kind is imported when a receiver of it is read, and not before.
    """

    def __init__(self, installed: Callable[[], Iterable[EntryPoint]] = _installed) -> None:
        self._installed = installed
        self._loaded: dict[str, AnyKind] = {}

    def names(self) -> list[str]:
        """All names. Reads what packages are installed."""
        return list(dict.fromkeys([*BUILT_IN, *sorted(one.name for one in self._installed())]))

    def get(self, name: str) -> AnyKind | None:
        """The kind of that name; None if there is none. May import a package.

        Raises:
            ConfigurationError: a package offers it, and it cannot be loaded.
        """
        if name not in self._loaded:
            if name in BUILT_IN:
                offered = [EntryPoint(name, BUILT_IN[name], GROUP)]
            else:
                offered = [one for one in self._installed() if one.name == name]
            if not offered:
                return None
            self._loaded[name] = _load(offered)
        return self._loaded[name]

    def built_in(self) -> Iterator[AnyKind]:
        """The kinds that tocsin has, one by one."""
        return (kind for name in BUILT_IN if (kind := self.get(name)) is not None)

    def model(self, kind: str) -> type[ReceiverConfig] | None:
        """The model of a kind's configuration. Raises as `get` does."""
        found = self.get(kind)
        return None if found is None else found.config

    def models(self) -> list[type[ReceiverConfig]]:
        """The models of all kinds. Raises as `get` does."""
        return [found for name in self.names() if (found := self.model(name)) is not None]

    def kind_of(self, config: ReceiverConfig) -> AnyKind:
        """The kind of a receiver.

        Raises:
            TypeError: it was read without the models of kinds, or is of none: a bug.
        """
        kind = self.get(config.type)
        if kind is None or not isinstance(config, kind.config):
            raise TypeError(f"a receiver of the type {config.type!r} was not read as one")
        return kind


def _load(offered: list[EntryPoint]) -> AnyKind:
    first = offered[0]
    by = " and ".join(sorted({one.dist.name if one.dist else one.value for one in offered}))
    what = f"the receiver kind {first.name!r} of {by}"
    if len({one.value for one in offered}) > 1:
        raise ConfigurationError(f"{what}: expected one package to offer it")
    try:
        kind = first.load()()
    # Whatever a package does when it is imported.
    except Exception as error:
        raise ConfigurationError(
            f"{what} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(kind, ReceiverKind):
        raise ConfigurationError(f"{what}: expected a class derived from ReceiverKind")
    return kind
