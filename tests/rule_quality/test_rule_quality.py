"""All rules at their defaults on a sample of real trainings; the whole of it is `make matrix`."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.runs.faults import faults
from fixtures.runs.judgement import healthy, judge, sample
from fixtures.runs.program_names import MODULES
from fixtures.runs.recorded import Request, recorded
from tocsin.bus.port import Record
from tocsin.schemas.records.frames import StepFrame
from tocsin.schemas.records.wire import decode, read_meta
from tocsin.stream_rules.testing import issues_of

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "rule-quality.md"


SLOW = (
    Request("resnet"), Request("segmentation"), Request("moe"), Request("resnet", "new_head"),
    Request("cnn", "harder_later"),
)  # fmt: skip
"""To train the first two takes half a minute each, the others some seconds; other convolutional
networks and language models, and other odd ways to train, are left alone in CI."""


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(
            one, marks=pytest.mark.torture if one in SLOW else (), id="-".join(map(str, one))
        )
        for one in sample()
    ],
)
def test_what_the_rules_say_of_a_training_is_right(request_: Request) -> None:
    judged = judge(request_)
    said = [f"{issue.use}/{issue.branch}: {issue.reason}" for issue in judged.loud]
    if judged.fault is None:
        assert said == []
    else:
        assert judged.root_first, f"expected {judged.fault.root} first, was told {said}"


@pytest.mark.parametrize("every", [5, 20])
@pytest.mark.parametrize("program", ["mlp", "cnn", "gan", "regression"])
def test_a_healthy_training_is_healthy_where_most_steps_are_passed_over(
    program: str, every: int
) -> None:
    thinned = [_thinned(record, 60, every) for record in recorded(program)]
    said = [i for i in issues_of(thinned) if i.severity in ("warning", "critical")]
    assert said == []


def _thinned(record: Record, start: int, every: int) -> Record:
    """The record as it would be with each `every`-th step looked at from `start` on."""
    value = decode(read_meta(record.headers), record.value or b"")
    if not isinstance(value, StepFrame) or "step_time_s" not in value.columns:
        return record
    kept = (value.steps < start) | (value.steps % every == 0)
    kept[0] = True  # a frame has at least one row
    rows = replace(
        value, steps=value.steps[kept], at_us=value.at_us[kept], values=value.values[kept]
    )
    return replace(record, value=rows.encode())


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
