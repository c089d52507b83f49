"""What the reading commands know of a bus."""

from __future__ import annotations

from pathlib import Path

from support.issue_records import NOW_MS, TOPICS, issue, issue_record
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.console.views.bus_view import read_view
from tocsin.schemas.records.issues import Origin


async def test_an_issue_that_came_back_milder_keeps_its_severity_and_beginning(
    tmp_path: Path,
) -> None:
    again = issue(severity="warning", resolved=True).model_copy(
        update={
            "times": 2,
            "first_step": 250,
            "onset_ms": NOW_MS + 9,
            "peak_severity": "critical",
            "origin": Origin(step=3, onset_ms=NOW_MS),
        }
    )
    async with EmbeddedBus(tmp_path / "bus.db") as bus:
        await bus.init(TOPICS.specs())
        producer = await bus.producer()
        await producer.publish([issue_record(issue()), issue_record(again)])
        await producer.close()
        (found,) = (await read_view(bus, TOPICS)).issues
    assert (found.severity, found.first_step, found.onset_ms) == ("critical", 3, NOW_MS)
    assert (found.state, found.times) == ("resolved", 2)
