"""Serves the pages of links: GET shows, POST acts.

Mail scanners and chats fetch each link that they see, so a GET changes nothing. A token is all that
a request needs and has: there is no cookie, so another site cannot make a browser answer in
somebody's name (CSRF). What was answered is read from the bus, so a link counts once over restarts
and whichever worker serves it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qs

from tocsin.bus.port import Bus, BusError
from tocsin.console.feedback.send import feedback_record
from tocsin.console.links.case import read_case
from tocsin.console.links.decision import decision_of
from tocsin.console.links.page import POLICY, TEXTS, Button, page_of
from tocsin.console.publication import publish, publish_signed
from tocsin.console.refusal import RefusedError
from tocsin.runtime import metrics as names
from tocsin.runtime.clock import Clock, SystemClock
from tocsin.runtime.metrics import Metrics
from tocsin.schemas.configuration.public_url import fits_host
from tocsin.schemas.errors import SignatureError
from tocsin.schemas.key_folder import keys_folder, own_key
from tocsin.schemas.links import LONGEST_TOKEN, PATH, Link, LinkExpired, read_link
from tocsin.schemas.records.events import clip
from tocsin.schemas.records.feedback import Feedback
from tocsin.schemas.records.silences import SilenceSet
from tocsin.schemas.records.stops.control import StopAnswered
from tocsin.schemas.signing import TrustedKeys
from tocsin.schemas.topics import ISSUE_PARTITIONS, Topics, issue_partition

if TYPE_CHECKING:
    from aiohttp import web

logger = logging.getLogger(__name__)

_READ_S: Final = 10.0
"""How long the body of a request may take."""

_BUS_S: Final = 30.0
_FORM: Final = "application/x-www-form-urlencoded"
_HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "X-Robots-Tag": "noindex",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class LinkPages:
    """The pages of one worker. What it needs of the bus it reads for each request.

    Args:
        bus: open.
        public_url: where people reach the pages now; None: nowhere.
        trusted: the keys of those who may have made links; may block.
        environ: where the key is that signs what people answer.
    """

    def __init__(
        self,
        bus: Bus,
        topics: Topics,
        *,
        public_url: Callable[[], str | None],
        trusted: Callable[[], TrustedKeys],
        environ: Mapping[str, str],
        metrics: Metrics | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._bus = bus
        self._topics = topics
        self._public_url = public_url
        self._trusted = trusted
        self._environ = environ
        self._metrics = metrics or Metrics()
        self._clock = clock or SystemClock()
        # One at a time: whoever has a link could otherwise keep the worker reading. And two uses
        # of one link, here, come after each other.
        self._alone = asyncio.Lock()

    def add_to(self, app: web.Application) -> None:
        """Add the pages to an application."""
        from aiohttp import web

        path = PATH + "{token}"
        app.add_routes([web.get(path, self._serve), web.post(path, self._serve)])

        async def on_prepare(request: web.Request, response: web.StreamResponse) -> None:
            if request.path.startswith(PATH):
                response.headers.update(_HEADERS)

        app.on_response_prepare.append(on_prepare)

    async def _serve(self, request: web.Request) -> web.Response:
        try:
            link = await self._opened(request)
            if request.method == "POST":
                return await self._act(await self._pressed(request), link)
            return await self._show(link)
        except RefusedError as refusal:
            return self._response(refusal.status, "refused", page_of(None, message=refusal.text))
        except (BusError, TimeoutError) as error:
            reason = clip(str(error), 300) or "out of time"
            logger.warning("link not served", extra={"action": "link", "reason": reason})
            message = "The bus does not answer now. Try again later."
            return self._response(503, "refused", page_of(None, message=message))

    async def _show(self, link: Link) -> web.Response:
        async with self._alone, asyncio.timeout(_BUS_S):
            case = await read_case(self._bus, self._topics, link)
        if case.issue is None:
            raise RefusedError(404, "The issue of this link is not on the bus.")
        key = await asyncio.to_thread(lambda: own_key(keys_folder(self._environ)))
        buttons = [Button(one.verb, one.token(key)) for one in case.buttons(link)]
        return self._response(200, "shown", page_of(case, buttons, person=link.person))

    async def _act(self, link: Link, opened: Link) -> web.Response:
        if link.verb == "open" or link.opened != opened:
            raise RefusedError(403, "The button does not belong to this page.")
        async with self._alone, asyncio.timeout(_BUS_S):
            case = await read_case(self._bus, self._topics, link)
            why_not = case.why_not(link)
            if case.issue is None or why_not is not None:
                raise RefusedError(409, why_not or "")
            await self._publish(link, decision_of(link, case.issue, self._clock.now_ms()))
        logger.info("answered by link: %s", link.verb, extra={"action": "link", "by": link.person})
        return self._response(200, "answered", page_of(None, message=f"Done: {TEXTS[link.verb]}."))

    def _response(self, status: int, result: str, text: str) -> web.Response:
        from aiohttp import web

        self._metrics.add(names.LINKS, result=result)
        return web.Response(status=status, text=text, content_type="text/html")

    async def _opened(self, request: web.Request) -> Link:
        public_url, hosts = self._public_url(), request.headers.getall("Host", [])
        if public_url is None:
            raise RefusedError(404, "This worker serves no links.")
        if len(hosts) != 1 or not fits_host(public_url, hosts[0]):
            raise RefusedError(421, "This page is not served under that name.")
        link = await self._read(request.match_info["token"])
        if link.verb != "open":
            raise RefusedError(404, "This link is not valid.")
        return link

    async def _pressed(self, request: web.Request) -> Link:
        if request.content_type != _FORM:
            raise RefusedError(415, "Expected the form of the page.")
        async with asyncio.timeout(_READ_S):
            body = await request.read()
        try:
            fields = parse_qs(body.decode("ascii"), max_num_fields=2, strict_parsing=True)
        except ValueError:
            fields = {}
        tokens = fields.get("token", [])
        if len(tokens) != 1:
            raise RefusedError(400, "Expected the form of the page.")
        return await self._read(tokens[0])

    async def _read(self, token: str) -> Link:
        try:
            trusted = await asyncio.to_thread(self._trusted)
            return read_link(token[: LONGEST_TOKEN + 1], trusted, self._clock.now_ms())
        except LinkExpired:
            raise RefusedError(
                410, "This link has expired; `tocsin issues` lists the issues."
            ) from None
        except SignatureError:
            raise RefusedError(404, "This link is not valid.") from None

    async def _publish(self, link: Link, data: Feedback | StopAnswered | SilenceSet) -> None:
        if isinstance(data, Feedback):
            await publish(self._bus, [feedback_record(self._topics, data)])
            return
        partitions = range(ISSUE_PARTITIONS)
        await publish_signed(
            self._bus,
            self._topics,
            data,
            data.key,
            self._environ,
            now_ms=self._clock.now_ms(),
            partitions=(
                partitions if isinstance(data, SilenceSet) else [issue_partition(link.run_id)]
            ),
            event_id=link.use_id,
        )
