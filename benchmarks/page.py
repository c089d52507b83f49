"""The live page: first paint, zooming, and what many viewers cost.

python benchmarks/page.py                     # about five minutes, an otherwise idle machine
python benchmarks/page.py paint zoom viewers

Each part starts a `tocsin serve` of its own over an embedded bus in a temporary folder.

paint     1,000 runs in the store, none on the bus. A headless Chromium loads the overview again and
          again: from the start of the navigation to the first contentful paint; the rows are in the
          HTML, so that is when a person can read.
zoom      one run of 200,000 steps. A range is chosen in Plotly; from then to the drawn points of
          that range, which the server has chosen.
viewers   a run that writes 20 steps a second and a view of itself each second, and 50 viewers of
          its page: processor time of the server, in percent of a core. Then issues are published
          one by one: from the publication to the event at a viewer.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.records.issues import TOPICS, incarnation, issue, issue_record, view, view_record
from support.servers.chromium import Browser, chromium
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import Outgoing, Partition, Producer
from tocsin.runtime.worker import Worker, WorkerSettings
from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.schemas.records.frames import Counts, Floats, RecordOrigin, StepFrame
from tocsin.schemas.records.run_view import RankView, RunView
from tocsin.schemas.records.wire import meta_of
from tocsin.schemas.topics import telemetry_partition
from tocsin.store import Store, open_store
from tocsin.store.archive.service import ArchiveService, FlushPolicy
from tocsin.store.archive.upkeep import Upkeep
from tocsin.store.manifest import FAMILIES, Family

RUNS: Final = 1_000
STEPS: Final = 200_000
VIEWERS: Final = 50
WATCHED_S: Final = 30.0
ISSUES: Final = 20

LIMITS: Final = {"paint": 1.0, "zoom": 0.3, "viewers": 20.0, "issue": 2.0}
"""Seconds, and percent of a core."""

COLUMNS: Final = ("loss", "gradient_norm", "lr.0", "step_time_s", "forward_s", "backward_s",
                  "optimizer_s", "data_wait_s")  # fmt: skip


def main() -> int:
    """Run the parts that are named; 1 if a limit was missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=["paint", "zoom", "viewers"])
    good = [
        {"paint": paint, "zoom": zoom, "viewers": viewers}[part](Path(folder))
        for part in parser.parse_args().parts
        for folder in [tempfile.mkdtemp(prefix=f"tocsin-page-{part}-")]
    ]
    return 0 if all(good) else 1


def paint(folder: Path) -> bool:
    """First contentful paint of the overview."""
    asyncio.run(_fill_store(folder))
    with serving(folder) as (base, _), chromium() as started:
        browser = started.at(base)
        browser.open("/")
        browser.until(lambda: f"All {RUNS:,}" in " ".join(browser.text().split()))
        taken, sizes = [], []
        for _ in range(15):
            browser.open("/")
            browser.until(lambda: browser.run(_PAINTED) is not None)
            taken.append(browser.run(_PAINTED) / 1000)
            sizes.append(browser.run(_SIZE))
            assert len(browser.all(".run")) == 50
    print(f"overview of {RUNS:,} stored runs, HTML {max(sizes) / 1024:.0f} kB")
    return report("first contentful paint", taken, LIMITS["paint"], "s")


_SIZE = "return performance.getEntriesByType('navigation')[0].transferSize"
_PAINTED = "return performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"


def zoom(folder: Path) -> bool:
    """From a chosen range to its points on the screen."""
    rng = np.random.default_rng(0)
    steps = np.arange(STEPS, dtype=np.uint64)
    falling = np.exp(-steps.astype(np.float64) / 50_000)
    losses = (falling + rng.normal(0, 0.05, STEPS)).astype(np.float32)
    records = [
        frame_record("r1", steps[i : i + 5_000], losses[i : i + 5_000, None], ("loss",))
        for i in range(0, STEPS, 5_000)
    ]
    asyncio.run(_publish(folder, [*records, view_record(seen("r1", STEPS - 1))]))
    with serving(folder) as (base, _), chromium() as started:
        browser = started.at(base)
        browser.appear(1920, 1080)
        browser.open("/runs/r1/zoom?name=loss")
        browser.until(lambda: f"of {STEPS:,} points" in browser.text("#zoom-count"))
        taken = [
            zoomed(browser, float(low), float(low + width))
            for low in rng.uniform(0, STEPS / 2, 8)
            for width in (100_000.0, 10_000.0)
        ]
        shown = browser.text("#zoom-count")
    print(f"one line of {STEPS:,} points; last {shown}")
    return report("zoomed", taken, LIMITS["zoom"], "s")


def zoomed(browser: Browser, low: float, high: float) -> float:
    """Seconds until the points of that range are drawn."""
    script = """
        const [low, high, done] = arguments, place = document.getElementById('zoom');
        const before = place.dataset.drawn, started = performance.now();
        const seen = new MutationObserver(() => {
          if (place.dataset.drawn === before) return;
          seen.disconnect();
          requestAnimationFrame(() => done(performance.now() - started));
        });
        seen.observe(place, { attributes: true, attributeFilter: ['data-drawn'] });
        Plotly.relayout(place, { 'xaxis.range[0]': low, 'xaxis.range[1]': high });
    """
    browser.driver.set_script_timeout(60)
    return float(browser.driver.execute_async_script(script, low, high)) / 1000


def viewers(folder: Path) -> bool:
    """Processor time of the server, and how soon an issue is there."""
    return asyncio.run(_viewers(folder))


async def _viewers(folder: Path) -> bool:
    async with EmbeddedBus(folder / "bus.db") as bus:
        await bus.init(TOPICS.specs())
        producer = await bus.producer()
        steps = np.arange(2_000, dtype=np.uint64)
        values = np.full((2_000, len(COLUMNS)), 0.1, np.float32)
        await producer.publish([frame_record("r1", steps, values, COLUMNS)])
        await producer.publish([view_record(seen("r1", 1_999))])
        with serving(folder) as (base, server):
            writing = asyncio.create_task(_write(producer, 2_000))
            good = True
            for count in (1, VIEWERS):
                page = Viewers(base)
                watching = asyncio.create_task(page.watch(count))
                await page.connected.wait()
                await asyncio.sleep(5)
                before, began = server.cpu_times(), time.monotonic()
                await asyncio.sleep(WATCHED_S)
                after, wall_s = server.cpu_times(), time.monotonic() - began
                spent = after.user + after.system - before.user - before.system
                rate = page.received / wall_s / 1024
                good &= report(f"{count} viewers of a live run", [100 * spent / wall_s],
                             LIMITS["viewers"], "% of a core")  # fmt: skip
                print(
                    f"  {page.events / count / wall_s:.1f} events/s each, {rate:,.0f} kB/s in all"
                )
                if count == VIEWERS:
                    taken = []
                    for n in range(ISSUES):
                        started = time.monotonic()
                        about = issue("r1", "nonfinite", f"e{n}").model_copy(
                            update={"onset_ms": unix_ms()}
                        )
                        page.await_text(about.short_id)
                        await producer.publish([issue_record(about)])
                        await asyncio.wait_for(page.seen.wait(), 60)
                        taken.append(time.monotonic() - started)
                        await asyncio.sleep(0.7)
                    good &= report("an issue at a viewer", taken, LIMITS["issue"], "s")
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
    return good


async def _write(producer: Producer, step: int) -> None:
    """20 steps a second, and each second a view."""
    publish = producer.publish
    while True:
        for _ in range(20):
            values = np.full((1, len(COLUMNS)), 0.1, np.float32)
            await publish([frame_record("r1", np.array([step], np.uint64), values, COLUMNS)])
            step += 1
            await asyncio.sleep(0.05)
        await publish([view_record(seen("r1", step - 1))])


class Viewers:
    """Streams of events, read and thrown away."""

    def __init__(self, base: str) -> None:
        self._base = base
        self.received = 0
        self.events = 0
        self.connected = asyncio.Event()
        self.seen = asyncio.Event()
        self._wanted = b""

    def await_text(self, text: str) -> None:
        """Set `seen` once an event has that text."""
        self._wanted, self.seen = text.encode(), asyncio.Event()

    async def watch(self, count: int) -> None:
        """So many viewers, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(self._one())
            self.connected.set()

    async def _one(self) -> None:
        host, port = self._base.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 24)
        path = "/events?of=%2Fruns%2Fr1&version="
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        try:
            while line := await reader.readline():
                self.received += len(line)
                self.events += line.startswith(b"data:")
                if self._wanted and self._wanted in line:
                    self.seen.set()
        finally:
            writer.close()


def seen(run_id: str, step: int) -> RunView:
    """A running run's view."""
    rules = {f"rule_{n}": "in_progress" for n in range(60)}
    return view(run_id, next_offset=step).model_copy(
        update={
            "last_step": step, "last_loss": 0.1, "rules": rules, "started_ms": unix_ms() - 60_000,
            "ranks": (RankView(rank=0, last_step=step, last_heard_ms=unix_ms()),),
        }
    )  # fmt: skip


def frame_record(run_id: str, steps: Counts, values: Floats, columns: Sequence[str]) -> Outgoing:
    """Scalars of some steps."""
    frame = StepFrame(
        origin=RecordOrigin(run_id=run_id, incarnation=incarnation(run_id)),
        steps=steps, at_us=(unix_ms() * 1000 + steps).astype(np.uint64), columns=tuple(columns),
        values=values,
    )  # fmt: skip
    place = Partition(TOPICS.telemetry, telemetry_partition(run_id))
    return Outgoing(place, run_id.encode(), frame.encode(), meta_of(frame).headers())


async def _publish(folder: Path, records: Sequence[Outgoing]) -> None:
    async with EmbeddedBus(folder / "bus.db") as bus:
        await bus.init(TOPICS.specs())
        producer = await bus.producer()
        for start in range(0, len(records), 100):
            await producer.publish(records[start : start + 100])
        await producer.close()


async def _fill_store(folder: Path) -> None:
    """A store of many runs, each with a loss, a third of them with an issue; then no bus."""
    other = folder / "before"
    other.mkdir()
    records: list[Outgoing] = []
    for n in range(RUNS):
        run_id = f"run-{n:05}"
        steps = np.arange(200, dtype=np.uint64)
        losses = np.exp(-steps.astype(np.float64) / 50).astype(np.float32)[:, None]
        records.append(frame_record(run_id, steps, losses, ("loss",)))
        update = {"state": "ended", "outcome": "completed", "ended_ms": unix_ms() - n * 1_000,
                  "labels": {"team": f"team-{n % 7}", "seed": str(n)}}  # fmt: skip
        records.append(view_record(seen(run_id, 199).model_copy(update=update)))
        if n % 3 == 0:
            records.append(issue_record(issue(run_id, "loss_spike", severity="warning")))
    await _publish(other, records)
    async with EmbeddedBus(other / "bus.db") as bus:
        for family in FAMILIES:
            await _archive(bus, open_store(folder / "store"), family)
    async with EmbeddedBus(folder / "bus.db") as bus:
        await bus.init(TOPICS.specs())


async def _archive(bus: EmbeddedBus, store: Store, family: Family) -> None:
    """All that is on the bus, as `tocsin archive` would."""
    upkeep = Upkeep(store, topics=TOPICS)
    service = ArchiveService(
        store, family, topics=TOPICS, upkeep=upkeep, policy=FlushPolicy(settle_ms=0)
    )
    settings = WorkerSettings(checkpoint_s=2.0, poll_records=1_000)
    worker = Worker(bus, service, topics=TOPICS, group=f"bench-{family}", settings=settings)
    running = asyncio.create_task(worker.run())
    if not await worker.caught_up(600.0):
        raise RuntimeError("the archive did not keep up")
    worker.stop()
    await running


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """`tocsin serve` over the bus of that folder: where it is, and its process."""
    command = [sys.executable, "-m", "tocsin.console", "serve", "--http", "127.0.0.1:0"]
    bus = ["--bus", f"embedded:{folder / 'bus.db'}"]
    process = subprocess.Popen(
        [*command, *bus], cwd=folder, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stderr is not None
    try:
        found = re.search(r"http://\S+(?=/)", process.stderr.readline())
        assert found is not None
        yield found[0], psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(20)
        process.stderr.close()


def report(what: str, values: Sequence[float], limit: float, unit: str) -> bool:
    """Print median and range; whether the median is within the limit."""
    middle = statistics.median(values)
    good = middle <= limit
    spread = ""
    if len(values) > 1:
        spread = f" ({min(values):.3g} … {max(values):.3g}, n = {len(values)})"
    word = "good" if good else "MISSED"
    print(f"{what:<32} {middle:6.3g} {unit}{spread}, limit {limit:g}: {word}", flush=True)
    return good


if __name__ == "__main__":
    raise SystemExit(main())
