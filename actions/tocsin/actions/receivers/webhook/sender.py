"""Webhooks: one attempt is one POST of the issue's CloudEvent, signed, to a guarded address."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from pydantic import SecretStr

from tocsin.actions.delivery.receiver_queues import Notice
from tocsin.actions.delivery.retry import Outcome
from tocsin.actions.receivers.http import HttpPoster
from tocsin.actions.receivers.webhook.signature import sign

CONTENT_TYPE: Final = "application/cloudevents+json; charset=utf-8"


@dataclass(frozen=True, slots=True)
class WebhookTarget:
    """A receiver. Everything that may be secret is wrapped, the URL too: some hold a token."""

    name: str
    url: SecretStr
    headers: Mapping[str, SecretStr] = field(default_factory=dict)
    keys: tuple[SecretStr, ...] = ()
    """The signing key, and behind it the one before while they are being replaced."""


class WebhookSender:
    """Posts CloudEvents. One per service; `close` it at the end."""

    def __init__(self, poster: HttpPoster) -> None:
        self._poster = poster

    async def send(self, target: WebhookTarget, notice: Notice) -> Outcome:
        """One attempt. Raises nothing but CancelledError."""
        delivery_id = notice.delivery.delivery_id
        event = notice.delivery.event or {}
        body = json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()
        headers = {name: value.get_secret_value() for name, value in target.headers.items()}
        timestamp_s = notice.now_ms // 1000
        headers |= {
            "content-type": CONTENT_TYPE,
            "webhook-id": delivery_id,
            "webhook-timestamp": str(timestamp_s),
        }
        if target.keys:
            headers["webhook-signature"] = sign(
                target.keys, id=delivery_id, timestamp_s=timestamp_s, body=body
            )
        return await self._poster.post(target.url, body, headers)

    async def close(self) -> None:
        """Close the connections."""
        await self._poster.close()
