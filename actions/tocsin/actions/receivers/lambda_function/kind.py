"""Lambda functions."""

from __future__ import annotations

from functools import partial
from typing import Any

from tocsin.actions.delivery.receiver_queues import Notice
from tocsin.actions.receivers.aws import AwsKind, AwsTarget, event_text
from tocsin.actions.receivers.kind import ReceiverContext
from tocsin.actions.receivers.lambda_function.config import LambdaReceiver


class LambdaFunction(AwsKind[LambdaReceiver]):
    """Calls a function with each issue."""

    config = LambdaReceiver
    called = "a receiver of the type lambda"

    def digests(self, config: LambdaReceiver) -> bool:
        """Whether it takes notices with the occasion `digest`, whose event is a digest."""
        return True

    def target(self, name: str, config: LambdaReceiver, context: ReceiverContext) -> AwsTarget:
        """The function, by name or ARN, with `:ALIAS` if it has one."""
        request = partial(invoke, config.function)
        return AwsTarget(service="lambda", region=config.region, request=request)


def invoke(function: str, client: Any, notice: Notice) -> int:
    """Call it asynchronously: AWS answers 202 once it has the event, and runs it then. Blocks."""
    answer = client.invoke(
        FunctionName=function, InvocationType="Event", Payload=event_text(notice).encode()
    )
    return int(answer["StatusCode"])
