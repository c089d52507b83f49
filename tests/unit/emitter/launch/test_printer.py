"""Which news of a run get a line on its terminal, and which `--quiet` lets through."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest

from support.records import launch_news
from support.records.launch_news import delivery, view
from tocsin.bus.urls import open_bus
from tocsin.emitter.launch.options import LaunchOptions
from tocsin.emitter.launch.printer import Printer
from tocsin.schemas.records.issues import IssueFiring, IssueOngoing
from tocsin.schemas.records.runs import CaptureFigures


def printer(printed: list[str], **more: Any) -> Printer:
    url = "embedded:/nowhere/bus.db"
    options = LaunchOptions(
        command=("true",), run_id="r1", job_id="1", bus_url=url, open_bus=lambda: open_bus(url),
        print_line=printed.append, **more,
    )  # fmt: skip
    return Printer(options, now_s=100.0)


def on_stderr() -> Printer:
    url = "embedded:/nowhere/bus.db"
    options = LaunchOptions(
        command=("true",), run_id="r1", job_id="1", bus_url=url, open_bus=lambda: open_bus(url)
    )
    return Printer(options, now_s=0.0)


def issue(kind: type[IssueFiring] = IssueFiring, **changes: object) -> IssueFiring:
    fields = {"world_size": 1, "first_step": 7, "first_rank": 0, "reason": "it has NaN"}
    return launch_news.issue(kind, **{**fields, **changes})


@pytest.mark.parametrize("quiet", [False, True])
def test_quiet_holds_back_what_is_well_and_nothing_else(quiet: bool) -> None:
    printed: list[str] = []
    to = printer(printed, quiet=quiet)
    to.news(issue(severity="info"), None, now_s=101)
    to.news(delivery("delivered"), None, now_s=101)
    well = len(printed)
    to.news(issue(), None, now_s=101)
    to.news(delivery("rejected", reason="410 gone"), None, now_s=101)
    assert well == (0 if quiet else 2)
    assert printed[well:] == [
        "critical: nonfinite at step 7, layer.weight: it has NaN",
        "  nonfinite -> chat: rejected (410 gone)",
    ]


def test_an_issue_that_goes_on_has_a_line_only_when_it_turns_critical() -> None:
    printed: list[str] = []
    to = printer(printed)
    to.news(issue(IssueOngoing), None, now_s=101)
    assert printed == []
    to.news(issue(IssueOngoing, raised_from="warning"), None, now_s=101)
    assert len(printed) == 1


def test_a_cause_is_named() -> None:
    printed: list[str] = []
    first = issue(issue_id="y", rule="loss_diverged", first_step=5)
    printer(printed).news(issue(consequence_of="y"), first, now_s=101)
    assert printed[0].endswith("(a consequence of loss_diverged at step 5)")


def test_that_nobody_judges_is_said_once_and_its_end_once() -> None:
    printed: list[str] = []
    to = printer(printed, judged_within_s=60.0, quiet=True)
    for now_s in (110, 161, 170, 300):
        to.judging("kafka://k:9092", None, now_s=now_s)
    assert len(printed) == 1
    assert "kafka://k:9092" in printed[0]
    to.news(view(), None, now_s=301)
    for now_s in (302, 310):
        to.judging("kafka://k:9092", None, now_s=now_s)
    assert printed[1:] == ["this run's rules are reporting again"]
    assert not to.unjudged


def test_a_probe_that_is_switched_off_is_named_once() -> None:
    printed: list[str] = []
    to = printer(printed, quiet=True)
    figures = CaptureFigures(
        overhead_percent=0.1,
        records=1,
        dropped=0,
        degraded=("gradients: OSError: planted",),
        not_watched=("gradients",),
    )
    for now_s in (101, 102):
        to.news(view(capture=figures), None, now_s=now_s)
    assert len(printed) == 1
    assert printed[0].startswith("capture of gradients was switched off")


@pytest.mark.parametrize("terminal", [True, False])
def test_a_progress_bar_on_a_terminal_makes_way_for_a_line(
    monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    written = StringIO()
    monkeypatch.setattr(written, "isatty", lambda: terminal)
    monkeypatch.setattr("sys.stderr", written)
    on_stderr().line("the loss has jumped")
    assert written.getvalue() == ("\r\x1b[K" if terminal else "") + "tocsin: the loss has jumped\n"


def test_a_terminal_that_is_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            raise BrokenPipeError

        def flush(self) -> None:
            raise BrokenPipeError

    monkeypatch.setattr("sys.stderr", Gone())
    on_stderr().line("nobody reads this")
