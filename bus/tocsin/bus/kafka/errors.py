"""aiokafka, and its errors as the port's, grouped by what the caller does about them."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from tocsin.bus.port import BusClosed, BusUnavailable, FencedMember, UnknownTopic, UnusableBus
from tocsin.schemas.errors import MissingExtra, RecordTooLarge, TocsinError
from tocsin.schemas.topics import MAX_RECORD_BYTES

try:
    from aiokafka import errors
except ModuleNotFoundError as error:
    raise MissingExtra("kafka", "a kafka:// bus") from error

REQUEST_S: Final = 10.0
"""How long any one answer of the brokers is waited for."""

CLOSE_S: Final = 2.0

_REFUSED: Final = (
    errors.AuthenticationFailedError,
    errors.SaslAuthenticationFailed,
    errors.UnsupportedSaslMechanismError,
    errors.IllegalSaslStateError,
    errors.TopicAuthorizationFailedError,
    errors.GroupAuthorizationFailedError,
    errors.ClusterAuthorizationFailedError,
    errors.UnsupportedVersionError,
    errors.IncompatibleBrokerVersion,
)
_FENCED: Final = (
    errors.CommitFailedError,
    errors.IllegalStateError,
    errors.IllegalGenerationError,
    errors.UnknownMemberIdError,
    errors.RebalanceInProgressError,
)

_ENDED: Final = (
    "Unexpected error during coordination",
    "Unexpected exception in heartbeat task",
    "Unknown error fetching offsets",
)
"""What aiokafka 0.14 raises for good once a task that keeps a member in its group has ended over an
error that it does not expect: as when the brokers' metadata names no broker for a moment. Where
that ends the task that sends the heartbeats, it raises an AssertionError."""


def explained(error: BaseException, doing: str) -> TocsinError:
    """The port's error for what aiokafka raised while `doing`."""
    message = "no answer in time" if isinstance(error, TimeoutError) else str(error)
    text = f"{doing}: {message or type(error).__name__}"
    if (why := _tls_trouble(error)) is not None:
        return UnusableBus(f"{doing}: {why}")
    if isinstance(error, _REFUSED):
        return UnusableBus(f"{text}: check the credentials and their permissions")
    if isinstance(error, errors.SecurityDisabled):
        return UnusableBus(f"{doing}: the brokers have no authorizer: set authorizer.class.name")
    if isinstance(error, errors.UnknownTopicOrPartitionError):
        return UnknownTopic(f"{text}: 'tocsin bus init' creates missing topics")
    if isinstance(error, errors.MessageSizeTooLargeError):
        return RecordTooLarge(MAX_RECORD_BYTES + 1, MAX_RECORD_BYTES)
    if isinstance(error, (errors.ConsumerStoppedError, errors.ProducerClosed)):
        return BusClosed(f"{doing}: the client was closed in the meantime")
    if isinstance(error, _FENCED):
        return FencedMember(f"{text}: discard the state, then poll again to rejoin the group")
    if isinstance(error, AssertionError) or any(end in message for end in _ENDED):
        return FencedMember(f"{text}: the group has expelled this consumer; create a new one")
    if isinstance(error, errors.KafkaConnectionError) and "bootstrap" in message:
        # Its own text repeats the addresses, not what is wrong with them.
        return BusUnavailable(
            f"{doing}: no broker answers; check that one is running at this address, and that "
            "this machine can reach it"
        )
    return BusUnavailable(f"{text}: try again later")


_TLS_ALERT: Final = 0x150303
"""How a TLS alert begins. A client that expects Kafka takes it for the length of an answer."""


def _tls_trouble(error: BaseException | None) -> str | None:
    """What to change where the two ends do not agree on TLS; None: it is something else."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return (
                f"the broker's certificate is not accepted ({error.verify_message}): bus.tls.ca "
                "must contain its authority, and the host in bus.url must match the certificate"
            )
        if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
            return (
                f"the broker refuses the TLS connection ({error.reason}): if it requires a client "
                "certificate, set bus.tls.certificate and bus.tls.key"
            )
        read = error.expected if isinstance(error, asyncio.IncompleteReadError) else None
        if (read or 0) >> 8 == _TLS_ALERT:
            return "the broker requires TLS at this address: set bus.tls"
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Turn what aiokafka raises in the body into the port's errors."""
    try:
        yield
    except (errors.KafkaError, OSError, TimeoutError, AssertionError) as error:
        raise explained(error, doing) from error
