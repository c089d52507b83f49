"""`tocsin report` and `tocsin compare` on real runs: stopped, failed, archived; and as a PDF."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.processes.archive import archive_all
from support.processes.site import SCRIPTS, Finished, Site, embedded_site_in
from support.servers.receiver import Receiver
from tocsin.bus.urls import open_bus
from tocsin.console.report.document import ReportDocument
from tocsin.store import open_store

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
TWELVE = {
    "system_usage", "framework_metrics", "rules_summary", "step_durations", "gpu_utilization",
    "batch_size", "cpu_bottlenecks", "io_bottlenecks", "load_balancing", "memory", "outliers",
    "data_loader",
}  # fmt: skip


@dataclass(frozen=True)
class Reported:
    """A run that was stopped and one that failed, each with its report."""

    site: Site
    stopped: Finished
    failed: Finished

    @property
    def html(self) -> Path:
        return self.site.folder / "stopped.html"

    def sections(self, *arguments: str) -> dict[str, dict[str, object]]:
        """The sections of a report in JSON, by key."""
        done = self.site.tocsin("report", *arguments, "--format", "json")
        assert done.returncode == 0, done.stderr
        document = ReportDocument.model_validate_json(done.stdout)
        return {one.key: one.model_dump() for one in document.sections}


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> Reported:
    """Both at once, in one folder."""
    site = embedded_site_in(tmp_path_factory.mktemp("reported"), receiver)
    site.environ["TOCSIN_CONFIG"] = str(site.config)
    script = str(SCRIPTS / "logged_loop.py")
    stopped = site.start(
        sys.executable, script, "--nan-at", "60",
        run_id="stopped-1", options=("--report", "stopped.html"),
    )  # fmt: skip
    failed = site.start(
        sys.executable, script, "--steps", "20", "--exit", "3",
        run_id="failed-1", options=("--report", "failed.json"),
    )  # fmt: skip
    return Reported(site, stopped.finish(), failed.finish())


def test_a_run_that_was_stopped_leaves_its_report(reported: Reported) -> None:
    issue = reported.stopped.stopped_by("nonfinite")
    assert "the report is in stopped.html" in reported.stopped.stderr
    html = reported.html.read_text()
    assert "Run stopped-1 was stopped after" in html
    assert issue["reason"].split(",")[0] in html
    assert f"issue-{issue['id'][:8]}" in html
    assert html.count("<svg") >= 8


def test_a_job_that_failed_keeps_its_exit_code_and_has_a_report(reported: Reported) -> None:
    assert reported.failed.exit_code == 3
    document = json.loads((reported.site.folder / "failed.json").read_text())
    assert "failed with exit code 3 after 20 steps" in document["verdict"]


def test_all_sections_of_the_reference_are_there(reported: Reported) -> None:
    sections = reported.sections("stopped-1")
    assert set(sections) >= TWELVE | {"training", "issues", "stop", "goodput", "tensors"}
    captured = {key for key, one in sections.items() if one["status"] != "not_captured"}
    assert captured >= {
        "system_usage", "rules_summary", "memory", "training", "issues", "stop", "goodput",
    }  # fmt: skip
    assert sections["issues"]["status"] == "critical"


def test_the_beginning_of_an_id_is_enough(reported: Reported) -> None:
    done = reported.site.tocsin("report", "stop", "--format", "md")
    assert done.stdout.startswith("# Run stopped-1: critical")


def test_a_run_that_is_not_there_is_a_sentence(reported: Reported) -> None:
    done = reported.site.tocsin("report", "nothing-like-it")
    assert done.returncode == 2
    assert "no run 'nothing-like-it'" in done.stderr


def test_a_report_that_cannot_be_written_is_known_before_the_job(reported: Reported) -> None:
    finished = reported.site.run("true", options=("--report", "no-such-folder/report.html"))
    assert finished.exit_code == 2
    assert "--report no-such-folder/report.html: no folder" in finished.stderr


def test_an_archived_run_has_the_same_report(reported: Reported, tmp_path: Path) -> None:
    """Of files alone, without the bus."""

    async def archive() -> None:
        async with open_bus(reported.site.bus_url) as bus:
            await archive_all(bus, open_store(tmp_path / "store"), group="test-report")

    asyncio.run(archive())
    elsewhere = ("--bus", f"embedded:{tmp_path}/none.db", "--store", str(tmp_path / "store"))
    archived, live = reported.sections("stopped-1", *elsewhere), reported.sections("stopped-1")
    assert archived["system_usage"] == live["system_usage"]
    assert archived["training"] == live["training"]
    # Deliveries of one millisecond may come in another order.
    stories = [sorted(re.findall(r"[\w.:/%-]+", str(one["issues"]))) for one in (archived, live)]
    assert stories[0] == stories[1]
    assert set(archived) == set(live)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_the_report_prints(reported: Reported, tmp_path: Path) -> None:
    """Some pages with text on them: nothing is cut into a single endless one, none is empty."""
    assert CHROMIUM is not None
    pdf = tmp_path / "report.pdf"
    subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-pdf-header-footer",
         f"--user-data-dir={tmp_path}/profile", f"--print-to-pdf={pdf}", f"file://{reported.html}"],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    content = pdf.read_bytes()
    counts = [int(count) for count in re.findall(rb"/Type /Pages\s[^>]*?/Count (\d+)", content)]
    assert 5 <= max(counts) <= 40
    assert len(re.findall(rb"/Type /Page\b(?!s)", content)) == max(counts)


def test_a_run_is_not_compared_with_itself(reported: Reported) -> None:
    done = reported.site.tocsin("compare", "stopped-1", "stopped", "--json")
    assert done.returncode == 2
    assert "both are run stopped-1: expected two different runs" in done.stderr


def test_a_condition_that_holds_is_exit_code_1(reported: Reported) -> None:
    done = reported.site.tocsin("compare", "stopped-1", "failed-1", "--fail-if", "steps < -20%")
    assert done.returncode == 1, done.stderr
    assert "FAILS  steps < -20%" in done.stdout
    assert done.stdout.startswith("The runs differ first in their configuration: command:")


def test_a_condition_that_cannot_be_judged_is_exit_code_2(reported: Reported) -> None:
    done = reported.site.tocsin("compare", "stopped-1", "failed-1", "--fail-if", "loss > +5%")
    assert done.returncode == 2
    assert "cannot be decided: too few steps" in done.stderr
    assert done.stdout.startswith("The runs differ first in their configuration: command:")
    assert "undecided  loss > +5%: too few steps" in done.stdout
    both = reported.site.tocsin(
        "compare", "stopped-1", "failed-1", "--fail-if", "loss > +5%", "--fail-if", "steps < -20%"
    )  # fmt: skip
    assert both.returncode == 1, both.stderr
    assert "FAILS  steps < -20%" in both.stdout
    bad = reported.site.tocsin("compare", "stopped-1", "failed-1", "--fail-if", "loss >> +5%")
    assert bad.returncode == 2
    assert "     ^ expected > or <" in bad.stderr
