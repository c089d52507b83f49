"""Writes Grafana's dashboard of the workers: python tools/docs/fleet_dashboard.py FILE."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final


def _events(counter: str, *, by: str) -> str:
    """Events within an hour. A counter begins with its first event, at 1, which `increase` does not
    see: a series that was not there an hour ago counts as it is.
    """
    new = f"{counter} unless {counter} offset 1h"
    return f"sum by ({by}) (({new}) or increase({counter}[1h]))"


PANELS: Final[tuple[tuple[str, str, str, str], ...]] = (
    ("Partitions owned", "sum by (service) (tocsin_partitions)", "{{service}}", "short"),
    (
        "Records not applied yet",
        "sum by (service) (tocsin_bus_lag_records)",
        "{{service}}",
        "short",
    ),
    (
        "Age of records when read, p90",
        "histogram_quantile(0.9, sum by (le, service) (rate(tocsin_bus_lag_seconds_bucket[5m])))",
        "{{service}}",
        "s",
    ),
    ("Records a second", "sum by (service) (rate(tocsin_records_total[5m]))", "{{service}}", "cps"),
    ("Rows a second", "sum by (kind) (rate(tocsin_rows_total[5m]))", "{{kind}}", "cps"),
    (
        "Time of a round, p99",
        "histogram_quantile(0.99, sum by (le, instance) (rate(tocsin_round_seconds_bucket[5m])))",
        "{{instance}}",
        "s",
    ),
    (
        "Costliest rules, share of a core",
        "topk(8, sum by (rule) (rate(tocsin_rule_seconds_total[5m])))",
        "{{rule}}",
        "percentunit",
    ),
    (
        "Largest run, share of the rules' time",
        "max by (instance) (tocsin_largest_run_share)",
        "{{instance}}",
        "percentunit",
    ),
    (
        "Postponed runs, how far behind",
        "max by (instance) (tocsin_postponed_lag_seconds)",
        "{{instance}}",
        "s",
    ),
    (
        "Checkpoints, share of the time",
        "sum by (instance) (rate(tocsin_checkpoint_seconds_total[5m]))",
        "{{instance}}",
        "percentunit",
    ),
    (
        "Restores, seconds",
        "sum by (service) (increase(tocsin_restore_seconds_total[5m]))",
        "{{service}}",
        "s",
    ),
    (
        "Quarantined rules",
        _events("tocsin_quarantines_total", by="rule"),
        "{{rule}}",
        "short",
    ),
    (
        "Dead letters",
        _events("tocsin_dead_letters_total", by="service"),
        "{{service}}",
        "short",
    ),
    ("Deliveries not final", "sum(tocsin_deliveries_pending)", "pending", "short"),
    (
        "Deliveries by final state",
        _events("tocsin_deliveries_total", by="kind, state"),
        "{{kind}} {{state}}",
        "short",
    ),
    (
        "Issue to delivery, p90",
        "histogram_quantile(0.9, sum by (le, kind) (rate(tocsin_delivery_seconds_bucket[15m])))",
        "{{kind}}",
        "s",
    ),
    (
        "Receivers left alone",
        "max by (receiver) (tocsin_receiver_suspended)",
        "{{receiver}}",
        "short",
    ),
    (
        "Kafka away",
        "sum by (service) (increase(tocsin_bus_unavailable_total[5m]))",
        "{{service}}",
        "short",
    ),
)
"""Title, query, legend, unit."""

_WIDTH: Final = 8
_HEIGHT: Final = 7


def dashboard() -> str:
    """The dashboard as Grafana's JSON. Pure."""
    source = {"type": "prometheus", "uid": "prometheus"}
    panels = [
        {
            "id": number + 1,
            "type": "timeseries",
            "title": title,
            "datasource": source,
            "gridPos": {
                "x": _WIDTH * (number % 3),
                "y": _HEIGHT * (number // 3),
                "w": _WIDTH,
                "h": _HEIGHT,
            },
            "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
            "options": {
                "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True}
            },
            "targets": [
                {"refId": "A", "datasource": source, "expr": query, "legendFormat": legend}
            ],
        }
        for number, (title, query, legend, unit) in enumerate(PANELS)
    ]
    facts = {
        "uid": "tocsin-workers",
        "title": "tocsin: workers",
        "tags": ["tocsin"],
        "schemaVersion": 39,
        "version": 1,
        "editable": False,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "panels": panels,
    }
    return json.dumps(facts, indent=2) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(dashboard(), encoding="utf-8")
