"""`/api/v1` as routes of Starlette, for the app of the page, behind its guard.

Who mounts them decides who may ask: they check nothing but the request itself.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any, Final

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route

from tocsin.bus.port import BusError
from tocsin.console.api.answers import Facts
from tocsin.console.api.openapi import openapi
from tocsin.console.api.operations import OPERATIONS, ROOT, Operation
from tocsin.console.api.problems import MEDIA_TYPE, ProblemError
from tocsin.console.api.source import DataSource
from tocsin.schemas.errors import ConfigurationError, MissingExtra, TocsinError, UnavailableError
from tocsin.schemas.monotonic_clock import unix_ms

logger = logging.getLogger(__name__)

_HEADERS: Final = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


def api_routes(data_source: DataSource, *, now_ms: Callable[[], int] = unix_ms) -> list[BaseRoute]:
    """The routes below `/api/v1`, each for GET alone.

    `data_source` is open for as long as the app runs.
    """
    # What is there is found first; of two paths that fit, the one without parameters.
    ordered = sorted(OPERATIONS, key=lambda operation: "{" in operation.path)
    routes: list[BaseRoute] = [
        Route(operation.path, _Endpoint(data_source, operation, now_ms), methods=["GET"])
        for operation in ordered
    ]
    description = _json(openapi())

    async def described(request: HttpRequest) -> Response:
        return Response(description, media_type="application/json", headers=_HEADERS)

    async def unknown(request: HttpRequest) -> Response:
        return _problem(
            ProblemError(
                "unknown", f"{request.url.path}: there is no such path; {ROOT}/openapi.json has all"
            )
        )

    async def read_only(request: HttpRequest) -> Response:
        return _problem(ProblemError("method", f"{request.method}: expected GET"))

    other = ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
    routes += [
        Route("/openapi.json", described, methods=["GET"]),
        Route("/{path:path}", read_only, methods=other),
        Route("/{path:path}", unknown, methods=["GET"]),
    ]
    return [Mount(ROOT, routes=routes)]


class _Endpoint:
    """Answers one operation. A class, so that Starlette passes scope, receive and send."""

    def __init__(
        self, source: DataSource, operation: Operation[Any], now_ms: Callable[[], int]
    ) -> None:
        self._source = source
        self._operation = operation
        self._now_ms = now_ms

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = HttpRequest(scope, receive)
        await (await self._answer(request))(scope, receive, send)

    async def _answer(self, request: HttpRequest) -> Response:
        try:
            return Response(
                _json(await self._facts(request)), media_type="application/json", headers=_HEADERS
            )
        except ProblemError as error:
            return _problem(error)
        except MissingExtra as error:
            return _problem(ProblemError("not_installed", str(error)))
        except (BusError, UnavailableError) as error:
            return _problem(ProblemError("bus_away", str(error)))
        except ConfigurationError as error:
            return _problem(ProblemError("wrong_request", str(error)))
        except TocsinError as error:
            # A file of the store is damaged: no fault of who asks, and others are readable.
            logger.warning("a request of the API failed: %s", error)
            return _problem(ProblemError("bus_away", str(error)))

    async def _facts(self, request: HttpRequest) -> Facts:
        given: dict[str, object] = {}
        for name, value in request.query_params.multi_items():
            if name in given:
                raise ProblemError("wrong_request", f"{name}: expected once")
            given[name] = value
        about = request.path_params.get(self._operation.about, "")
        asked = self._operation.request(self._source, given, self._now_ms(), about)
        return await self._operation.handler(asked)


def _problem(error: ProblemError) -> Response:
    problem = error.problem
    headers = {**_HEADERS, **({"Allow": "GET"} if error.kind == "method" else {})}
    return Response(
        _json(problem.model_dump()), problem.status, headers=headers, media_type=MEDIA_TYPE
    )


def _json(value: object) -> str:
    # A number that is not finite has become a word before: it is no JSON.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
