"""The metrics of `tocsin.runtime.metrics`, kept and written out by prometheus_client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from tocsin.runtime.metrics import METRICS, Metric, Metrics


class PrometheusMetrics(Metrics):
    """The figures of one service, in a registry of its own.

    Each method raises KeyError or AttributeError for a name that is not in `METRICS` or is of
    another kind, and ValueError for other labels than its own: all of them bugs.
    """

    def __init__(self) -> None:
        # A second series beside each counter, of when it was made: nothing here asks for it.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._parts: Mapping[str, Counter | Gauge | Histogram] = {
            name: _part(name, metric, self._registry) for name, metric in METRICS.items()
        }

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Count on."""
        self._metric(name, labels).inc(amount)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        self._metric(name, labels).set(value)

    def observe(self, name: str, seconds: float, **labels: str) -> None:
        """Put one time into a histogram."""
        self._metric(name, labels).observe(seconds)

    def value(self, name: str, **labels: str) -> float:
        """One sample, as it is named in `text`; 0 if it was never counted."""
        return self._registry.get_sample_value(name, labels) or 0.0

    def text(self) -> str:
        """All of them in the text format of Prometheus."""
        return generate_latest(self._registry).decode()

    def _metric(self, name: str, labels: Mapping[str, str]) -> Any:
        part = self._parts[name]
        return part.labels(**labels) if labels or METRICS[name].labels else part


def _part(name: str, metric: Metric, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    if metric.kind == "histogram":
        return Histogram(
            name, metric.help, metric.labels, registry=registry, buckets=metric.buckets
        )
    kind = Counter if metric.kind == "counter" else Gauge
    return kind(name, metric.help, metric.labels, registry=registry)
