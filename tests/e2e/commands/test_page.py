"""The page in a real browser: a run that goes bad while somebody watches, hostile names, outages.

Most tests share one browser, and one `tocsin run` with one `tocsin serve` beside it, in a folder in
which nothing is configured. `TOCSIN_PICTURES=FOLDER` keeps a picture of each page, size and theme.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from support.processes import forking
from support.processes.forking import Forked
from support.processes.pages import served_by_process, served_here
from support.processes.site import SCRIPTS, end
from support.records.hostile_runs import HOSTILE, delivery_record, hostile_records
from support.records.issues import TOPICS, delivery, issue, issue_record, view, view_record
from support.records.on_bus import data_of
from support.servers.chromium import SIZES, THEMES, Browser, chromium
from support.waiting import HANGS_S, wait_until
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import Outgoing
from tocsin.bus.urls import open_bus
from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.schemas.records.events import Data
from tocsin.schemas.records.run_view import RankView
from tocsin.schemas.records.stops.commands import StopRequested
from tocsin.schemas.records.stops.control import StopAnswered
from tocsin.schemas.topics import Topics, issue_partition

RUN = "page-run"

WATCH_SHIFTS = """
    window.shifts = 0;
    new PerformanceObserver((list) => {
      for (const entry of list.getEntries()) window.shifts += entry.value;
    }).observe({ type: "layout-shift", buffered: false });
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@dataclass
class Lived:
    """A run that trains in a folder, and the page beside it."""

    folder: Path
    browser: Browser
    process: subprocess.Popen[str]

    def go_bad(self) -> None:
        """From the next batch on."""
        (self.folder / "bad").touch()


@pytest.fixture(scope="module")
def lived(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lived]:
    folder = tmp_path_factory.mktemp("lived")
    environ = {"XDG_CONFIG_HOME": str(folder / "config"), "OMP_NUM_THREADS": "1"}
    words = ["-m", "tocsin.console", "run", "--run-id", RUN, "--label", "team=vision", "--quiet"]
    with (folder / "run.log").open("w") as log:
        process = Forked(
            [sys.executable, *words, "--", sys.executable, str(SCRIPTS / "goes_bad.py")],
            cwd=folder, env={**os.environ, **environ}, stdin=subprocess.DEVNULL,
            stdout=log, stderr=log, text=True, start_new_session=True,
        )  # fmt: skip
    try:
        with served_by_process(folder, environ=environ) as served:
            page = browser.at(served.base)
            page.open("/")
            page.reads(RUN)
            yield Lived(folder, page, process)
    finally:
        end(process)


def on_bus(path: Path, *records: Outgoing) -> None:
    """Write records to an embedded bus, which is made if need be."""

    async def write() -> None:
        async with EmbeddedBus(path) as bus:
            await bus.init(TOPICS.specs())
            producer = await bus.producer()
            await producer.publish(records)
            await producer.close()

    asyncio.run(write())


def control_of(path: Path, run: str) -> list[Data]:
    """What was written about stops of a run."""

    async def read() -> list[Data]:
        async with EmbeddedBus(path) as bus:
            found = await data_of(bus, TOPICS.control, issue_partition(run))
        return [one for one in found if getattr(one, "run_id", None) == run]

    return asyncio.run(read())


def check(browser: Browser, name: str) -> None:
    """The page fits each size in both themes, axe finds nothing, and the console is quiet."""
    pictures = os.environ.get("TOCSIN_PICTURES")
    for theme in THEMES:
        # Only colours differ, and each size is drawn anew.
        for width, height in SIZES if theme == THEMES[0] or pictures else ():
            browser.appear(width, height, theme)
            browser.until(partial(fits, browser, width))
            if pictures:
                browser.picture(Path(pictures) / f"{name}-{width}-{theme}.png")
        browser.appear(1280, 900, theme)
        rules = () if theme == THEMES[0] else ("color-contrast",)
        assert browser.violations(*rules) == "", f"{name}, {theme}"
    assert browser.complaints() == [], name


# -- a run that goes bad, in this order --------------------------------------------------------


def test_a_run_is_there_with_nothing_configured(lived: Lived) -> None:
    lived.browser.open("/")
    lived.browser.reads(RUN)
    lived.browser.reads("running", ".run .state")
    lived.browser.until(lambda: lived.browser.all(".run .spark svg"))
    lived.browser.reads("team=vision", ".run .labels")
    lived.browser.until(lambda: re.search(r"\d/s", lived.browser.text(".run .rate")))
    check(lived.browser, "overview")


def test_the_run_is_opened_by_keyboard_and_its_curves_grow(lived: Lived) -> None:
    browser = lived.browser
    browser.open("/")
    browser.reads(RUN)
    press(browser, "j")
    assert browser.run("return document.activeElement.textContent") == RUN
    browser.run("document.activeElement.click()")
    browser.until(lambda: browser.driver.current_url.endswith(f"/runs/{RUN}"))
    for region in ("loss", "norm", "rate", "phases"):
        browser.until(partial(browser.all, f"[data-region={region}] svg.chart"))
    before = step_of(browser)
    browser.run(WATCH_SHIFTS)
    browser.until(lambda: step_of(browser) > before)
    assert browser.run("return window.shifts") < 0.05, "nothing moves under the eye"
    browser.reads("Nothing was found so far")
    check(browser, "run")


def test_tensors_are_shown_and_one_is_opened_by_a_click(lived: Lived) -> None:
    browser = lived.browser
    browser.open(f"/runs/{RUN}/tensors?collection=gradients")
    browser.until(lambda: browser.all("[data-heat] text.row"))
    check(browser, "tensors")
    row = browser.all("[data-heat] text.row")[0]
    browser.driver.execute_script(
        "const box = arguments[0].getBoundingClientRect();"
        "const at = {bubbles: true, clientX: box.right + 60, clientY: (box.top + box.bottom) / 2};"
        "arguments[0].ownerSVGElement.dispatchEvent(new MouseEvent('click', at));",
        row,
    )
    browser.until(lambda: browser.all("[data-region=one] .ribbon-chart"))
    assert len(browser.all("svg.chart")) <= 50
    check(browser, "tensor")


def test_the_machine_is_shown(lived: Lived) -> None:
    browser = lived.browser
    browser.open(f"/runs/{RUN}/system")
    browser.until(lambda: browser.all("svg.heat-map"))
    browser.reads("Memory")
    check(browser, "system")


def test_people_zoom_into_a_curve_without_a_policy_being_broken(lived: Lived) -> None:
    browser = lived.browser
    browser.open(f"/runs/{RUN}/zoom?name=loss")
    browser.until(lambda: browser.run("return document.querySelector('#zoom')?.dataset.drawn"))
    assert browser.all("#zoom .main-svg .scatterlayer .trace path")
    browser.run("Plotly.relayout('zoom', {'xaxis.range[0]': 2, 'xaxis.range[1]': 8})")
    browser.until(
        lambda: browser.run("return document.querySelector('#zoom')?.dataset.drawn") == "1"
    )
    browser.reads("Shown: 9 of 9 points", "#zoom-count")
    check(browser, "zoom")


def test_what_goes_wrong_appears_and_the_stop_walks_to_its_end(lived: Lived) -> None:
    browser = lived.browser
    browser.open(f"/runs/{RUN}")
    browser.run("window.stays = true")
    lived.go_bad()
    browser.reads("nonfinite", "[data-region=story]")
    browser.until(lambda: browser.all("[data-region=loss] .mark.critical"))
    for state in ("requested", "acknowledged", "left", "exited"):
        browser.reads(state, "[data-region=stop] .moments")
    browser.reads("stopped", "[data-region=head]")
    browser.reads("default: stop for critical issues", "[data-region=deliveries]")
    assert browser.run("return window.stays"), "all of it came without a load of the page"
    check(browser, "run-stopped")


def test_a_click_acknowledges(lived: Lived) -> None:
    browser = lived.browser
    browser.open("/?only=needs")
    browser.reads("critical", ".run .issue")
    check(browser, "overview-needs")
    link = browser.find(".run .issue a").get_attribute("href")
    browser.driver.get(str(link))
    browser.reads("Nobody has answered yet")
    browser.until(lambda: browser.run("return document.querySelector('main').dataset.live"))
    check(browser, "issue")
    browser.find("#ack").click()
    browser.reads("acknowledged", "#issue-state")
    browser.reads("acknowledged by", "#given")
    browser.open("/")
    browser.reads("Needs a person 0", "[data-region=filters]")


def test_a_false_alarm_and_a_silence_are_given_with_words(lived: Lived) -> None:
    browser = lived.browser
    browser.open(f"/runs/{RUN}")
    browser.driver.get(str(browser.find("[data-region=story] h2 a").get_attribute("href")))
    browser.until(lambda: browser.run("return document.querySelector('main').dataset.live"))
    browser.find("#silence > summary").click()
    browser.find("#silence-why").send_keys("known")
    browser.find("#silence button").click()
    browser.reads("silenced until", "#said")
    browser.find("#false-alarm > summary").click()
    browser.find("#why-false").send_keys("a test")
    browser.find("#false-alarm button").click()
    browser.reads("false alarm by", "#given")
    browser.reads("a test", "#given")
    browser.until(lambda: not browser.all("#ack"))


# -- what else a person may see ----------------------------------------------------------------


@pytest.fixture(scope="module")
def hostile(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    path = tmp_path_factory.mktemp("hostile") / "bus.db"
    on_bus(path, *hostile_records(unix_ms()))
    with served_here(path) as served:
        yield browser.at(served.base)


@pytest.mark.parametrize(
    "path",
    [
        "/", "/?q={text}", "/runs/{run}", "/runs/{run}/tensors", "/runs/{run}/system",
        "/runs/{run}/zoom?name={name}", "/issues/{issue}",
    ],
)  # fmt: skip
def test_hostile_names_are_text(hostile: Browser, path: str) -> None:
    hostile.open(HOSTILE.path(path))
    hostile.until(lambda: "alert" in hostile.text("body"))
    assert hostile.run("return window.harmed === undefined")
    assert not hostile.all("main img, main iframe, main script, main object, main a[href^='java']")
    assert hostile.complaints() == []
    hostile.appear(375, 812)
    assert hostile.overflows(375) <= 0
    hostile.appear(1280, 900)


def test_stops_are_approved_rejected_and_asked_for_by_clicks(
    browser: Browser, tmp_path: Path
) -> None:
    until_ms = unix_ms() + 600_000
    waits = {"approval": {"why": "mode: ask", "until_ms": until_ms}, "give_up_ms": until_ms}
    about = [issue("good-to-stop"), issue("goes-on")]
    path = tmp_path / "bus.db"
    on_bus(
        path,
        *(view_record(view(run)) for run in ("good-to-stop", "goes-on", "dull")),
        *map(issue_record, about),
        *(delivery_record(delivery(one, "stop", **waits)) for one in about),
    )
    with served_here(path) as served:
        page = browser.at(served.base)
        page.open("/")
        page.reads("asks for a stop")
        for run, button, verdict in (
            ("good-to-stop", "Approve the stop", "approve"),
            ("goes-on", "Reject the stop", "reject"),
        ):  # fmt: skip
            page.open(f"/runs/{run}")
            page.button("[data-region=stop]", button).click()
            page.reads("the stop of run " + run, "#said")
            (answer,) = control_of(path, run)
            assert isinstance(answer, StopAnswered)
            assert (answer.verdict, answer.by) == (verdict, "ana@node-1")
        page.open("/runs/dull")
        page.find("#stop-this > summary").click()
        page.find("#stop-reason").send_keys("learns nothing")
        page.button("#stop-this", "Stop the run now").click()
        page.reads("asked run dull to stop", "#said")
        (command,) = control_of(path, "dull")
        assert isinstance(command, StopRequested)
        assert (command.reason, command.requested_by) == ("learns nothing", "ana@node-1")


def test_all_that_has_no_content_is_designed(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "bus.db"
    with served_here(path) as served:
        page = browser.at(served.base)
        page.open("/")
        page.reads("waiting for the bus: there is no bus at")
        page.reads("tocsin run -- python train.py")
        check(page, "no-bus")
        on_bus(path)
        page.reads("No runs yet")
        assert not page.all(".situation:not([hidden])")
        old_ms = unix_ms() - 100_000
        ranks = (RankView(rank=0, last_heard_ms=old_ms),)
        silent = view("silent").model_copy(update={"ranks": ranks, "started_ms": old_ms})
        on_bus(path, view_record(silent))
        page.reads("no data for")
        page.open("/runs/silent")
        page.reads("no data for", "[data-region=head]")
        page.reads("Not captured yet", "[data-region=loss]")
        check(page, "silent")
        page.open("/?q=nothing-of-that-name")
        page.reads("No run fits")
        page.open("/runs/nobody")
        page.reads("There is no run nobody on this bus.")
        assert [c for c in page.complaints() if "404" not in c] == []


def test_a_bus_that_goes_away_is_said_and_comes_back(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "bus.db"
    on_bus(path, view_record(view("before")))
    with served_here(path) as served:
        page = browser.at(served.base)
        page.open("/")
        page.reads("before")
        files = [tmp_path / f"bus.db{suffix}" for suffix in ("", "-wal", "-shm")]
        aside = tmp_path / "aside"
        aside.mkdir()
        moved = [Path(shutil.move(file, aside)) for file in files if file.exists()]
        page.reads("bus away for", "[data-region=situation]")
        page.reads("before")
        check(page, "bus-away")
        for file in moved:
            shutil.move(file, tmp_path)
        on_bus(path, view_record(view("after")))
        page.reads("after")
        page.until(lambda: not page.all("[data-region=situation] .situation"))


def test_a_page_server_that_ends_is_said(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "bus.db"
    on_bus(path, view_record(view("here")))
    with served_here(path) as served:
        page = browser.at(served.base)
        page.open("/")
        page.reads("here")
    page.reads("The page lost its connection to tocsin serve", "#connection")
    page.complaints()


@pytest.mark.kafka
def test_the_runs_of_a_kafka_are_shown_and_answered(kafka_url: str, tmp_path: Path) -> None:
    prefix = f"page-{uuid.uuid4().hex[:8]}"
    about = issue("on-kafka")

    async def publish(*records: Outgoing) -> None:
        async with open_bus(kafka_url) as bus:
            await bus.init(Topics(prefix).specs())
            producer = await bus.producer()
            for record in records:
                topic = record.partition.topic.replace("tocsin", prefix, 1)
                place = record.partition._replace(topic=topic)
                await producer.publish([replace(record, partition=place)])
            await producer.close()

    asyncio.run(publish(view_record(view("on-kafka"))))
    with served_here(tmp_path / "none.db", bus=kafka_url, prefix=prefix) as served:
        wait_until(lambda: "/runs/on-kafka" in served.ask()[1])
        asyncio.run(publish(issue_record(about)))
        wait_until(lambda: served.ask(f"/issues/{about.issue_id}")[0] == 200)
        form = {"csrf": served.csrf}
        assert served.ask(f"/issues/{about.issue_id}/ack", form=form)[0] == 200
        wait_until(lambda: "acknowledged by ana" in served.ask(f"/issues/{about.issue_id}")[1])


def test_what_cannot_be_served_is_a_sentence(tmp_path: Path) -> None:
    serve = [sys.executable, "-m", "tocsin.console", "serve", "--http"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for address, sentence in (
            (f"127.0.0.1:{port}", f"cannot listen there (Address already in use); try another "
             f"port: --http 127.0.0.1:{port + 1}"),
            ("0.0.0.0:0", "Add --token-file"),
            ("here", "expected HOST:PORT"),
        ):  # fmt: skip
            done = forking.run([*serve, address], cwd=tmp_path, timeout=HANGS_S)
            assert (done.returncode, done.stdout) == (2, "")
            assert done.stderr.startswith("tocsin: --http")
            assert sentence in done.stderr
            assert "Traceback" not in done.stderr
    (tmp_path / "notes.txt").write_text("not a bus" * 1_000)
    done = forking.run(
        [*serve, "127.0.0.1:0", "--bus", "embedded:notes.txt"], cwd=tmp_path, timeout=HANGS_S
    )
    assert done.returncode == 2
    assert "is damaged or is not an SQLite file" in done.stderr
    assert "Traceback" not in done.stderr


def fits(browser: Browser, width: int) -> bool:
    """Whether nothing is beyond the right edge."""
    return browser.overflows(width) <= 0


def press(browser: Browser, key: str) -> None:
    """A key, wherever the focus is."""
    browser.find("body").send_keys(key)


def step_of(browser: Browser) -> int:
    """The step that the head of a run's page shows."""
    found = re.search(r"step ([\d,]+)", browser.text("[data-region=head]"))
    return int(found[1].replace(",", "")) if found is not None else -1
