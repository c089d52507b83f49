"""Notices of a command of its own: the real action service, on a bus in a temporary folder.

So the ledger, the retries, the address guard and the message are those of production, and no bus
of runs gets a record of it.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from tocsin.actions.composition import build_actions_service
from tocsin.actions.delivery.records import issue_record
from tocsin.actions.delivery.service import ActionsService
from tocsin.actions.receivers.notify_option import parse_addresses
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import Bus
from tocsin.console.context import CommandContext
from tocsin.console.publication import publish
from tocsin.console.services.workers import SOFTWARE
from tocsin.console.views.bus_view import read_view
from tocsin.runtime.worker import Worker, WorkerSettings
from tocsin.schemas.configuration.file import Config
from tocsin.schemas.configuration.problems import did_you_mean
from tocsin.schemas.configuration.sections import ActionEntry, RuleEntry
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.issues import Issue
from tocsin.schemas.signing import SigningKey
from tocsin.schemas.topics import Topics

_STARTED_S: Final = 10.0


class PrivateDelivery:
    """Delivers issues to some receivers. Made by `private_delivery`."""

    def __init__(
        self,
        bus: Bus,
        topics: Topics,
        service: ActionsService,
        worker: Worker,
        receivers: Sequence[str],
    ) -> None:
        self.worker = asyncio.create_task(worker.run(), name="tocsin-private-delivery")
        """Ends by itself only if it fails."""
        self._bus = bus
        self._topics = topics
        self._service = service
        self._worker = worker
        self._receivers = tuple(receivers)

    async def publish(self, issue: Issue) -> None:
        """Have the receivers notified of a state of an issue."""
        await publish(self._bus, [issue_record(self._topics, issue, unix_ms())])

    async def finish(self, run_id: str, timeout_s: float) -> list[Delivery]:
        """Wait until all is delivered, for `timeout_s` at most, and stop.

        Returns:
            The state of each delivery about the run, in the order of the receivers.
        """
        await self._worker.caught_up(_STARTED_S)
        await self._service.drain(timeout_s)
        await self.stop()
        view = await read_view(self._bus, self._topics, run_id)
        found = {delivery.action: delivery for delivery in view.deliveries}
        return [found[name] for name in self._receivers if name in found]

    async def stop(self) -> None:
        """Stop delivering. Raises what the worker ended with, if it failed."""
        self._worker.stop()
        await self.worker


@asynccontextmanager
async def private_delivery(
    context: CommandContext,
    receivers: Sequence[str],
    *,
    rule: str,
    notify: Sequence[str] = (),
    allow_cidr: Sequence[str] = (),
    allow_command: Sequence[str] = (),
) -> AsyncIterator[PrivateDelivery]:
    """Deliver issues of one rule to receivers of the configuration, all of them if none is named.

    Raises:
        ConfigurationError: there is no such receiver, or one cannot be used.
        MissingExtra: what a receiver needs is not installed.
    """
    addressed = list(parse_addresses(notify))
    chosen = _chosen(context.config, receivers, or_all=not addressed)
    actions = tuple(
        ActionEntry(kind="receiver", receiver=name, loc=("receivers", name)) for name in chosen
    )
    config = context.config.model_copy(
        update={
            "receivers": {name: context.config.receivers[name] for name in chosen},
            "rules": (RuleEntry(name=rule, use=rule, actions=actions),),
        }
    )
    topics = Topics()
    with tempfile.TemporaryDirectory(prefix=f"tocsin-{rule}-") as folder:
        async with EmbeddedBus(Path(folder) / "bus.db") as bus:
            await bus.init(topics.specs())
            service = build_actions_service(
                topics,
                config,
                bus=bus,
                # It signs nothing: these issues stop no run.
                key=SigningKey.generate(),
                secrets=context.secrets,
                embedded=context.embedded,
                notify=notify,
                stop=False,
                allow_cidr=allow_cidr,
                allow_command=allow_command,
                config_path=context.loaded.path,
                software=SOFTWARE,
            )
            worker = Worker(
                bus,
                service,
                topics=topics,
                group=rule,
                settings=WorkerSettings(software=SOFTWARE, checkpoint_s=0.1),
            )
            delivery = PrivateDelivery(bus, topics, service, worker, (*chosen, *addressed))
            try:
                yield delivery
            finally:
                await delivery.stop()


def _chosen(config: Config, named: Sequence[str], *, or_all: bool) -> list[str]:
    for name in named:
        if name not in config.receivers:
            hint = did_you_mean(name, config.receivers)
            raise ConfigurationError(
                f"no receiver {name!r} in the configuration" + (f"; try {hint}" if hint else "")
            )
    if not named and or_all and not config.receivers:
        raise ConfigurationError(
            "no receiver: name one in tocsin.yaml, or with --notify mailto:me@example.com"
        )
    return list(dict.fromkeys(named)) or (list(config.receivers) if or_all else [])
