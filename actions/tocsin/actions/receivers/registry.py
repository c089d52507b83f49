"""The kinds of receivers: those that tocsin has, and those that installed packages offer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from tocsin.actions.receivers.alertmanager.kind import Alertmanager
from tocsin.actions.receivers.chat.kind import Chat
from tocsin.actions.receivers.email.kind import Email
from tocsin.actions.receivers.eventbridge.kind import EventBridge
from tocsin.actions.receivers.goalert.kind import GoAlert
from tocsin.actions.receivers.incident_io.kind import IncidentIo
from tocsin.actions.receivers.kind import AnyKind, ReceiverKind
from tocsin.actions.receivers.lambda_function.kind import LambdaFunction
from tocsin.actions.receivers.pagerduty.kind import PagerDuty
from tocsin.actions.receivers.sms.kind import Sms
from tocsin.actions.receivers.sqs.kind import Sqs
from tocsin.actions.receivers.webhook.kind import Webhook
from tocsin.schemas.configuration.receivers import ReceiverConfig
from tocsin.schemas.errors import ConfigurationError

GROUP: Final = "tocsin.receivers"
"""The entry points by which a package offers kinds: the kind's name, and its class."""

BUILT_IN: Final[Mapping[str, AnyKind]] = {
    "email": Email(),
    "chat": Chat(),
    "webhook": Webhook(),
    "sms": Sms(),
    "lambda": LambdaFunction(),
    "sqs": Sqs(),
    "eventbridge": EventBridge(),
    "pagerduty": PagerDuty(),
    "incident_io": IncidentIo(),
    "goalert": GoAlert(),
    "alertmanager": Alertmanager(),
}
"""By the `type` of the configuration. `--notify` asks them in this order."""


def _installed() -> Iterable[EntryPoint]:
    return entry_points(group=GROUP)


class ReceiverKinds:
    """All kinds by name. What tocsin has itself comes first: no package replaces it.

    A package is loaded when a receiver of its kind is read, and not before.
    """

    def __init__(self, installed: Callable[[], Iterable[EntryPoint]] = _installed) -> None:
        self._installed = installed
        self._loaded = dict(BUILT_IN)

    def names(self) -> list[str]:
        """All names. Reads what packages are installed."""
        return list(dict.fromkeys([*BUILT_IN, *sorted(one.name for one in self._installed())]))

    def get(self, name: str) -> AnyKind | None:
        """The kind of that name; None if there is none. May import a package.

        Raises:
            ConfigurationError: a package offers it, and it cannot be loaded.
        """
        if name not in self._loaded:
            offered = [one for one in self._installed() if one.name == name]
            if not offered:
                return None
            self._loaded[name] = _load(offered)
        return self._loaded[name]

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
