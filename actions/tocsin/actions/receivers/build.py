"""From receivers to the queues that deliver to them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Final

from tocsin.actions.delivery.circuit import CircuitPolicy
from tocsin.actions.delivery.receiver_queues import Attempt, ReceiverQueue
from tocsin.actions.receivers.kind import AnyKind, ReceiverContext, Sender
from tocsin.actions.receivers.registry import ReceiverKinds
from tocsin.schemas.configuration.receivers import ReceiverConfig

_MS: Final = timedelta(milliseconds=1)


class Receivers:
    """Opens queues, with one sender for all receivers of a kind; `close` it at the end."""

    def __init__(self, context: ReceiverContext, kinds: ReceiverKinds) -> None:
        self._context = context
        self._kinds = kinds
        self._senders: dict[str, Sender[Any]] = {}

    def open(self, receivers: Mapping[str, ReceiverConfig]) -> dict[str, ReceiverQueue]:
        """A queue for each receiver, by name; none for those that go without a secret.

        Raises:
            ConfigurationError: a receiver cannot be used. The message shows no secret.
            MissingExtra: what a receiver needs is not installed.
        """
        queues: dict[str, ReceiverQueue] = {}
        for name, config in receivers.items():
            kind = self._kinds.kind_of(config)
            target = kind.target(name, config, self._context)
            if target is None:
                continue
            if config.type not in self._senders:
                kind.check_installed()
                kind.load()
                self._senders[config.type] = kind.sender(self._context)
            send = partial(self._senders[config.type].send, target)
            queues[name] = receiver_queue(kind, config, send, target)
        return queues

    async def close(self) -> None:
        """Close all senders."""
        for sender in self._senders.values():
            await sender.close()


def receiver_queue(
    kind: AnyKind, config: ReceiverConfig, send: Attempt, target: object = None
) -> ReceiverQueue:
    """The queue of a receiver, from its kind and its configuration. Pure.

    `target` is the kind's; None if it is not known, as where nothing is sent.
    """
    return ReceiverQueue(
        send,
        config.retry.give_up_after // _MS,
        config.concurrency or kind.at_once,
        kind.one_alert,
        kind.acknowledges,
        CircuitPolicy(config.circuit_breaker.failures, config.circuit_breaker.probe_every // _MS),
        kind.groups(target),
        kind.edits(target),
    )


def check_usable(
    receivers: Mapping[str, ReceiverConfig], context: ReceiverContext, kinds: ReceiverKinds
) -> None:
    """Refuse now what `Receivers.open` would refuse later, in another process. Connects to nobody.

    Raises:
        ConfigurationError, MissingExtra: as `open` does.
    """
    for name, config in receivers.items():
        kind = kinds.kind_of(config)
        kind.target(name, config, context)
        kind.check_installed()
