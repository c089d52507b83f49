"""Requests to an API server and its answers: recorded from a real one, and played back."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl

from aiohttp import web

from tocsin.actions.targets.kubernetes.api import Answer, KubernetesApi
from tocsin.schemas.records.runs import SchedulerJob

FOLDER: Final = Path(__file__).resolve().parents[2] / "fixtures" / "kubernetes"


@dataclass(frozen=True)
class Exchange:
    """One request, and what was answered."""

    method: str
    path: str
    query: Mapping[str, str]
    body: Any
    status: int
    answer: Any


@dataclass
class Recording:
    """What a run recorded of itself, and what its target asked of the API server."""

    scheduler: SchedulerJob
    exchanges: list[Exchange] = field(default_factory=list)

    def save(self, name: str) -> None:
        """Write it to the fixtures."""
        text = json.dumps(
            {
                "scheduler": self.scheduler.model_dump(mode="json"),
                "exchanges": [vars(one) for one in self.exchanges],
            },
            indent=1,
            sort_keys=True,
        )
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / f"{name}.json").write_text(text + "\n")

    @classmethod
    def read(cls, name: str) -> Recording:
        """From the fixtures."""
        raw = json.loads((FOLDER / f"{name}.json").read_text())
        return cls(
            SchedulerJob.model_validate(raw["scheduler"]),
            [Exchange(**one) for one in raw["exchanges"]],
        )


class RecordingApi(KubernetesApi):
    """Notes each exchange with a real API server."""

    recording: Recording

    async def _request(self, *arguments: Any, **named: Any) -> Answer:
        answer = await super()._request(*arguments, **named)
        asked = dict(zip(("method", "path", "query", "body"), arguments, strict=False))
        asked |= {name: value for name, value in named.items() if name in ("query", "body")}
        self.recording.exchanges.append(
            Exchange(
                method=asked["method"],
                path=asked["path"],
                query=dict(asked.get("query") or {}),
                body=asked.get("body"),
                status=answer.status,
                answer=_without_notes(answer.body),
            )
        )
        return answer


_LEFT_OUT: Final = ("managedFields", "command")
"""Who changed which field, which is long, and what a process is here."""


def _without_notes(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_notes(one) for key, one in value.items() if key not in _LEFT_OUT}
    return [_without_notes(each) for each in value] if isinstance(value, list) else value


@dataclass
class Player:
    """An API server on loopback that expects these requests, in this order."""

    exchanges: list[Exchange]
    url: str = ""
    unexpected: list[str] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    extra: dict[str, str] = field(default_factory=dict)
    """Headers of its answers."""

    async def answer(self, request: web.Request) -> web.Response:
        """The next recorded answer, if this is the next recorded request."""
        self.headers.append(dict(request.headers))
        text = await request.text()
        asked = (
            request.method,
            request.path,
            dict(parse_qsl(request.query_string)),
            json.loads(text) if text else None,
        )
        if not self.exchanges:
            self.unexpected.append(f"{asked}: nothing more was expected")
            return web.Response(status=500)
        one = self.exchanges.pop(0)
        expected = (one.method, one.path, dict(one.query), one.body)
        if asked != expected:
            self.unexpected.append(f"{asked} instead of {expected}")
            return web.Response(status=500)
        if isinstance(one.answer, str):
            return web.Response(status=one.status, text=one.answer, headers=self.extra)
        return web.json_response(one.answer, status=one.status, headers=self.extra)


@asynccontextmanager
async def played(context: ssl.SSLContext, *exchanges: Exchange) -> AsyncIterator[Player]:
    """Listen on a free port of 127.0.0.1; all that was expected must have been asked."""
    player = Player(list(exchanges))
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", player.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        port = runner.addresses[0][1]
        player.url = f"https://127.0.0.1:{port}"
        yield player
        assert player.unexpected == []
        assert player.exchanges == []
    finally:
        await runner.cleanup()
