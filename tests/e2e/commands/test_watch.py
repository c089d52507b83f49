"""`tocsin watch` as a person sees it: in a terminal beside a run, and as one picture."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import pexpect
import pytest

from support.processes.site import GPT, Site, embedded_site_in, kafka_site_in
from support.records.issues import issue, issue_record, view, view_record
from support.servers.receiver import Receiver
from tocsin.bus.port import Outgoing
from tocsin.bus.urls import open_bus
from tocsin.schemas.topics import Topics

_SIZE = ("COLUMNS", "LINES")


class Screen:
    """`tocsin watch` in a terminal of 80x24; each picture begins with a jump to the corner."""

    def __init__(self, site: Site, *options: str) -> None:
        words = ["-m", "tocsin.console", "watch", "--config", str(site.config), *options]
        # Where these are set, by pytest-xdist for one, they are the size, whatever the terminal's.
        given = {name: value for name, value in os.environ.items() if name not in _SIZE}
        environ = {**given, **site.environ, "TERM": "xterm-256color"}
        self.child = pexpect.spawn(
            sys.executable, words, dimensions=(24, 80), encoding="utf-8", env=environ,
            cwd=str(site.folder), timeout=60,
        )  # fmt: skip
        self.seen = ""
        self.child.logfile_read = self

    def write(self, text: str) -> None:
        """As a log file of pexpect."""
        self.seen += text

    def flush(self) -> None:
        """As a log file of pexpect."""

    def pictures(self) -> list[str]:
        """What it has shown so far, one after the other."""
        frames = re.split(r"\x1b\[(?:1;1)?H", self.seen)
        return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", frame) for frame in frames[1:]]

    def until(self, *patterns: str, timeout_s: float = 60) -> str:
        """The first picture from now on in which all of that is."""
        deadline = time.monotonic() + timeout_s
        while True:
            for picture in self.pictures()[-2:]:
                if all(re.search(pattern, picture) for pattern in patterns):
                    return picture
            assert time.monotonic() < deadline, (patterns, self.pictures()[-2:])
            self.child.expect([r"\x1b\[(1;1)?H", pexpect.TIMEOUT], timeout=0.5)


def test_a_run_that_goes_bad_is_seen_to_the_end(embedded_site: Site) -> None:
    screen = Screen(embedded_site)
    screen.until("waiting for the bus: there is no bus at")
    training = ("-m", GPT, "--steps", "2000", "--fault", "nan_gradient", "--fault-at", "20")
    running = embedded_site.start(sys.executable, *training, run_id="seen")
    try:
        screen.until(r"seen +\w+ +\d+ .*\d\.\d+")
        screen.until(r"issues  1 open\s+\d+ s +critical +nonfinite +step 20")
        screen.until(r"delivered +hook +nonfinite")
        screen.until(r"seen +stopped +\d+ .*[█▇▆▅▄▃▂▁]+", "exit code 79", "found by nonfinite")
    finally:
        running.process.terminate()
        running.finish()
    screen.child.setwinsize(30, 100)
    screen.until(r"(?m)^tocsin watch .{80}")
    screen.child.sendintr()
    screen.child.expect(pexpect.EOF)
    screen.child.close()
    assert screen.child.exitstatus == 0
    assert screen.seen.endswith("\x1b[?25h\x1b[?1049l"), "the cursor and the page are back"
    assert "Traceback" not in screen.seen


def test_a_file_that_is_no_bus_ends_it_with_a_sentence(embedded_site: Site) -> None:
    (embedded_site.folder / "notes.txt").write_text("not a bus" * 1_000)
    screen = Screen(embedded_site, "--bus", "embedded:notes.txt")
    screen.child.expect(pexpect.EOF)
    screen.child.close()
    assert screen.child.exitstatus == 2
    after = screen.seen.rpartition("\x1b[?1049l")[2]
    assert after.startswith("tocsin: ")
    assert "is not an SQLite file" in after


def published(site: Site, *records: Outgoing) -> None:
    """Write the records to the site's topics, which have a prefix of their own."""

    async def publish() -> None:
        async with open_bus(site.bus_url) as bus:
            await bus.init(Topics(site.prefix).specs())
            producer = await bus.producer()
            for record in records:
                topic = record.partition.topic.replace("tocsin", site.prefix, 1)
                place = record.partition._replace(topic=topic)
                await producer.publish([replace(record, partition=place)])

    asyncio.run(publish())


@pytest.mark.parametrize("kind", ["embedded", pytest.param("kafka", marks=pytest.mark.kafka)])
def test_one_picture_is_printed_where_there_is_no_terminal(
    kind: str, tmp_path: Path, receiver: Receiver, request: pytest.FixtureRequest
) -> None:
    if kind == "kafka":
        site = kafka_site_in(tmp_path, request.getfixturevalue("kafka_url"), receiver)
    else:
        site = embedded_site_in(tmp_path, receiver)
        missing = site.tocsin("watch", "--config", str(site.config))
        assert (missing.returncode, missing.stdout) == (2, "")
        assert "there is no bus at" in missing.stderr
    ended = view("gone", ended=True).model_copy(update={"last_step": 7, "last_loss": float("nan")})
    records = [view_record(view("here")), view_record(ended), issue_record(issue("gone"))]
    published(site, *records)
    done = site.tocsin("watch", "--config", str(site.config))
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert lines[0].startswith("tocsin watch")
    assert lines[0].endswith("1 running, 1 ended")
    assert re.search(r"here +running(.|\n)+gone +ended +7 +- +nan +x", done.stdout)
    assert "NaN in the loss" in done.stdout
    one = site.tocsin("watch", "here", "--once", "--config", str(site.config))
    assert "gone" not in one.stdout
