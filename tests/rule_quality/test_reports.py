"""The report and the comparison of real trainings: one healthy, one with a fault, both recorded."""

from __future__ import annotations

import asyncio
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fixtures.runs.recorded import recorded
from support.records.on_bus import send
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import Outgoing, Partition
from tocsin.console.compare.comparison import compare
from tocsin.console.report.document import to_json
from tocsin.console.report.html import to_html
from tocsin.console.report.report import report_of
from tocsin.schemas.ids import new_id
from tocsin.schemas.records.issues import issue_event
from tocsin.schemas.records.wire import meta_of
from tocsin.schemas.topics import Topics, issue_partition
from tocsin.store import Run, open_run
from tocsin.stream_rules.catalogue import built_in
from tocsin.stream_rules.engine.configured_rules import RuleSpec
from tocsin.stream_rules.testing import issues_of

TOPICS = Topics()
PROGRAM, FAULT = "cnn", "nan_in_a_gradient"
ONSET = 60
"""As the fault declares it; to read it there imports torch."""


def read(folder: Path, fault: str | None) -> Run:
    """The recorded training, with what the rules say of it, from a bus of its own."""
    records = recorded(PROGRAM, fault)
    run_id = records[0].key.decode()
    place = Partition(TOPICS.issues, issue_partition(run_id))
    # The rules at their defaults are judged elsewhere.
    rule = built_in().get("nonfinite")
    specs = [RuleSpec(name="nonfinite", rule=rule, params=rule.meta.params())]
    issues = issues_of(records, specs=specs)
    events = [issue_event(one, event_id=new_id(), time_ms=0) for one in issues]

    async def fill() -> None:
        async with EmbeddedBus(folder / "bus.db") as bus:
            await bus.init(TOPICS.specs())
            await send(bus, records)
            producer = await bus.producer()
            await producer.publish(
                [Outgoing(place, run_id.encode(), e.encode(), meta_of(e).headers()) for e in events]
            )
            await producer.close()

    asyncio.run(fill())
    return open_run(run_id, bus=folder / "bus.db")


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return read(tmp_path_factory.mktemp("healthy"), None)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return read(tmp_path_factory.mktemp("faulty"), FAULT)


def test_the_report_of_a_real_training_has_its_numbers(faulty: Run) -> None:
    report = report_of(faulty, now_ms=0)
    sections = {section.key: section for section in report.sections}
    captured = {key for key, one in sections.items() if one.status != "not_captured"}
    assert captured >= {
        "training", "issues", "framework_metrics", "step_durations", "outliers", "tensors",
    }  # fmt: skip
    assert report.status == "critical"
    assert "The main finding is critical" in report.verdict
    shares = [figure.value for figure in sections["framework_metrics"].figures]
    assert sum(float(share) for share in shares) == pytest.approx(100)
    for section in report.sections:
        for part in (section, *section.parts):
            for chart in part.charts:
                assert ElementTree.fromstring(chart).get("role") == "img"
    assert len(to_html(report)) < 3_000_000
    assert to_json(report)


def test_a_training_does_not_differ_from_itself(healthy: Run) -> None:
    found = compare(healthy, healthy)
    assert list(found.differences) == []
    assert all(one.change is None or one.change.change == 0 for one in found.measures)


def test_the_first_difference_is_at_the_step_of_the_fault(healthy: Run, faulty: Run) -> None:
    """Both have the same seed, so they are equal up to the fault."""
    numbers = [one for one in compare(healthy, faulty).differences if one.step is not None]
    assert numbers
    assert all(ONSET <= one.step <= ONSET + 10 for one in numbers if one.step is not None)
