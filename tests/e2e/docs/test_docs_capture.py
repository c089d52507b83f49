"""The examples of the pages on capture: one run under the launcher, and a loop."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from support.processes.site import Site
from support.records.telemetry import frames, said
from tocsin.schemas.records.runs import RunStarted

HOW_TO = Path(__file__).parents[3] / "docs" / "how-to"


def blocks(language: str, page: str = "capture.md") -> list[str]:
    """The fenced blocks of that language."""
    text = (HOW_TO / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_collections_budget_and_cost_are_as_the_examples_say(embedded_site: Site) -> None:
    cost, train = blocks("python")
    folder = embedded_site.folder
    (folder / "capture.yaml").write_text(blocks("yaml")[0])
    (folder / "train.py").write_text(train)
    (folder / "cost.py").write_text(cost)
    environ = {**embedded_site.environ, "TOCSIN_BUS": embedded_site.bus_url}
    site = replace(embedded_site, config=folder / "capture.yaml", environ=environ)

    done = site.run(sys.executable, "train.py", run_id="r1", timeout_s=110)

    assert done.exit_code == 0, done
    assert done.summary["steps"] == 60, done
    assert done.summary["capture"]["degraded"] == [], done
    (started,) = [event for event in said(folder, RunStarted) if event.role == "trainer"]
    assert set(started.collections) == {
        *("losses", "gradients", "weights", "activations", "inputs", "tables", "heads")
    }
    sent = {(frame.collection, frame.step): frame for frame in frames(folder)}
    # In code: each step, and the columns of the file no more.
    assert {step for name, step in sent if name == "gradients"} == set(range(60))
    assert "mean" in sent["gradients", 0].columns
    assert sent["tables", 0].rows == ("0.weight",)
    assert set(sent["tables", 0].columns) == {"l2", "absmax"}
    assert not any(name in ("weights", "optimizer_state") for name, _ in sent)

    (folder / "summary.json").write_text(json.dumps(done.summary))
    printed = python(site, "cost.py").stdout.splitlines()
    assert re.fullmatch(r"[0-9.]+ % of the step time, budget 4.0 %", printed[0])
    assert "gradients: every 1 steps" in printed


def test_a_loop_without_pytorch_is_watched(embedded_site: Site) -> None:
    (embedded_site.folder / "loop.py").write_text(*blocks("python", "frameworks.md"))
    environ = {
        **embedded_site.environ,
        "TOCSIN_BUS": embedded_site.bus_url,
        "TOCSIN_RUN_ID": "r1",
        # As one that is launched: it starts no helper of its own.
        "TOCSIN_LAUNCHER": str(embedded_site.folder / "launcher"),
    }
    site = replace(embedded_site, environ=environ)

    python(site, "loop.py")

    sent = frames(site.folder)
    steps = [frame.step for frame in sent if frame.collection == "gradients"]
    assert steps == list(range(40))


def python(site: Site, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script to its good end."""
    done = subprocess.run(
        [sys.executable, script],
        cwd=site.folder,
        env={**os.environ, **site.environ},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return done
