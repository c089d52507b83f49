"""Metrics by OTLP: what a collector gets, and when nobody asked for one."""

from __future__ import annotations

import gzip
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)

from tocsin.runtime import metrics as names
from tocsin.runtime.http import service_metrics
from tocsin.runtime.metrics import METRICS, Metrics
from tocsin.runtime.otlp_metrics import OtlpMetrics
from tocsin.runtime.prometheus_metrics import PrometheusMetrics
from tocsin.schemas.errors import ConfigurationError


class Collector(ThreadingHTTPServer):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.got: list[ExportMetricsServiceRequest] = []


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        assert isinstance(self.server, Collector)
        assert self.path == "/v1/metrics"
        self.server.got.append(ExportMetricsServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_collector_gets_counters_gauges_and_histograms(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = f"http://127.0.0.1:{collector.server_port}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", where)
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=vision")
    found = service_metrics(
        "vision-rules", software="tocsin 1", served=True, environ=dict(os.environ)
    )
    found.add(names.RECORDS, 3, service="rules")
    found.add(names.RULE_SECONDS, 0.25, rule="nonfinite")
    found.set(names.LAG, 7, service="rules")
    found.observe(names.ROUND, 0.003, service="rules")
    found.close()

    (request,) = collector.got
    (of_resource,) = request.resource_metrics
    facts = {one.key: one.value.string_value for one in of_resource.resource.attributes}
    assert (facts["service.name"], facts["team"]) == ("vision-rules", "vision")
    sent = {one.name: one for scope in of_resource.scope_metrics for one in scope.metrics}
    assert sent["tocsin_records"].sum.data_points[0].as_double == 3 or (
        sent["tocsin_records"].sum.data_points[0].as_int == 3
    )
    (point,) = sent["tocsin_rule_seconds"].sum.data_points
    assert (point.as_double, point.attributes[0].value.string_value) == (0.25, "nonfinite")
    assert sent["tocsin_bus_lag_records"].gauge.data_points[0].as_int == 7
    (histogram,) = sent["tocsin_round_seconds"].histogram.data_points
    assert tuple(histogram.explicit_bounds) == METRICS[names.ROUND].buckets
    assert "tocsin_records_total" in found.text(), "Prometheus gets the same"


def test_nobody_asked_for_it() -> None:
    there = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}

    def kind(environ: dict[str, str], *, served: bool = False) -> type[Metrics]:
        return type(service_metrics("s", software="x", served=served, environ=environ))

    assert kind({}) is Metrics
    assert kind({}, served=True) is PrometheusMetrics
    assert kind(there | {"OTEL_SDK_DISABLED": "true"}) is Metrics
    assert kind(there | {"OTEL_METRICS_EXPORTER": "none"}) is Metrics
    with pytest.raises(ConfigurationError, match="expected http/protobuf"):
        kind(there | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})


def test_a_collector_that_is_away_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    found = OtlpMetrics("s", software="x", also=Metrics())
    found.add(names.RECORDS, service="rules")
    found.close()
