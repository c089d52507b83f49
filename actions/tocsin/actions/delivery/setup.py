"""What a configuration means for the action service, the first one or one of a reload."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import SecretStr

from tocsin.actions.decision.decide import Decisions
from tocsin.actions.delivery.answer_links import AnswerLinks
from tocsin.actions.delivery.failure_reports import FailureReports
from tocsin.actions.delivery.followed_stops import Backends
from tocsin.actions.delivery.receiver_queues import ReceiverQueue
from tocsin.actions.digests.intervals import DigestReceiver
from tocsin.schemas.configuration.file import Config
from tocsin.schemas.configuration.sections import PricesConfig


async def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Setup:
    """The parts of the service that follow from a configuration.

    Attributes:
        decisions: what is to be done about an issue.
        queues: by receiver, and `stop`.
        failures: reports what could not be delivered.
        close: closes the receivers.
        links: makes the links by which people answer.
        prices: what devices cost, for estimates of what is at stake.
        digests: who is notified once in an interval that all is well.
        backends: decides about the backends that may end jobs; None: none may.
    """

    decisions: Decisions
    queues: Mapping[str, ReceiverQueue]
    failures: FailureReports = FailureReports()  # noqa: RUF009  (frozen)
    close: Callable[[], Awaitable[None]] = _nothing
    links: AnswerLinks = AnswerLinks()  # noqa: RUF009  (frozen)
    prices: PricesConfig = PricesConfig()  # noqa: RUF009  (frozen)
    digests: Mapping[str, DigestReceiver] = field(default_factory=dict)
    backends: Backends | None = None


InThread = Callable[[Callable[[], None]], Awaitable[None]]
"""Runs a call in the worker's thread."""

SetUp = Callable[[Config, Mapping[str, SecretStr], Path | None], Setup]
"""Reads a configuration, the values of its secrets and its path. May block, and raise
ConfigurationError."""
