"""The metrics of `tocsin.runtime.metrics`, sent by OTLP as OpenTelemetry's own variables say.

OTLP over HTTP (`http/protobuf`), to `OTEL_EXPORTER_OTLP_ENDPOINT`. A counter has the same name
without `_total`, which collectors put back on the way to Prometheus.
"""

from __future__ import annotations

import os
from typing import Final

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.metrics import Counter, Histogram, Instrument
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

from tocsin.runtime.metrics import METRICS, Metrics

_END_MS: Final = 3_000.0


class OtlpMetrics(Metrics):
    """Counts and sends in a thread of OpenTelemetry's; never raises for a collector that is away.

    Args:
        service: the name of the service, unless `OTEL_SERVICE_NAME` gives one.
        software: its version.
        also: counts the same, and gives the text for Prometheus.
    """

    def __init__(self, service: str, *, software: str, also: Metrics) -> None:
        self._also: Final = also
        facts = {"service.version": software}
        named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get(
            "OTEL_RESOURCE_ATTRIBUTES", ""
        )
        if not named:
            facts["service.name"] = service
        self._provider: Final = MeterProvider(
            metric_readers=[PeriodicExportingMetricReader(OTLPMetricExporter())],
            resource=Resource.create(facts),
            shutdown_on_exit=False,
        )
        meter = self._provider.get_meter("tocsin", software)
        self._instruments: Final[dict[str, Instrument]] = {}
        for name, metric in METRICS.items():
            if metric.kind == "counter":
                made: Instrument = meter.create_counter(
                    name.removesuffix("_total"), description=metric.help
                )
            elif metric.kind == "gauge":
                made = meter.create_gauge(name, description=metric.help)
            else:
                made = meter.create_histogram(
                    name,
                    description=metric.help,
                    explicit_bucket_boundaries_advisory=metric.buckets,
                )
            self._instruments[name] = made

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        self._also.add(name, amount, **labels)
        counter = self._instruments[name]
        assert isinstance(counter, Counter)
        counter.add(amount, labels)

    def set(self, name: str, value: float, **labels: str) -> None:
        self._also.set(name, value, **labels)
        gauge = self._instruments[name]
        gauge.set(value, labels)  # type: ignore[attr-defined]

    def observe(self, name: str, seconds: float, **labels: str) -> None:
        self._also.observe(name, seconds, **labels)
        histogram = self._instruments[name]
        assert isinstance(histogram, Histogram)
        histogram.record(seconds, labels)

    def text(self) -> str:
        return self._also.text()

    def close(self) -> None:
        """Send what is left. Blocks, 3 s at most and some more for a connection."""
        self._provider.shutdown(timeout_millis=_END_MS)
