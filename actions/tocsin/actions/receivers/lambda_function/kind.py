"""Lambda functions."""

from __future__ import annotations

from tocsin.actions.receivers.aws import AT_ONCE
from tocsin.actions.receivers.kind import ReceiverContext, ReceiverKind
from tocsin.actions.receivers.lambda_function.config import LambdaReceiver
from tocsin.actions.receivers.lambda_function.sender import LambdaSender, LambdaTarget


class LambdaFunction(ReceiverKind[LambdaReceiver, LambdaTarget]):
    """Calls a function with each issue."""

    config = LambdaReceiver
    libraries = ("boto3",)
    called = "a receiver of the type lambda"
    at_once = AT_ONCE

    def target(self, name: str, config: LambdaReceiver, context: ReceiverContext) -> LambdaTarget:
        """The function."""
        return LambdaTarget(name=name, function=config.function, region=config.region)

    def sender(self, context: ReceiverContext) -> LambdaSender:
        """One for all functions."""
        return LambdaSender()
