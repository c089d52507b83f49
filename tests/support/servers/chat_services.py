"""Local receivers that speak as Slack, Discord and Telegram document it, over real TLS.

Slack: https://docs.slack.dev/messaging/sending-messages-using-incoming-webhooks
Discord: https://docs.discord.com/developers/resources/webhook#execute-webhook
Telegram: https://core.telegram.org/bots/api#sendmessage
Twilio: https://www.twilio.com/docs/messaging/api/message-resource#create-a-message
"""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import BasicAuth, web

HOSTS = ("hooks.slack.com", "discord.com", "api.telegram.org", "api.twilio.com")

SLACK = "slack://TAAAAAAAA/BAAAAAAAA/SECRETaaaaaaaaaaaaaaaaaa"
SLACK_NATIVE = "https://hooks.slack.com/services/TAAAAAAAA/BAAAAAAAA/SECRETaaaaaaaaaaaaaaaaaa"
DISCORD = "discord://417429632418316298/SECRET-lml277CDHmQKMHI8qBe7bk2ZwO5UKjCiOAF7711o33MyqU344Qpg"
TELEGRAM = "tgram://123456789:SECRET_hijklmnopqrstuvwxyz0123456/12315544"


@dataclass
class ChatServices:
    """What came in. `status` other than 200 is the answer to everything."""

    port: int = 0
    status: int = 200
    retry_after: str | None = None
    seen: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    @property
    def connect_to(self) -> dict[str, tuple[str, int]]:
        """Where each service is really to be found."""
        return {host: ("127.0.0.1", self.port) for host in HOSTS}

    async def answer(self, request: web.Request) -> web.Response:
        host = request.host.partition(":")[0]
        form = request.content_type == "application/x-www-form-urlencoded"
        body = dict(await request.post()) if form else await request.json()
        self.seen.append((f"{host}{request.path}", body))
        if self.status != 200:
            headers = {} if self.retry_after is None else {"Retry-After": self.retry_after}
            if 300 <= self.status < 400:
                headers["Location"] = f"https://{host}/elsewhere"
            return web.Response(status=self.status, text="SECRET-IN-BODY", headers=headers)
        answers = dict(
            zip(HOSTS, (self._slack, self._discord, self._telegram, self._twilio), strict=True)
        )
        return answers[host](request, body)

    def _slack(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        known = {"text", "attachments", "blocks", "mrkdwn", "channel", "username", "icon_url"}
        if not request.path.startswith("/services/") or set(body) - known:
            return web.Response(status=400, text="invalid_payload")
        return web.Response(text="ok")

    def _discord(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        good = request.path.startswith("/api/webhooks/") and (
            body.get("content") or "embeds" in body
        )
        if not good or len(body.get("content", "")) > 2000:
            return web.json_response({"content": ["Must be 2000 or fewer in length."]}, status=400)
        return web.Response(status=204)

    def _telegram(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        if not request.path.startswith("/bot") or not body.get("text") or "chat_id" not in body:
            wrong = {"ok": False, "error_code": 400, "description": "Bad Request"}
            return web.json_response(wrong, status=400)
        return web.json_response({"ok": True, "result": {"message_id": 1}})

    def _twilio(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        good = request.path.endswith("/Messages.json") and {"From", "To", "Body"} <= set(body)
        if not good or len(body["Body"]) > 1600:
            return web.json_response({"code": 21602, "message": "SECRET-IN-BODY"}, status=400)
        if "SECRET" not in BasicAuth.decode(request.headers["Authorization"]).password:
            return web.json_response({"code": 20003}, status=401)
        return web.json_response({"sid": "SM1", "status": "queued"}, status=201)

    def text(self) -> str:
        """All that came in."""
        return json.dumps(self.seen, ensure_ascii=False)


@asynccontextmanager
async def chat_services(context: ssl.SSLContext) -> AsyncIterator[ChatServices]:
    """Listen on a free port of 127.0.0.1."""
    services = ChatServices()
    application = web.Application()
    application.router.add_post("/{path:.*}", services.answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    services.port = runner.addresses[0][1]
    try:
        yield services
    finally:
        await runner.cleanup()
