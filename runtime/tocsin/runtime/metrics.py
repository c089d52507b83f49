"""What a service counts and times, by names that are written down here alone.

`Metrics` itself counts nothing: most workers serve no `/metrics`, and a node may lack the library.
`PrometheusMetrics` in `tocsin.runtime.prometheus_metrics` counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from tocsin.schemas.errors import ConfigurationError, MissingExtra

RECORDS: Final = "tocsin_records_total"
DEAD_LETTERS: Final = "tocsin_dead_letters_total"
OUTPUTS: Final = "tocsin_outputs_total"
OVERSIZE: Final = "tocsin_oversize_outputs_total"
CHECKPOINTS: Final = "tocsin_checkpoints_total"
CHECKPOINT_SECONDS: Final = "tocsin_checkpoint_seconds_total"
APPLY_SECONDS: Final = "tocsin_apply_seconds_total"
RESTORES: Final = "tocsin_restores_total"
RESTORE_SECONDS: Final = "tocsin_restore_seconds_total"
RESTORE_RECORDS: Final = "tocsin_restore_records_total"
STANDBY_BYTES: Final = "tocsin_standby_bytes"
STANDBY_LEFT_OUT: Final = "tocsin_standby_left_out_partitions"
FENCED: Final = "tocsin_fenced_total"
BUS_AWAY: Final = "tocsin_bus_unavailable_total"
PARTITIONS: Final = "tocsin_partitions"
DELIVERIES: Final = "tocsin_deliveries_total"
ATTEMPTS: Final = "tocsin_delivery_attempts_total"
BACKENDS: Final = "tocsin_backend_stop_attempts_total"
PENDING: Final = "tocsin_deliveries_pending"
SUSPENDED: Final = "tocsin_receiver_suspended"
LINKS: Final = "tocsin_answer_links_total"
HEARTBEATS: Final = "tocsin_heartbeats_total"
ROUND: Final = "tocsin_round_seconds"
BUS_LAG: Final = "tocsin_bus_lag_seconds"
DELIVERY: Final = "tocsin_delivery_seconds"
LAG: Final = "tocsin_bus_lag_records"
RULE_SECONDS: Final = "tocsin_rule_seconds_total"
ROWS: Final = "tocsin_rows_total"
QUARANTINES: Final = "tocsin_quarantines_total"
SHED: Final = "tocsin_shed_summaries_total"
LARGEST_SHARE: Final = "tocsin_largest_run_share"
POSTPONED_RUNS: Final = "tocsin_postponed_runs"
POSTPONED_SECONDS: Final = "tocsin_postponed_lag_seconds"
RANKS: Final = "tocsin_ranks"
RUN_SECONDS: Final = "tocsin_run_seconds"
SAVED_HOURS: Final = "tocsin_saved_device_hours_total"
ARCHIVED_ROWS: Final = "tocsin_archived_rows_total"
ARCHIVED_BYTES: Final = "tocsin_archived_bytes_total"
STORE_AWAY: Final = "tocsin_store_unavailable_total"
STORE_WAITING: Final = "tocsin_store_waiting_bytes"
RELOAD_SUCCESSFUL: Final = "tocsin_config_last_reload_successful"
RELOAD_TIMESTAMP: Final = "tocsin_config_last_reload_success_timestamp_seconds"


@dataclass(frozen=True, slots=True)
class Metric:
    """What one metric is.

    Attributes:
        buckets: the upper bounds of a histogram, in seconds.
    """

    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ("service",)
    buckets: tuple[float, ...] = ()


def _counter(text: str, *labels: str) -> Metric:
    return Metric("counter", text, labels or ("service",))


# A round of rules takes milliseconds, and everything waits behind one that takes seconds.
_ROUND_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
# A worker that reads along is a fraction of a second behind, one that was away for hours hours.
_LAG_BUCKETS: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600)
# From a webhook that answers at once to a receiver that is retried for a day.
_DELIVERY_BUCKETS: Final = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600, 14400, 86400)

METRICS: Final[Mapping[str, Metric]] = {
    RECORDS: _counter("Records applied"),
    DEAD_LETTERS: _counter("Records that could not be used"),
    OUTPUTS: _counter("Records published before a commit: issues, ledger entries"),
    OVERSIZE: _counter("Own records over the bus's limit, left out"),
    CHECKPOINTS: _counter("Checkpoints completed"),
    CHECKPOINT_SECONDS: _counter("Time spent in checkpoints"),
    APPLY_SECONDS: _counter("Time spent in applying records and firing timers"),
    RESTORES: _counter("Partitions restored"),
    RESTORE_SECONDS: _counter("Time spent in restoring partitions"),
    RESTORE_RECORDS: _counter(
        "Records read to restore partitions, those that a standby had read before left out"
    ),
    STANDBY_BYTES: Metric(
        "gauge", "Bytes of states of other workers that are kept for a take-over"
    ),
    STANDBY_LEFT_OUT: Metric(
        "gauge", "State partitions of other workers for which the limit of a standby has no room"
    ),
    FENCED: _counter("Times this member was found to have left its group"),
    BUS_AWAY: _counter("Times the bus did not answer"),
    PARTITIONS: Metric("gauge", "Input partitions owned now"),
    DELIVERIES: _counter(
        "Deliveries that reached a final state, by kind and state", "kind", "state"
    ),
    ATTEMPTS: _counter("Attempts to deliver, by kind", "kind"),
    BACKENDS: _counter(
        "Attempts to end a job through its backend, by target and what it shows of the job",
        "target",
        "shows",
    ),
    PENDING: Metric("gauge", "Deliveries that are not final", ()),
    SUSPENDED: Metric(
        "gauge",
        "1 while deliveries to a receiver are paused, because it fails or is gone; else 0",
        ("receiver",),
    ),
    LINKS: _counter("Requests for pages of links, by result: shown, answered or refused", "result"),
    HEARTBEATS: _counter(
        "Heartbeats, by result: sent, failed, or withheld because a worker makes no progress",
        "service",
        "result",
    ),
    LAG: Metric("gauge", "Records on the owned partitions that are not applied yet"),
    RULE_SECONDS: _counter("Time spent in rules of ours, by rule", "rule"),
    ROWS: _counter("Rows of telemetry read, by kind: tensors, steps, samples, events", "kind"),
    QUARANTINES: _counter("Rules that failed and were switched off for a run, by rule", "rule"),
    SHED: _counter(
        "Summaries of tensors that were not judged, because the worker could not keep up, by tier: "
        "2 first, then 1",
        "tier",
    ),
    LARGEST_SHARE: Metric(
        "gauge",
        "Share of the rules' time that the run with the largest had in the last window of 10 s, of "
        "the runs that are not postponed: 0 to 1",
        (),
    ),
    POSTPONED_RUNS: Metric(
        "gauge",
        "Runs that are read later than the others, because they send more than the worker can read",
        (),
    ),
    POSTPONED_SECONDS: Metric(
        "gauge", "How far the last of the postponed runs is behind, in seconds; else 0", ()
    ),
    RANKS: Metric(
        "gauge",
        "Ranks of the runs that this worker follows and that are running, by state: heard, late "
        "(so far behind that rules over all ranks leave them out), missing (never heard)",
        ("state",),
    ),
    RUN_SECONDS: Metric(
        "gauge",
        "Time of the runs that this worker follows, over all their incarnations, by part",
        ("part",),
    ),
    SAVED_HOURS: _counter(
        "Estimate of what stops have saved, where it is known: hours times devices, by unit: "
        "GPU-hours, or rank-hours on the CPU",
        "unit",
    ),
    ARCHIVED_ROWS: _counter("Rows written into files of the store"),
    ARCHIVED_BYTES: _counter("Bytes of the files written into the store, before they are merged"),
    STORE_AWAY: _counter("Times the store could not be written"),
    STORE_WAITING: Metric("gauge", "Bytes of records in memory that are not in the store yet"),
    RELOAD_SUCCESSFUL: Metric(
        "gauge", "1 if the configuration as it is now is in effect, 0 if it was refused"
    ),
    RELOAD_TIMESTAMP: Metric(
        "gauge", "When a changed configuration was last applied, or the worker started; Unix time"
    ),
    ROUND: Metric(
        "histogram",
        "Time that one round of applying records and firing timers took",
        buckets=_ROUND_BUCKETS,
    ),
    BUS_LAG: Metric(
        "histogram",
        "Age of the oldest record of a poll when it was read, since it was appended to the bus",
        buckets=_LAG_BUCKETS,
    ),
    DELIVERY: Metric(
        "histogram",
        "Time from an issue's append to the bus until its delivery was done, by kind",
        ("kind",),
        _DELIVERY_BUCKETS,
    ),
}
"""All metrics and what they mean; `docs/reference/metrics.md` lists the same."""


def otlp_asked_for(environ: Mapping[str, str]) -> bool:
    """Whether the variables of OpenTelemetry ask for metrics by OTLP. Pure.

    Raises:
        ConfigurationError: by a protocol that is not spoken here.
    """
    endpoint = environ.get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT") or environ.get(
        "OTEL_EXPORTER_OTLP_ENDPOINT"
    )
    if not endpoint or environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if environ.get("OTEL_METRICS_EXPORTER", "otlp") != "otlp":
        return False
    name = "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL"
    protocol = environ.get(name) or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "http/protobuf"
    if protocol != "http/protobuf":
        raise ConfigurationError(f"{name} {protocol}: expected http/protobuf (port 4318)")
    return True


class Metrics:
    """Counts nothing. Names and labels are those of `METRICS`; safe to be used from any thread."""

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Count on."""

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""

    def observe(self, name: str, seconds: float, **labels: str) -> None:
        """Put one time into a histogram."""

    def close(self) -> None:
        """Send what is left, where it is sent. May block for some seconds."""

    def text(self) -> str:
        """All of them in the text format of Prometheus. Raises MissingExtra."""
        raise MissingExtra("kafka", "/metrics")
