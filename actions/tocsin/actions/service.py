"""Puts the action service together: the one place where its parts meet."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from pydantic import SecretStr

from tocsin.actions.config import routing_of
from tocsin.actions.delivery import stop as stops
from tocsin.actions.delivery.actions_service import ActionsService
from tocsin.actions.delivery.expired import Failures
from tocsin.actions.delivery.lanes import Lane, Notice
from tocsin.actions.delivery.retry import Outcome, RetryPolicy
from tocsin.actions.delivery.routing import STOP
from tocsin.actions.receivers.address_guard import AddressGuard, parse_networks
from tocsin.actions.receivers.build import receiver_lanes
from tocsin.actions.receivers.run_addresses import ReadAddresses, RunAddresses
from tocsin.bus.port import Bus, BusUnavailable, Producer
from tocsin.runtime.metrics import Metrics
from tocsin.runtime.worker import no_crash
from tocsin.schemas.configuration.file import Config
from tocsin.schemas.errors import RecordError
from tocsin.schemas.signing import SigningKey
from tocsin.schemas.topics import Topics

_STOPS_AT_ONCE: Final = 1_000


class _StopLane:
    """Publishes signed commands with a producer of its own."""

    def __init__(self, bus: Bus, topics: Topics, key: SigningKey) -> None:
        self._bus = bus
        self._topics = topics
        self._key = key
        self._producer: Producer | None = None

    async def attempt(self, notice: Notice) -> Outcome:
        event = notice.delivery.event
        if event is None:
            return Outcome(forbidden="the ledger's entry holds no stop command")
        try:
            record = stops.signed_record(self._topics, event, self._key)
        except RecordError as error:
            return Outcome(forbidden=str(error))
        try:
            if self._producer is None:
                self._producer = await self._bus.producer()
            await self._producer.publish([record])
        except BusUnavailable:
            return Outcome(failure="bus away")
        return Outcome(sent=True)

    async def close(self) -> None:
        if self._producer is not None:
            await self._producer.close()


def build_actions_service(
    topics: Topics,
    config: Config,
    *,
    bus: Bus,
    key: SigningKey,
    secrets: Mapping[str, SecretStr],
    embedded: bool,
    notify: Sequence[str] = (),
    kept_addresses: ReadAddresses | None = None,
    stop: bool = True,
    allow_cidr: Sequence[str] = (),
    config_path: Path | None = None,
    policy: RetryPolicy | None = None,
    metrics: Metrics | None = None,
    software: str = "tocsin",
    environ: Mapping[str, str] | None = None,
    crash: Callable[[str], None] = no_crash,
) -> ActionsService:
    """The action service for one worker.

    Args:
        bus: open; stop commands are published on it.
        key: signs stop commands (`tocsin.schemas.signing.own_key`).
        secrets: their values (`tocsin.schemas.configuration.settings.resolve_secrets`).
        embedded: whether it serves a run on this machine's own bus: webhooks may then reach
            private and loopback addresses.
        notify: the addresses of `--notify`.
        kept_addresses: reads addresses of `--notify` that count for one launch each.
        stop: whether stops may be sent; False after `--no-stop`.
        allow_cidr: the networks of `--allow-cidr`.
        config_path: the file that `config` came from, so that decisions can name its lines; it is
            read here once more, which may block. Relative paths in it start at its folder.
        environ: the environment, if not this process's own: `TOCSIN_SMTP` names a mail server.
        crash: points at which a test may end the process: `attempting`, `attempted`.

    Raises:
        ConfigurationError: a receiver or a network cannot be used.
        MissingExtra: what a receiver needs is not installed.
    """
    networks = parse_networks(allow_cidr)
    stop_lane = _StopLane(bus, topics, key)
    lanes = {STOP: Lane(stop_lane.attempt, at_once=_STOPS_AT_ONCE)}
    closers: list[Callable[[], Awaitable[None]]] = [stop_lane.close]
    addresses = None if kept_addresses is None else RunAddresses(kept_addresses)

    def open_lanes(config: Config, notify: Sequence[str]) -> dict[str, Lane]:
        opened, receiver_closers = receiver_lanes(
            config,
            secrets,
            guard=AddressGuard(private=embedded, allow=networks),
            notify=notify,
            folder=None if config_path is None else config_path.parent,
            environ=environ,
            software=software,
        )
        closers.extend(receiver_closers)
        return opened

    def find_lane(name: str) -> Lane | None:
        text = None if addresses is None else addresses.text_of(name)
        return None if text is None else open_lanes(Config(), [text])[name]

    lanes |= open_lanes(config, notify)
    return ActionsService(
        topics,
        routing_of(
            config,
            path=config_path,
            notify=notify,
            addresses=addresses,
            stops_off=None if stop else "stops are switched off (--no-stop)",
        ),
        lanes,
        requested_by=f"actions@{socket.gethostname()}"[:200],
        policy=policy,
        metrics=metrics,
        crash=crash,
        closers=closers,
        find_lane=find_lane,
        failures=Failures.of(config),
    )
