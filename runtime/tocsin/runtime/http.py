"""`/metrics`, `/healthz`, `/readyz`: off unless asked for; aiohttp is imported only then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from tocsin.runtime.metrics import Metrics, otlp_asked_for
from tocsin.schemas.errors import ConfigurationError, MissingExtra, require_extra

if TYPE_CHECKING:
    from aiohttp import web

Pages = Callable[["web.Application"], None]
"""Adds pages to an application."""

_OTEL: Final = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")

LONGEST_BODY: Final = 8_192
"""Bytes of a request's body."""

_IDLE_S: Final = 30.0
"""After that a connection is closed on which no whole request has come."""


def open_metrics() -> Metrics:
    """Metrics that count, if the extra for it is installed; else those that count nothing."""
    try:
        from tocsin.runtime.prometheus_metrics import PrometheusMetrics
    except ImportError:
        return Metrics()
    return PrometheusMetrics()


def service_metrics(
    service: str, *, software: str, served: bool, environ: Mapping[str, str]
) -> Metrics:
    """The metrics of a service: for `/metrics` if it is `served`, and by OTLP if the variables of
    OpenTelemetry ask for that; else those that count nothing.

    Raises:
        MissingExtra: for OTLP. ConfigurationError: by a protocol that is not spoken here.
    """
    metrics = open_metrics() if served else Metrics()
    if not otlp_asked_for(environ):
        return metrics
    require_extra("otel", "metrics by OTLP (OTEL_EXPORTER_OTLP_ENDPOINT)", *_OTEL)
    from tocsin.runtime.otlp_metrics import OtlpMetrics

    return OtlpMetrics(service, software=software, also=metrics)


class HttpEndpoints:
    """A part for `serve`: listens on one address.

    Args:
        ready: each says whether its part of the service is ready.
        pages: adds the pages of the service.
        idle_s: how long a connection may take for a request.

    Raises:
        MissingExtra: aiohttp is not installed.
    """

    def __init__(
        self,
        host: str,
        port: int,
        metrics: Metrics,
        ready: Sequence[Callable[[], bool]] = (),
        *,
        pages: Pages | None = None,
        idle_s: float = _IDLE_S,
    ) -> None:
        try:
            import aiohttp.web  # noqa: F401
        except ImportError as error:
            raise MissingExtra("kafka", "--http") from error
        self._host = host
        self._port = port
        self._metrics = metrics
        self._ready = ready
        self._pages = pages
        self._idle_s = idle_s
        self._stopping = asyncio.Event()
        self.listening = asyncio.Event()
        self.port = port

    async def run(self) -> None:
        """Serve until `stop`. Raises ConfigurationError: the address cannot be listened on."""
        from aiohttp import web

        async def metrics(request: web.Request) -> web.Response:
            try:
                text = self._metrics.text()
            except MissingExtra as error:
                return web.Response(text=f"{error}\n", status=501)
            return web.Response(
                text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
            )

        async def healthz(request: web.Request) -> web.Response:
            return web.Response(text="ok\n")

        async def readyz(request: web.Request) -> web.Response:
            is_ready = all(check() for check in self._ready)
            return web.Response(
                text="ready\n" if is_ready else "starting\n", status=200 if is_ready else 503
            )

        app = web.Application(client_max_size=LONGEST_BODY)
        app.add_routes(
            [web.get("/metrics", metrics), web.get("/healthz", healthz), web.get("/readyz", readyz)]
        )
        if self._pages is not None:
            self._pages(app)
        runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=1.0, keepalive_timeout=self._idle_s
        )
        await runner.setup()
        try:
            site = web.TCPSite(runner, self._host, self._port)
            try:
                await site.start()
            except OSError as error:
                raise ConfigurationError(
                    f"--http {self._host}:{self._port}: cannot listen there ({error.strerror})"
                ) from error
            address = runner.addresses[0]
            self.port = int(address[1])
            self.listening.set()
            await self._stopping.wait()
        finally:
            await runner.cleanup()

    def stop(self) -> None:
        """Ask `run` to return."""
        self._stopping.set()
