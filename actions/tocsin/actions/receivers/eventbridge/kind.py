"""Event buses of AWS EventBridge."""

from __future__ import annotations

from functools import partial
from typing import Any

from tocsin.actions.delivery.receiver_queues import Notice
from tocsin.actions.receivers.aws import AwsKind, AwsTarget, event_text, status_of
from tocsin.actions.receivers.eventbridge.config import EventBridgeReceiver
from tocsin.actions.receivers.kind import ReceiverContext


class EventBridge(AwsKind[EventBridgeReceiver]):
    """Puts each issue on an event bus."""

    config = EventBridgeReceiver
    called = "a receiver of the type eventbridge"

    def digests(self, config: EventBridgeReceiver) -> bool:
        """Whether it takes notices with the occasion `digest`, whose event is a digest."""
        return True

    def target(self, name: str, config: EventBridgeReceiver, context: ReceiverContext) -> AwsTarget:
        """The event bus."""
        request = partial(put_event, config.event_bus)
        return AwsTarget(service="events", region=config.region, request=request)


def put_event(event_bus: str, client: Any, notice: Notice) -> int:
    """Put the event; blocks. Its detail type is the type of the CloudEvent."""
    from botocore.exceptions import ClientError

    event = notice.delivery.event or {}
    entry = {
        "EventBusName": event_bus,
        "Source": "tocsin",
        "DetailType": str(event.get("type", "")),
        "Detail": event_text(notice),
    }
    answer = client.put_events(Entries=[entry])
    if answer.get("FailedEntryCount"):
        # The call is a success, and its only entry is not.
        code = str(answer["Entries"][0].get("ErrorCode", ""))
        # InternalFailure is worth another attempt, as throttling is.
        status = 500 if code.startswith("Internal") else 400
        failed = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
        raise ClientError(failed, "PutEvents")
    return status_of(answer)
