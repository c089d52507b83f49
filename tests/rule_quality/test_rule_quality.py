"""All rules at their defaults on a sample of real trainings; the whole of it is `make matrix`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fixtures.runs.faults import faults
from fixtures.runs.judgement import healthy, judge, sample
from fixtures.runs.program_names import MODULES
from fixtures.runs.recorded import Request

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "rule-quality.md"


@pytest.mark.parametrize("request_", sample(), ids=lambda request: "-".join(map(str, request)))
def test_what_the_rules_say_of_a_training_is_right(request_: Request) -> None:
    judged = judge(request_)
    said = [f"{issue.use}/{issue.branch}: {issue.reason}" for issue in judged.loud]
    if judged.fault is None:
        assert said == []
    else:
        assert judged.root_first, f"expected {judged.fault.root} first, was told {said}"


def test_a_training_is_recorded_once_and_is_the_same_each_time() -> None:
    first, again = judge(Request("mlp")), judge(Request("mlp"))
    assert first == again
    assert first.steps == 300


def test_the_page_has_a_row_for_each_training_and_no_critical_issue_of_a_healthy_one() -> None:
    text = PAGE.read_text()
    (critical,) = re.findall(r"^\| critical issues in healthy trainings \| (\d+) \|$", text, re.M)
    assert critical == "0"
    for program in MODULES:
        assert re.search(rf"^\| {program} \| \d+ \| [\d,]+ \| 0 \| \d+ \| \d+ \| .*\|$", text, re.M)
    for fault in faults().values():
        names = [f"{p}: {fault.meaning}" for p in fault.programs]
        names = names if not fault.root else [f"{fault.meaning} | {p}" for p in fault.programs]
        missing = [name for name in names if f"| {name} |" not in text]
        assert not missing, "write the page anew: make matrix"
    assert len(healthy(1)) > len(MODULES)
