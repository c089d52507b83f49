"""Queues of AWS SQS."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from tocsin.actions.delivery.receiver_queues import Notice
from tocsin.actions.receivers.aws import AwsKind, AwsTarget, event_text, status_of
from tocsin.actions.receivers.kind import ReceiverContext
from tocsin.actions.receivers.sqs.config import SqsReceiver

_GROUP: Final = 128
"""Characters of a group's id, at most."""


class Sqs(AwsKind[SqsReceiver]):
    """Sends each issue to a queue."""

    config = SqsReceiver
    called = "a receiver of the type sqs"

    def digests(self, config: SqsReceiver) -> bool:
        """Whether it takes notices with the occasion `digest`, whose event is a digest."""
        return True

    def target(self, name: str, config: SqsReceiver, context: ReceiverContext) -> AwsTarget:
        """The queue."""
        request = partial(send_message, config.queue)
        return AwsTarget(service="sqs", region=config.region, request=request)


def send_message(queue: str, client: Any, notice: Notice) -> int:
    """Send the event; blocks. A FIFO queue keeps the order of a run and drops a repeat."""
    delivery = notice.delivery
    fifo = {
        "MessageGroupId": delivery.run_id[:_GROUP],
        "MessageDeduplicationId": delivery.delivery_id,
    }
    answer = client.send_message(
        QueueUrl=queue,
        MessageBody=event_text(notice),
        **(fifo if queue.endswith(".fifo") else {}),
    )
    return status_of(answer)
