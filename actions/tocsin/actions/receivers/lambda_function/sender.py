"""Calls of an AWS Lambda function: the issue's CloudEvent is what it is called with."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

from tocsin.actions.delivery.receiver_queues import Notice
from tocsin.actions.delivery.retry import Outcome
from tocsin.actions.receivers.aws import AT_ONCE, ClientFactory, call, make_client


@dataclass(frozen=True, slots=True, kw_only=True)
class LambdaTarget:
    """A function, by name or ARN, with `:ALIAS` if it has one."""

    name: str
    function: str
    region: str | None = None


class LambdaSender:
    """Calls functions. One per service."""

    def __init__(self, make: ClientFactory = make_client) -> None:
        self._make = make
        self._room = asyncio.Semaphore(AT_ONCE)

    async def send(self, target: LambdaTarget, notice: Notice) -> Outcome:
        """One attempt. Raises nothing but CancelledError.

        The call is asynchronous: AWS answers 202 once it has the event, and runs the function
        then. `deliveryid` in the event is the same in each attempt.
        """
        delivery = notice.delivery
        event = {**(delivery.event or {}), "deliveryid": delivery.delivery_id}
        payload = json.dumps(event, separators=(",", ":")).encode()
        async with self._room:
            return await asyncio.to_thread(self._call, target, payload)

    async def close(self) -> None:
        """Close the sender; it keeps nothing open."""

    def _call(self, target: LambdaTarget, payload: bytes) -> Outcome:
        """Blocks."""

        def invoke() -> int:
            client = self._make("lambda", target.region)
            try:
                answer = client.invoke(
                    FunctionName=target.function, InvocationType="Event", Payload=payload
                )
                return int(answer["StatusCode"])
            finally:
                client.close()

        outcome = call(invoke)
        return Outcome(status=202, phrase="Accepted") if outcome.status == 202 else outcome
