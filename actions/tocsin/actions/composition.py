"""Puts the action service together: the one place where its parts meet."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from pydantic import SecretStr

from tocsin.actions.config import decisions_of, digests_of, routing_of
from tocsin.actions.decision.planned import STOP
from tocsin.actions.decision.retry import RetryPolicy
from tocsin.actions.delivery.answer_links import AnswerLinks
from tocsin.actions.delivery.failure_reports import FailureReports
from tocsin.actions.delivery.receiver_queues import ReceiverQueue
from tocsin.actions.delivery.service import ActionsService
from tocsin.actions.delivery.setup import Setup
from tocsin.actions.delivery.stop_publisher import StopPublisher
from tocsin.actions.digests.facts import read_digest
from tocsin.actions.receivers.address_guard import AddressGuard, parse_networks
from tocsin.actions.receivers.build import Receivers
from tocsin.actions.receivers.kind import MakeReport, ReceiverContext
from tocsin.actions.receivers.notify_option import parse_addresses
from tocsin.actions.receivers.registry import ReceiverKinds
from tocsin.actions.receivers.run_addresses import ReadAddresses, RunAddresses
from tocsin.actions.targets.build import Targets, backend_stops
from tocsin.actions.targets.kind import TargetContext
from tocsin.actions.targets.registry import TargetKinds
from tocsin.bus.port import Bus
from tocsin.runtime.metrics import Metrics
from tocsin.runtime.testing import no_crash
from tocsin.schemas.configuration.file import Config
from tocsin.schemas.configuration.sources import folder_of
from tocsin.schemas.signing import SigningKey, TrustedKeys
from tocsin.schemas.topics import Topics


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
    allow_command: Sequence[str] = (),
    config_path: Path | None = None,
    policy: RetryPolicy | None = None,
    metrics: Metrics | None = None,
    software: str = "tocsin",
    environ: Mapping[str, str] | None = None,
    kinds: ReceiverKinds | None = None,
    trusted: Callable[[], TrustedKeys] | None = None,
    links: bool = False,
    report: MakeReport | None = None,
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
        allow_command: the programs of `--allow-command`, which receivers may run.
        config_path: the file or folder that `config` came from, so that decisions can name its
            lines; it is read here once more, which may block. Relative paths in it start at its
            folder.
        environ: the environment, if not this process's own: `TOCSIN_SMTP` names a mail server.
        kinds: the kinds of receivers, if not those of tocsin and of installed packages.
        trusted: the keys of those whose silences count, if not `key` alone; may block.
        links: whether messages have links by which people answer, if there is a `public_url`.
        report: makes a report of a run, for receivers that attach one.
        crash: points at which a test may end the process: `attempting`, `attempted`.

    Raises:
        ConfigurationError: a receiver or a network cannot be used.
        MissingExtra: what a receiver needs is not installed.
    """
    addresses = None if kept_addresses is None else RunAddresses(kept_addresses)
    named = {address.name: address.config for address in parse_addresses(notify).values()}
    stops = StopPublisher(bus, topics, key)
    guard = AddressGuard(private=embedded, allow=parse_networks(allow_cidr))
    known, ends = kinds or ReceiverKinds(), TargetKinds()
    opened: Receivers

    def set_up(config: Config, secrets: Mapping[str, SecretStr], config_path: Path | None) -> Setup:
        nonlocal opened
        folder = Path.cwd() if config_path is None else folder_of(config_path)
        own = os.environ if environ is None else environ
        receivers = Receivers(
            ReceiverContext(
                secrets=secrets,
                guard=guard,
                folder=folder,
                environ=own,
                software=software,
                commands=frozenset(allow_command),
                report=report,
            ),
            known,
        )
        targets = Targets(
            TargetContext(secrets=secrets, guard=guard, folder=folder, environ=own), ends
        )
        routing = routing_of(
            config,
            path=config_path,
            notify=notify,
            addresses=addresses,
            stops_off=None if stop else "stops are switched off (--no-stop)",
        )
        queues = {
            STOP: stops.queue(),
            **receivers.open({**config.receivers, **named}),
            **targets.open(config.targets),
        }
        opened = receivers
        failures = FailureReports.from_config(config)
        decisions = decisions_of(config, routing, limited=not embedded)
        without = [name for name, one in config.receivers.items() if not one.links]
        public_url = config.public_url if links else None
        answers = AnswerLinks(public_url, key, without, config.page_url)
        digests = digests_of(config, routing)
        backends = backend_stops(config, ends, routing.place)

        async def close() -> None:
            await receivers.close()
            await targets.close()

        prices = config.prices
        return Setup(decisions, queues, failures, close, answers, prices, digests, backends)

    def find_queue(name: str) -> ReceiverQueue | None:
        found = None if addresses is None else addresses.find(name)
        return None if found is None else opened.open({name: found.config})[name]

    setup = set_up(config, secrets, config_path)
    return ActionsService(
        topics,
        setup,
        requested_by=f"actions@{socket.gethostname()}"[:200],
        policy=policy,
        metrics=metrics,
        crash=crash,
        closers=[stops.close],
        find_queue=find_queue,
        set_up=set_up,
        trusted=trusted or (lambda: TrustedKeys([key.public])),
        read_digest=partial(read_digest, bus, topics),
    )
