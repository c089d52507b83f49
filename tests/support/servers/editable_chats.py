"""Chat services as one local server, whose messages can be edited and answered.

Slack: https://docs.slack.dev/reference/methods/chat.update
Discord: https://docs.discord.com/developers/resources/webhook#edit-webhook-message
Telegram: https://core.telegram.org/bots/api#editmessagetext
Mattermost: https://developers.mattermost.com/api-documentation/ (patch a post)
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

TOKEN = "xoxb-1-SECRET"
HOOK = "4174/SECRET-hook"
BOT = "123:SECRET_bot"
ROOM = "c" * 26
ROOM_TOKEN = "secret" + "a" * 20


@dataclass
class Written:
    """One message: its text is the newest one."""

    text: str
    to: str | None = None
    loud: bool = True


@dataclass
class EditableChats:
    """What is there. `answers` are given instead, one for each request: a status, or a body."""

    url: str = ""
    messages: dict[str, Written] = field(default_factory=dict)
    answers: list[int | dict[str, Any] | None] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def add(self, key: str, text: str, to: str | None = None, loud: bool = True) -> None:
        self.messages[key] = Written(text, to, loud)

    async def answer(self, request: web.Request) -> web.Response:
        """As Slack does: compressed, if who asks can read that."""
        self.requests.append(f"{request.method} {request.path}")
        response = await self._answer(request)
        response.enable_compression()
        return response

    async def _answer(self, request: web.Request) -> web.Response:
        given = self.answers.pop(0) if self.answers else None
        if isinstance(given, int):
            headers = {"Retry-After": "7"} if given == 429 else {"Location": self.url}
            return web.Response(status=given, text="SECRET-IN-BODY", headers=headers)
        if given is not None:
            return web.json_response(given)
        body = await request.json()
        if request.path.startswith("/api/webhooks/"):
            return self._discord(request, body)
        if request.path.startswith("/api/v4/posts"):
            return self._mattermost(request, body)
        return self._slack(request, body) if "/api/" in request.path else self._tg(request, body)

    def _slack(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"ok": False, "error": "invalid_auth"})
        if request.path == "/api/chat.update":
            if body["ts"] not in self.messages or body["channel"] != "C024":
                return web.json_response({"ok": False, "error": "message_not_found"})
            self.messages[body["ts"]].text = body["text"]
            return web.json_response({"ok": True, "channel": "C024", "ts": body["ts"]})
        assert request.path == "/api/chat.postMessage"
        assert body["channel"] == ("#ml-alerts" if "thread_ts" not in body else "C024")
        key = f"1700000000.00000{len(self.messages)}"
        self.add(key, body["text"], body.get("thread_ts"), body.get("reply_broadcast", True))
        return web.json_response({"ok": True, "channel": "C024", "ts": key})

    def _discord(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        assert body["allowed_mentions"] == {"parse": []}
        assert len(body["content"]) <= 2000
        path = request.path.removeprefix(f"/api/webhooks/{HOOK}")
        if request.method == "POST":
            assert (path, request.query.get("wait")) == ("", "true")
            key = str(9000 + len(self.messages))
            self.add(key, body["content"])
            return web.json_response({"id": key, "content": body["content"]})
        found = re.fullmatch(r"/messages/([0-9]+)", path)
        assert request.method == "PATCH"
        if found is None or found[1] not in self.messages:
            return web.json_response({"message": "Unknown Message", "code": 10008}, status=404)
        self.messages[found[1]].text = body["content"]
        return web.json_response({"id": found[1]})

    def _mattermost(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        assert request.headers["Authorization"] == f"Bearer {ROOM_TOKEN}"
        if request.method == "PUT":
            found = re.fullmatch(r"/api/v4/posts/([a-z0-9]{26})/patch", request.path)
            if found is None or found[1] not in self.messages:
                return web.json_response({"id": "api.post.patch.app_error"}, status=404)
            self.messages[found[1]].text = body["message"]
            return web.json_response({"id": found[1]})
        assert (request.method, body["channel_id"]) == ("POST", ROOM)
        key = f"{len(self.messages):026}"
        self.add(key, body["message"], body.get("root_id"))
        return web.json_response({"id": key}, status=201)

    def _tg(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        assert "parse_mode" not in body
        method = request.path.removeprefix(f"/bot{BOT}/")
        if method == "editMessageText":
            there = self.messages.get(str(body["message_id"]))
            if there is None or there.text == body["text"]:
                why = "message to edit not found" if there is None else "message is not modified"
                wrong = {
                    "ok": False,
                    "error_code": 400,
                    "description": f"Bad Request: {why}: SECRET",
                }
                return web.json_response(wrong, status=400)
            there.text = body["text"]
            return web.json_response({"ok": True, "result": {"message_id": body["message_id"]}})
        assert method == "sendMessage"
        key, to = 500 + len(self.messages), body.get("reply_parameters", {}).get("message_id")
        loud = not body.get("disable_notification", False)
        self.add(str(key), body["text"], None if to is None else str(to), loud)
        return web.json_response({"ok": True, "result": {"message_id": key}})


@asynccontextmanager
async def editable_chats() -> AsyncIterator[EditableChats]:
    """Listen on a free port of 127.0.0.1."""
    chats = EditableChats()
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", chats.answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    chats.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield chats
    finally:
        await runner.cleanup()
