"""Webhooks: one attempt is one POST of the issue, signed, to a guarded address."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import SecretStr

from tocsin.actions.decision.retry import Outcome
from tocsin.actions.delivery.receiver_queues import Notice
from tocsin.actions.receivers.http import HttpPoster
from tocsin.actions.receivers.webhook.bodies import BodyOf, structured
from tocsin.actions.receivers.webhook.signature import signed_headers


@dataclass(frozen=True, slots=True)
class WebhookTarget:
    """A receiver. Everything that may be secret is wrapped, the URL too: some hold a token."""

    name: str
    url: SecretStr
    headers: Mapping[str, SecretStr] = field(default_factory=dict)
    keys: tuple[SecretStr, ...] = ()
    """The signing key, and behind it the one before while they are being replaced."""
    body: BodyOf = structured
    tls: ssl.SSLContext | None = None


class WebhookSender:
    """Posts issues. One per service; `close` it at the end."""

    def __init__(self, poster: HttpPoster) -> None:
        self._poster = poster

    async def send(self, target: WebhookTarget, notice: Notice) -> Outcome:
        """One attempt. Raises RecordError: the notice can never be sent."""
        delivery_id = notice.delivery.delivery_id
        body = target.body(notice)
        headers = {name: value.get_secret_value() for name, value in target.headers.items()}
        headers |= {
            **body.headers,
            "content-type": body.content_type,
            **signed_headers(
                target.keys,
                id=delivery_id,
                timestamp_s=notice.now_ms // 1000,
                body=body.content,
            ),
        }
        return await self._poster.post(target.url, body.content, headers, tls=target.tls)

    async def close(self) -> None:
        """Close the connections."""
        await self._poster.close()
