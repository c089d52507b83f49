"""The reading commands, as processes."""

from __future__ import annotations

import json
import re
import sys

from support.site import SCRIPTS, Site, on_both_buses


@on_both_buses
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


def test_status_says_what_was_found_and_done(embedded_site: Site) -> None:
    script = str(SCRIPTS / "same_nan.py")
    finished = embedded_site.run(sys.executable, script, run_id="seen", options=["--label", "a=b"])
    assert finished.exit_code == 79, finished
    done = embedded_site.tocsin("status", "seen", "--json", "--config", str(embedded_site.config))
    facts = json.loads(done.stdout)
    (run,) = facts["runs"]
    assert run["labels"] == {"a": "b"}
    assert (run["state"], run["outcome"], run["stop"]["state"]) == ("ended", "stopped", "exited")
    (issue,) = facts["issues"]
    assert issue["issue_id"] == finished.issues[0]["id"]
    assert {d["action"]: d["state"] for d in facts["deliveries"]} == {
        "stop": "delivered",
        "hook": "delivered",
    }
    text = embedded_site.tocsin("status", "--config", str(embedded_site.config)).stdout
    assert re.search(r"seen +stopped", text)
    assert "nonfinite" in text
