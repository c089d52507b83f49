"""From a path to a page or a deed, and back to HTTP."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, urlencode

from tocsin.bus.port import BusError
from tocsin.console.page.actions import FEEDBACK
from tocsin.console.page.assets import serve_asset
from tocsin.console.page.composition import MissingPage, Site, View
from tocsin.console.page.guard import CSRF_HEADER, csrf_fits
from tocsin.console.page.live_source import LiveSource
from tocsin.console.page.numbers import line_of
from tocsin.console.page.overview import FILTERS, Query
from tocsin.console.page.request_fields import (
    MAX_FIELDS,
    fields_of,
    own_path,
    real,
    target_of,
    whole,
)
from tocsin.console.page.sessions import LASTS_S, person_typed
from tocsin.console.page.templating import fragment, shell
from tocsin.console.page.tensors_page import Asked
from tocsin.console.page.zoom_page import points
from tocsin.console.refusal import RefusedError
from tocsin.console.views.status import target_policy
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.monotonic_clock import unix_ms

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute

logger = logging.getLogger(__name__)


_FAILED_LOGIN_S: Final = 1.0
_LONGEST_QUERY: Final = 300
_LONGEST_NAME: Final = 600


Act = Callable[[Mapping[str, str], str], Awaitable[str]]
"""Does what a form asks for, in the name of a person; returns what was done."""


class Routes:
    """The handlers of one site."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._source = LiveSource(
            site.caught_up,
            site.follower,
            site.numbers,
            site.stored,
            site.prices,
            target_policy(site.context),
        )
        # One wrong token at a time, and each takes a second.
        self._login_alone = asyncio.Lock()

    def all(self) -> list[BaseRoute]:
        """The table of paths."""
        from starlette.routing import Route

        from tocsin.console.api.routes import api_routes

        return [
            Route("/", self._page, methods=["GET"]),
            Route("/runs/{run_id}", self._page, methods=["GET"]),
            Route("/runs/{run_id}/tensors", self._page, methods=["GET"]),
            Route("/runs/{run_id}/system", self._page, methods=["GET"]),
            Route("/runs/{run_id}/zoom", self._page, methods=["GET"]),
            Route("/issues/{issue_id}", self._page, methods=["GET"]),
            Route("/compare", self._page, methods=["GET"]),
            Route("/runs/{run_id}/report.html", self._report, methods=["GET"]),
            Route("/events", self._events, methods=["GET"]),
            Route("/runs/{run_id}/points", self._points, methods=["GET"]),
            Route("/issues/{issue_id}/{verb}", self._answer, methods=["POST"]),
            Route("/stops/{delivery_id}/{verdict}", self._reply, methods=["POST"]),
            Route("/runs/{run_id}/stop", self._stop, methods=["POST"]),
            Route("/login", self._login, methods=["GET", "POST"]),
            Route("/static/{name}", serve_asset, methods=["GET"]),
            Route("/healthz", self._health, methods=["GET"]),
            *api_routes(self._source),
        ]

    # -- reading ---------------------------------------------------------------------------

    def _view(self, target: str) -> View:
        """The page of a path and query. Raises MissingPage."""
        path, _, query = target.partition("?")
        asked = dict(parse_qsl(query[:2_000], max_num_fields=MAX_FIELDS))
        match [part for part in path.split("/") if part]:
            case []:
                only = asked.get("only", "all")
                return self._site.overview(
                    Query(
                        asked.get("q", "")[:_LONGEST_QUERY],
                        next((name for name in FILTERS if name == only), "all"),
                        whole(asked.get("page", "1"), 1),
                    )
                )
            case ["runs", run_id]:
                return self._site.run_page(run_id)
            case ["runs", run_id, "zoom"]:
                name = asked.get("name", "loss")[:_LONGEST_QUERY]
                search = asked.get("search", "")[:_LONGEST_QUERY]
                rank = whole(asked["rank"], 0) if "rank" in asked else None
                return self._site.zoom(run_id, name, rank, search)
            case ["runs", run_id, "tensors"]:
                found = Asked(
                    **{
                        name: asked.get(name, "")[:_LONGEST_QUERY]
                        for name in ("collection", "statistic", "search")
                    },
                    rank=whole(asked.get("rank", "0"), 0),
                    tensor=asked.get("tensor", "")[:_LONGEST_NAME],
                    page=whole(asked.get("page", "1"), 1),
                )
                return self._site.tensors(run_id, found)
            case ["runs", run_id, "system"]:
                return self._site.system(run_id, asked.get("node", "")[:_LONGEST_QUERY])
            case ["compare"]:
                first, second = (asked.get(name, "")[:_LONGEST_QUERY] for name in ("a", "b"))
                return self._site.compare(first, second)
            case ["issues", issue_id]:
                return self._site.issue_page(issue_id)
        raise MissingPage("There is no such page.")

    async def _page(self, request: Request) -> Response:
        from starlette.responses import HTMLResponse

        await self._site.caught_up()
        try:
            view = self._view(target_of(request))
            if view.live:
                now, version = await self._site.hub.page(view.key, view.render)
            else:
                now, version = await view.render(), ""
        except MissingPage as missing:
            return self._message("Not here", str(missing), 404)
        query = view.query
        return HTMLResponse(
            shell(
                now.frame,
                title=view.title,
                kind=view.kind,
                crumbs=view.crumbs,
                scripts=view.scripts,
                bus=self._site.follower.situation(unix_ms()).bus_url,
                csrf=self._site.access.csrf,
                search=None if query is None else query.text,
                only="all" if query is None else query.only,
                events=f"/events?{urlencode({'of': view.key})}" if view.live else "",
                version=version,
                now_ms=unix_ms(),
            )
        )

    async def _events(self, request: Request) -> Response:
        from starlette.responses import PlainTextResponse, StreamingResponse

        await self._site.caught_up()
        try:
            view = self._view(request.query_params.get("of", ""))
        except MissingPage as missing:
            return PlainTextResponse(f"{missing}\n", 404)
        version = request.query_params.get("version", "")
        return StreamingResponse(
            self._site.hub.events(view.key, view.render, version),
            media_type="text/event-stream",
            headers={"X-Accel-Buffering": "no"},
        )

    async def _points(self, request: Request) -> Response:
        from starlette.responses import JSONResponse, PlainTextResponse

        run_id, asked = request.path_params["run_id"], request.query_params
        try:
            self._site.check_run(run_id)
        except MissingPage as missing:
            return PlainTextResponse(f"{missing}\n", 404)
        seen = self._site.follower.state.view.seen[run_id]
        issues = [
            issue
            for issue in self._site.follower.state.view.issues
            if issue.run_id == run_id and issue.incarnation == seen.incarnation
        ]
        low = real(asked.get("low"), -math.inf)
        high = real(asked.get("high"), math.inf)
        name, rank = asked.get("name", ""), whole(asked.get("rank", "0"), 0)
        groups = whole(asked.get("groups", "1000"), 1_000)

        def find() -> Mapping[str, object]:
            line = self._site.numbers.read(run_id, lambda run: line_of(run, name, name, rank=rank))
            return points(line, issues, low=low, high=high, groups=groups)

        return JSONResponse(await asyncio.to_thread(find))

    async def _report(self, request: Request) -> Response:
        """The report of a run as one file, to be kept."""
        from starlette.responses import Response

        run_id = request.path_params["run_id"]
        try:
            self._site.check_run(run_id)
            text = await self._site.report(run_id)
        except MissingPage as missing:
            return self._message("Not here", str(missing), 404)
        name = "".join(c if c.isalnum() or c in "._-" else "_" for c in run_id)
        disposition = f'attachment; filename="tocsin-report-{name}.html"'
        return Response(text, media_type="text/html", headers={"Content-Disposition": disposition})

    async def _health(self, request: Request) -> Response:
        from starlette.responses import PlainTextResponse

        return PlainTextResponse("ok\n")

    # -- writing ---------------------------------------------------------------------------

    async def _answer(self, request: Request) -> Response:
        verb, issue_id = request.path_params["verb"], request.path_params["issue_id"]

        async def act(fields: Mapping[str, str], person: str) -> str:
            issue = self._site.issue(issue_id)
            if verb == "silence":
                return await self._site.actions.silence(issue, fields, person, unix_ms())
            if verb not in FEEDBACK:
                raise RefusedError(404, "There is no such button.")
            return await self._site.actions.answer(issue, verb, fields, person, unix_ms())

        return await self._act(request, act, f"/issues/{issue_id}")

    async def _reply(self, request: Request) -> Response:
        verdict, delivery_id = request.path_params["verdict"], request.path_params["delivery_id"]

        async def act(fields: Mapping[str, str], person: str) -> str:
            if verdict not in ("approve", "reject"):
                raise RefusedError(404, "There is no such button.")
            view = self._site.follower.state.view
            return await self._site.actions.reply(view, delivery_id, verdict, person, unix_ms())

        return await self._act(request, act, "/")

    async def _stop(self, request: Request) -> Response:
        run_id = request.path_params["run_id"]

        async def act(fields: Mapping[str, str], person: str) -> str:
            self._site.check_run(run_id)
            return await self._site.actions.stop(run_id, fields, person)

        return await self._act(request, act, f"/runs/{run_id}")

    async def _act(self, request: Request, act: Act, back: str) -> Response:
        """Check who writes, do it, and say what was done: as JSON to the script, else as a page."""
        from starlette.responses import JSONResponse

        person = request.state.person
        try:
            fields = await fields_of(request)
            given = request.headers.get(CSRF_HEADER, fields.get("csrf", ""))
            if not csrf_fits(given, self._site.access):
                raise RefusedError(
                    403, "This page is from before a restart. Load it again; nothing was done."
                )
            message, status = await act(fields, person), 200
            logger.info("answered on the page", extra={"action": "page", "by": person})
        except MissingPage as missing:
            message, status = str(missing), 404
        except RefusedError as refusal:
            message, status = refusal.text, refusal.status
        except BusError as error:
            message, status = f"The bus does not answer, so nothing is sure: {error}", 503
        except ConfigurationError as error:
            message, status = f"Nothing was done: {error}", 409
        if "application/json" in request.headers.get("accept", ""):
            return JSONResponse({"said": message}, status)
        title = {200: "Done", 503: "Not sure"}.get(status, "Not done")
        return self._message(title, message, status, back)

    # -- sessions --------------------------------------------------------------------------

    async def ask_to_log_in(self, request: Request) -> Response:
        """What who has no session gets, in place of anything else."""
        from starlette.responses import HTMLResponse, PlainTextResponse

        if request.method != "GET" or "text/html" not in request.headers.get("accept", "text/html"):
            return PlainTextResponse("Log in first, or send the token as a bearer token.\n", 401)
        # From a link in a mail the browser sends no strict cookie: once more, from here.
        again = request.headers.get("sec-fetch-site") == "cross-site"
        return HTMLResponse(
            self._login_page(target_of(request), again=again), 200 if again else 401
        )

    async def _login(self, request: Request) -> Response:
        from starlette.responses import HTMLResponse, RedirectResponse

        token = self._site.access.token
        if token is None:
            return RedirectResponse("/", 303)
        if request.method == "GET":
            return HTMLResponse(self._login_page("/"))
        fields: Mapping[str, str] = {}
        try:
            fields = await fields_of(request)
            if not csrf_fits(fields.get("csrf", ""), self._site.access):
                raise RefusedError(403, "The page has restarted meanwhile. Try again.")
            person = person_typed(fields.get("person", ""))
            async with self._login_alone:
                if not token.fits(fields.get("token", "")):
                    await asyncio.sleep(_FAILED_LOGIN_S)
                    raise RefusedError(403, "That is not the token of this page.")
        except RefusedError as refusal:
            message, status = refusal.text, refusal.status
        except ValueError as error:
            message, status = f"Your name: {error}", 400
        else:
            answer = RedirectResponse(own_path(fields.get("next", "/")), 303)
            answer.set_cookie(
                token.cookie_name,
                token.cookie_of(person, unix_ms() / 1000),
                max_age=LASTS_S,
                httponly=True,
                samesite="strict",
                secure=request.headers.get("x-forwarded-proto") == "https",
            )
            return answer
        target, typed = fields.get("next", "/"), fields.get("person", "")
        return HTMLResponse(self._login_page(target, message=message, person=typed), status)

    def _login_page(
        self, target: str, *, again: bool = False, message: str = "", person: str = ""
    ) -> str:
        return fragment(
            "login",
            next=own_path(target),
            again=again,
            message=message,
            person=person,
            csrf=self._site.access.csrf,
        )

    def _message(self, title: str, text: str, status: int, back: str = "/") -> Response:
        from starlette.responses import HTMLResponse

        frame = fragment("message", title=title, text=text, back=back, back_text="Back")
        return HTMLResponse(
            shell(
                frame,
                title=title,
                kind="message",
                crumbs=(),
                scripts=(),
                bus=self._site.follower.situation(unix_ms()).bus_url,
                csrf=self._site.access.csrf,
                search=None,
                only="all",
                events="",
                version="",
                now_ms=unix_ms(),
            ),
            status,
        )
