import json
import math
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from support.records.stops import StopSigner
from support.waiting import HANGS_S
from tocsin.emitter.launch.messages import end_line, overhead
from tocsin.emitter.launch.summary import StopFigures, Summary, decide_end
from tocsin.schemas.compute_estimates import Compute
from tocsin.schemas.records.checkpoints import Checkpoint
from tocsin.schemas.records.goodput import Goodput
from tocsin.schemas.records.issues import Evidence, Fact, IssueFiring, Subject
from tocsin.schemas.records.runs import CaptureFigures

NONE: frozenset[signal.Signals] = frozenset()


@pytest.mark.parametrize(
    ("returncode", "stopped", "passed_on", "expected"),
    [
        (0, False, NONE, ("completed", 0)),
        (3, False, NONE, ("failed", 3)),
        (-9, False, NONE, ("failed", 137)),
        (-15, False, NONE, ("interrupted", 143)),
        (-2, False, NONE, ("interrupted", 130)),
        (130, False, NONE, ("interrupted", 130)),
        (1, False, {signal.SIGTERM}, ("interrupted", 1)),
        (1, False, {signal.SIGUSR1}, ("failed", 1)),
        (0, False, {signal.SIGTERM}, ("completed", 0)),
        (1, True, NONE, ("stopped", 79)),
        (0, True, NONE, ("stopped", 79)),
        (-9, True, NONE, ("stopped", 79)),
    ],
)
def test_outcome_and_exit_code(
    returncode: int,
    stopped: bool,
    passed_on: frozenset[signal.Signals],
    expected: tuple[str, int],
) -> None:
    assert decide_end(returncode, stopped=stopped, passed_on=passed_on) == expected


def issue() -> IssueFiring:
    return IssueFiring(
        run_id="r1",
        incarnation="i1",
        issue_id="x",
        rule="nonfinite",
        use="nonfinite",
        rule_version=1,
        severity="critical",
        subject=Subject(kind="tensor", name="layer.weight", collection="gradients"),
        reason="NaN in layer.weight",
        first_step=12,
        first_rank=1,
        evidence=Evidence(facts=(Fact(name="nans", value=math.nan),)),
    )


def test_it_is_written_into_a_pipe_and_through_a_link(tmp_path: Path) -> None:
    summary = Summary(
        run_id="r1", outcome="completed", exit_code=0, steps=1, judged_steps=1, duration_s=1.0,
        rules={},
    )  # fmt: skip
    pipe, link, target = tmp_path / "pipe", tmp_path / "link", tmp_path / "there" / "summary.json"
    os.mkfifo(pipe)
    target.parent.mkdir()
    link.symlink_to(target)
    with ThreadPoolExecutor(1) as pool:
        arrived = pool.submit(pipe.read_text)
        summary.write(pipe)
        assert json.loads(arrived.result(HANGS_S))["run_id"] == "r1"
    summary.write(link)
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert json.loads(target.read_text())["run_id"] == "r1"


def test_the_summary_is_as_contracted(tmp_path: Path) -> None:
    command = StopSigner().command("r1", "i1", last_good_checkpoint=Checkpoint(path="a.pt", step=3))
    summary = Summary(
        run_id="r1",
        outcome="stopped",
        exit_code=79,
        steps=14,
        judged_steps=14,
        duration_s=1.23456,
        issues=[issue()],
        rules={"nonfinite": "issues_found"},
        stop=StopFigures(command=command, how="edge", step=13, exit_code=79),
        capture=CaptureFigures(overhead_percent=0.3, records=10, dropped=0),
        goodput=Goodput(wall_s=20.0, productive_s=15.0, starting_s=5.0),
        saved=Compute(devices={}, ranks=2, hours=1.5, how="90 steps left at 60 s each"),
    )
    path = tmp_path / "summary.json"
    path.write_text("old")
    summary.write(path)
    found = json.loads(path.read_text())
    assert list(found) == [
        "version", "run_id", "outcome", "exit_code", "steps", "judged_steps", "duration_s",
        "issues", "rules", "deliveries", "stop", "capture", "goodput", "saved",
    ]  # fmt: skip
    assert found["version"] == 1
    assert list(found["issues"][0]) == [
        "id", "rule", "branch", "consequence_of", "severity", "state", "first_step", "first_rank",
        "subject", "reason",
        "evidence",
    ]  # fmt: skip
    assert found["issues"][0]["evidence"]["facts"][0]["value"] == "NaN"
    assert found["stop"]["how"] == "edge"
    assert found["stop"]["last_good_checkpoint"]["path"] == "a.pt"
    assert found["capture"] == {
        "overhead_percent": 0.3, "spent_s": 0.0, "stepping_s": 0.0, "step_s": None,
        "budget_percent": None, "intervals": {}, "records": 10,
        "dropped": 0, "skipped_tensors": 0, "degraded": [], "not_watched": [],
    }  # fmt: skip
    assert (found["goodput"]["wall_s"], found["goodput"]["productive_s"]) == (20.0, 15.0)
    assert found["saved"] == {
        "estimate": 3.0, "unit": "rank-hours", "hours": 1.5, "devices": {}, "ranks": 2,
        "cost": None, "currency": None, "method": "90 steps left at 60 s each",
    }  # fmt: skip
    assert list(tmp_path.iterdir()) == [path]
    again = replace(summary, goodput=Goodput(wall_s=20.0, productive_s=15.0, incarnations=2))
    line = end_line(again)
    assert "75 % productive over 2 incarnations, saved an estimated 3 rank-hours (2 ranks" in line


def test_a_summary_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    summary = Summary(
        run_id="r1",
        outcome="completed",
        exit_code=0,
        steps=0,
        judged_steps=0,
        duration_s=0.0,
        rules={},
    )
    with pytest.raises(OSError, match="absent"):
        summary.write(tmp_path / "absent" / "summary.json")


@pytest.mark.parametrize(
    ("stepping_s", "step_s", "intervals", "says"),
    [
        (12.0, 0.1, {"gradients": 10}, "overhead 0.4 s"),
        (600.0, 0.1, {"gradients": 10}, "overhead 0.3 %"),
        (600.0, 0.1, {"gradients": 500}, "overhead 0.3 %"),
        (600.0, 0.002, {"gradients": 10}, "overhead 0.3 %"),
        (600.0, 0.002, {"gradients": 500},
         "overhead 0.3 % (steps of 2 ms: gradients summarised every 500 steps)"),
        (12.0, 0.0004, {"gradients": 2000, "steps": 20},
         "overhead 0.4 s (steps of 0.4 ms: capture thinned to 1 step in 20, "
         "gradients summarised every 2,000 steps)"),
        (600.0, 0.02, {"gradients": 500, "steps": 5},
         "overhead 0.3 % (steps of 20 ms: capture thinned to 1 step in 5)"),
    ],
)  # fmt: skip
def test_what_watching_has_cost_in_words(
    stepping_s: float, step_s: float, intervals: dict[str, int], says: str
) -> None:
    figures = CaptureFigures(
        overhead_percent=0.3, spent_s=0.42, stepping_s=stepping_s, step_s=step_s,
        intervals=intervals, records=10, dropped=0,
    )  # fmt: skip
    assert overhead(figures) == says
