"""The reading commands, as processes."""

from __future__ import annotations

import json

import pytest

from support.processes.site import Site


@pytest.mark.parametrize(
    "site",
    ["embedded", pytest.param("bare_kafka", id="kafka", marks=pytest.mark.kafka)],
    indirect=True,
)
def test_bus_init_and_show_tell_the_topics(site: Site) -> None:
    init = site.tocsin("bus", "init", "--json", "--config", str(site.config))
    assert init.returncode == 0, init.stderr
    show = site.tocsin("bus", "show", "--json", "--config", str(site.config))
    topics = {topic["name"]: topic for topic in json.loads(show.stdout)["topics"]}
    assert set(topics) == {
        f"{site.prefix}.{name}.v1"
        for name in ("telemetry", "state", "runs", "issues", "actions", "control", "dlq")
    }
    assert all(topic["exists"] and not topic["differs"] for topic in topics.values())
    assert topics[f"{site.prefix}.telemetry.v1"]["partitions"] == 48


def test_a_command_that_cannot_be_executed_is_a_run_that_has_failed(embedded_site: Site) -> None:
    """Its start is on the bus; without its end in the view it would be taken for one that runs."""
    site = embedded_site
    assert site.run("/etc/passwd", run_id="no-program").exit_code == 126
    status = site.tocsin("status", "--json", "--config", str(site.config))
    (run,) = json.loads(status.stdout)["runs"]
    assert (run["state"], run["outcome"], run["exit_code"]) == ("ended", "failed", 126)
