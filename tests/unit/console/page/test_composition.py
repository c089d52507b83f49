"""The page over a bus and a store, asked without a browser."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.processes.archive import archive_all
from support.processes.pages import Served, served_here
from support.records.issues import TOPICS, issue, issue_record, view, view_record
from support.records.on_bus import data_of
from support.records.steps import written_steps
from support.waiting import wait_until
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import Outgoing
from tocsin.console.page.composition import View
from tocsin.schemas.records.feedback import Feedback
from tocsin.schemas.records.silences import SilenceSet
from tocsin.schemas.topics import issue_partition
from tocsin.store import open_store

ISSUE = issue("live")


def records(run: str, rate: float) -> list[Outgoing]:
    """A run of 300 steps."""
    losses = {step: 2.0 - rate * step for step in range(300)}
    done = view(run, next_offset=9).model_copy(update={"last_step": 299, "last_loss": 0.5})
    return [written_steps(run, losses), view_record(done)]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("site")

    async def fill() -> None:
        async with EmbeddedBus(folder / "old.db") as old:
            await old.init(TOPICS.specs())
            producer = await old.producer()
            about = issue("past", "loss_spike", severity="warning")
            await producer.publish([*records("past", 0.001), issue_record(about)])
            await producer.close()
            await archive_all(old, open_store(folder / "store"))
        async with EmbeddedBus(folder / "bus.db") as bus:
            await bus.init(TOPICS.specs())
            producer = await bus.producer()
            made = [*records("live", 0.002), *records("other", 0.004), issue_record(ISSUE)]
            await producer.publish(made)
            await producer.close()

    asyncio.run(fill())
    with served_here(folder / "bus.db") as served:
        yield served


def on_bus(page: Served, topic: str) -> list[object]:
    """What the run `live` has on a topic."""
    assert page.page is not None
    path = Path(page.page.site.context.settings.bus.url.removeprefix("embedded:"))

    async def read() -> list[object]:
        async with EmbeddedBus(path) as bus:
            return [*await data_of(bus, topic, issue_partition("live"))]

    return asyncio.run(read())


def test_a_run_that_only_the_store_has_is_listed_and_has_its_page(page: Served) -> None:
    wait_until(lambda: "/runs/past" in page.ask()[1])
    status, text, _ = page.ask("/runs/past")
    assert status == 200
    assert "loss_spike" in text
    assert '<svg xmlns="http://www.w3.org/2000/svg" class="chart line-chart"' in text


def test_two_runs_are_compared(page: Served) -> None:
    status, text, _ = page.ask("/compare?a=live&b=other")
    assert status == 200
    assert re.search(r"The runs differ first in their [a-z]+", text)
    assert "the loss" in text
    assert page.ask("/compare?a=liv&b=oth")[1].count("<h2>Measures") == 1
    assert "There is no run nobody" in page.ask("/compare?a=live&b=nobody")[1]
    assert "Choose two different runs" in page.ask("/compare?a=live&b=live")[1]


def test_a_report_is_a_file_to_keep(page: Served) -> None:
    status, text, headers = page.ask("/runs/live/report.html")
    assert status == 200
    assert headers["Content-Disposition"] == 'attachment; filename="tocsin-report-live.html"'
    assert "nonfinite" in text
    assert page.ask("/runs/nobody/report.html")[0] == 404


def test_programs_get_the_same_facts(page: Served) -> None:
    wait_until(lambda: {"live", "other", "past"} <= _names(page.ask("/api/v1/runs")[1]))
    assert "nonfinite" in page.ask("/api/v1/issues")[1]


def _names(text: str) -> set[str]:
    return {run["run_id"] for run in json.loads(text)["runs"]}


def test_points_are_those_of_the_range(page: Served) -> None:
    found = json.loads(page.ask("/runs/live/points?name=loss&low=10&high=12&groups=100")[1])
    assert found["x"] == [9, 10, 11, 12, 13]
    assert json.loads(page.ask("/runs/live/points?name=nothing&low=nan&high=x")[1])["total"] == 0


@pytest.mark.parametrize(
    "path", ["/runs/nobody", "/issues/none", "/nowhere", "/runs/live/nowhere", "/events?of=%2Fx"]
)
def test_what_is_not_there_is_said(page: Served, path: str) -> None:
    status, text, _ = page.ask(path)
    assert status == 404
    assert "There is no" in text or "Not Found" in text


@pytest.mark.parametrize("verb", ["ack", "false-alarm", "resolve"])
def test_an_answer_is_the_record_of_the_command(page: Served, verb: str) -> None:
    form = {"csrf": page.csrf, "why": f"by test {verb}"}
    path = f"/issues/{ISSUE.issue_id}/{verb}"
    status, text, _ = page.ask(path, form=form, headers={"Accept": "application/json"})
    assert status == 200, text
    given = [one for one in on_bus(page, TOPICS.issues) if isinstance(one, Feedback)]
    assert (given[-1].by, given[-1].why) == ("ana@node-1", f"by test {verb}")
    wait_until(lambda: f"by test {verb}" in page.ask(f"/issues/{ISSUE.issue_id}")[1])


def test_a_silence_matches_what_was_chosen(page: Served) -> None:
    path = f"/issues/{ISSUE.issue_id}/silence"
    form = {"csrf": page.csrf, "what": "both", "lasts": "4h", "why": "known"}
    assert page.ask(path, form=form)[0] == 200
    found = [one for one in on_bus(page, TOPICS.control) if isinstance(one, SilenceSet)]
    assert found[-1].match == {"run": ("live",), "rule": ("nonfinite",)}
    assert found[-1].until_ms - found[-1].from_ms == 4 * 3_600_000
    for wrong in ({"what": "all"}, {"lasts": "99d"}, {"why": ""}):
        assert page.ask(path, form={**form, **wrong})[0] == 409


def test_without_script_a_button_answers_with_a_page(page: Served) -> None:
    path = f"/issues/{ISSUE.issue_id}/ack"
    status, text, _ = page.ask(path, form={"csrf": page.csrf})
    assert status == 200
    assert "<h1>Done</h1>" in text
    assert page.ask(f"/issues/{ISSUE.issue_id}/explode", form={"csrf": page.csrf})[0] == 404
    assert page.ask("/stops/none-such/approve", form={"csrf": page.csrf})[0] == 409


def test_a_stop_that_may_not_have_been_sent_is_not_done(
    page: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unsure(*_: object) -> str:
        return "the bus did not confirm the command"

    monkeypatch.setattr("tocsin.console.stop.send._publish", unsure)
    form = {"csrf": page.csrf, "reason": "the loss rises"}
    status, text, _ = page.ask("/runs/live/stop", form=form)
    assert status == 503
    assert "<h1>Not sure</h1>" in text
    assert "the bus did not confirm the command" in text


def test_without_what_reads_a_store_live_runs_have_what_the_bus_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fill() -> None:
        async with EmbeddedBus(tmp_path / "bus.db") as bus:
            await bus.init(TOPICS.specs())
            producer = await bus.producer()
            await producer.publish([*records("live", 0.002), issue_record(ISSUE)])
            await producer.close()
            await archive_all(bus, open_store(tmp_path / "store"))

    asyncio.run(fill())
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "duckdb" else real(name, *a)
    )
    with served_here(tmp_path / "bus.db") as served:
        wait_until(lambda: "spark" in served.ask()[1])
        status, text, _ = served.ask("/runs/live")
        assert status == 200
        assert 'class="chart line-chart"' in text
        assert served.ask()[0] == 200


def test_a_run_that_goes_while_its_page_is_open_is_said(tmp_path: Path) -> None:
    path = tmp_path / "bus.db"

    async def write(*made: Outgoing) -> None:
        async with EmbeddedBus(path) as bus:
            await bus.init(TOPICS.specs())
            producer = await bus.producer()
            await producer.publish(made)
            await producer.close()

    asyncio.run(write(*records("gone", 0.001)))
    with served_here(path) as served:
        assert served.page is not None
        view = served.page.site.run_page
        wait_until(lambda: served.ask("/runs/gone")[0] == 200)
        opened = view("gone")
        served.page.site.follower.state.view.seen.clear()
        assert "There is no run gone" in asyncio.run(_frame(opened))


async def _frame(opened: View) -> str:
    return (await opened.render()).frame
