"""The reading commands and the demo, as processes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.site import SCRIPTS, Site, on_both_buses, on_embedded


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


def test_status_of_a_bus_that_is_not_there_says_what_to_do(embedded_site: Site) -> None:
    done = embedded_site.tocsin("status", "--bus", "embedded:nowhere.db")
    assert done.returncode == 2
    assert "nowhere.db" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run"], "no command"),
        (["run", "--bus", "nonsense", "--", "true"], "embedded:PATH or kafka://"),
        (["run", "--label", "novalue", "--", "true"], "--label"),
        (["run", "--run-id", "../x", "--", "true"], "run id"),
        (["run", "--config", "missing.yaml", "--", "true"], "missing.yaml"),
        (["rules", "--http", "nonsense"], "HOST:PORT"),
        (["actions", "--allow-cidr", "10.0.0.0/40"], "10.0.0.0/40"),
    ],
)
def test_mistakes_are_sentences_and_exit_2(
    embedded_site: Site, arguments: list[str], said: str
) -> None:
    done = embedded_site.tocsin(*arguments)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@on_embedded
@pytest.mark.parametrize("scenario", ["nan"])
def test_the_demo_ends_as_announced(site: Site, scenario: str) -> None:
    _demo(site, scenario)


@pytest.mark.torture
@on_both_buses
@pytest.mark.parametrize("scenario", ["healthy", "diverge", None])
def test_each_scenario_of_the_demo_ends_as_announced(site: Site, scenario: str | None) -> None:
    _demo(site, scenario)


def _demo(site: Site, scenario: str | None) -> None:
    command = [sys.executable, "-m", "tocsin.console", "demo", *([scenario] if scenario else [])]
    command += ["--bus", site.bus_url] if site.kind == "kafka" else []
    done = subprocess.run(
        command, cwd=site.folder, capture_output=True, text=True, timeout=115, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT as announced" not in done.stdout
    if scenario in ("nan", None):
        assert "signature verified" in done.stdout
        moments = [
            "step 40 begins", "issue: nonfinite", "stop decided", "training loop left", "job gone",
        ]  # fmt: skip
        assert "mail arrives" in done.stdout
        (page,) = set(re.findall(r"/\S+/mail-1-demo-nan-\w+\.html", done.stdout))
        assert "data:image/png;base64," in Path(page).read_text()
        places = [done.stdout.index(moment) for moment in moments]
        assert places == sorted(places), done.stdout
