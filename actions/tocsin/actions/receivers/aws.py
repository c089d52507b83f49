"""Calls of AWS: clients, what answers mean, and kinds of receivers that are one call each.

boto3 blocks, so calls run in threads.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from pydantic import JsonValue

from tocsin.actions.decision.retry import Outcome, phrase_of
from tocsin.actions.delivery import records
from tocsin.actions.delivery.receiver_queues import Notice
from tocsin.actions.receivers.kind import ConfigT, ReceiverContext, ReceiverKind

if TYPE_CHECKING:
    from botocore.client import BaseClient

TIMEOUT_S: Final = 10
"""To connect, and to wait for an answer."""

AT_ONCE: Final = 4

Service = Literal["sns", "lambda", "sqs", "events", "logs", "sagemaker", "batch"]


class ClientFactory(Protocol):
    """Makes a client of a service, of the region or the one of the AWS configuration."""

    def __call__(self, service: Service, region: str | None) -> BaseClient:
        """Blocks: reads files, asks for credentials."""
        ...


def make_client(service: Service, region: str | None) -> BaseClient:
    """A client with the machine's own credentials, which makes one attempt for each call.

    Raises:
        botocore.exceptions.BotoCoreError: there is no region, or the configuration is broken.
    """
    import boto3
    from botocore.config import Config

    config = Config(
        connect_timeout=TIMEOUT_S,
        read_timeout=TIMEOUT_S,
        # The ledger retries.
        retries={"total_max_attempts": 1, "mode": "standard"},
    )
    return boto3.session.Session().client(service, region_name=region, config=config)


def call(request: Callable[[], int]) -> Outcome:
    """Make one request, which returns its HTTP status; blocks. Raises nothing.

    An error's own words may hold account numbers and keys, so these are left out.
    """
    from botocore import exceptions

    try:
        status = request()
    except exceptions.ClientError as error:
        return _refusal(error.response)
    except (exceptions.NoCredentialsError, exceptions.PartialCredentialsError):
        # An instance's credentials can be late.
        return Outcome(later="no AWS credentials were found on this machine")
    except exceptions.NoRegionError:
        return Outcome(forbidden="no AWS region: set `region`, or AWS_DEFAULT_REGION")
    except exceptions.ParamValidationError:
        return Outcome(forbidden="the request is not one that AWS takes")
    except (exceptions.ConnectTimeoutError, exceptions.ReadTimeoutError):
        return Outcome(failure="timeout")
    except exceptions.SSLError:
        return Outcome(failure="TLS certificate not accepted")
    except (exceptions.HTTPClientError, exceptions.ConnectionError):
        return Outcome(failure="no connection")
    except (exceptions.BotoCoreError, OSError) as error:
        return Outcome(later=f"AWS could not be asked ({type(error).__name__})")
    return Outcome(status=status, phrase=phrase_of(status))


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsTarget:
    """A receiver that is one call of a service.

    Attributes:
        request: makes the call and returns its HTTP status; blocks.
    """

    service: Service
    region: str | None
    request: Callable[[Any, Notice], int]


class AwsSender:
    """Makes the calls. One per service."""

    def __init__(self, make: ClientFactory = make_client) -> None:
        self._make = make
        self._room = asyncio.Semaphore(AT_ONCE)

    async def send(self, target: AwsTarget, notice: Notice) -> Outcome:
        """One attempt. Raises nothing but CancelledError."""
        async with self._room:
            return await asyncio.to_thread(self._call, target, notice)

    async def close(self) -> None:
        """Nothing stays open."""

    def _call(self, target: AwsTarget, notice: Notice) -> Outcome:
        """Blocks."""

        def request() -> int:
            client = self._make(target.service, target.region)
            try:
                return target.request(client, notice)
            finally:
                client.close()

        return call(request)


class AwsKind(ReceiverKind[ConfigT, AwsTarget]):
    """A kind of receiver that is one call of a service."""

    libraries = ("boto3",)
    at_once = AT_ONCE

    def sender(self, context: ReceiverContext) -> AwsSender:
        """One for all receivers of the kind."""
        return AwsSender()


def event_of(notice: Notice) -> dict[str, JsonValue]:
    """The issue's CloudEvent; its `deliveryid` is the same in each attempt."""
    return {**records.event_of(notice.delivery), "deliveryid": notice.delivery.delivery_id}


def event_text(notice: Notice) -> str:
    """`event_of` as JSON."""
    return json.dumps(event_of(notice), separators=(",", ":"))


def status_of(answer: Mapping[str, Any]) -> int:
    """The HTTP status of an answer."""
    return int(answer["ResponseMetadata"]["HTTPStatusCode"])


_LATER: Final = (
    "Throttl", "TooManyRequests", "RequestLimit", "SlowDown", "Unavailable", "BandwidthLimit",
    # Credentials of a machine are renewed; what is late on the way is sent anew.
    "Expired", "RequestTimeout",
)  # fmt: skip
"""Parts of codes that mean: later."""

_LATER_CODES: Final = frozenset(
    {
        "IDPCommunicationError",
        "LimitExceededException",
        "PriorRequestNotComplete",
        "ProvisionedThroughputExceededException",
        # A function that is being updated.
        "ResourceConflictException",
        "TransactionInProgressException",
    }
)
"""With those above: what botocore itself would try again, were it allowed to."""


def _refusal(response: object) -> Outcome:
    """By the status; being throttled, or late, is an answer 400 of some services."""
    found = response if isinstance(response, dict) else {}
    status = found.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    code = str(found.get("Error", {}).get("Code", ""))
    word = code if code.replace(".", "").isalnum() and len(code) <= 64 else ""
    text = f"{status or ''} {word}".strip() or "refused"
    again = code in _LATER_CODES or any(sign in code for sign in _LATER)
    again = again or status in (408, 429) or status >= 500
    return Outcome(later=text) if again or not status else Outcome(forbidden=text)
