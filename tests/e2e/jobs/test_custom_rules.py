"""`tocsin run` with rules of the user's own, one of them sick; a worker that is killed."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from support.processes.site import Site, embedded_site_in, end
from support.records.on_bus import read_all, send
from support.rules.custom import FILE
from support.servers.receiver import Receiver
from support.waiting import wait_until
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import Record
from tocsin.schemas.records.events import Event
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.snapshots import Snapshot
from tocsin.schemas.records.wire import decode, read_meta
from tocsin.schemas.topics import Topics, issue_partition, telemetry_partition
from tocsin.stream_rules.testing import RunBuilder

RULES = """\
  - {name: mine, use: "rules/sick.py:HighLoss", params: {limit: 2.5}, actions: [hook]}
  - {name: bad, use: "rules/sick.py:Sick", params: {how: exit, at: 5}}
"""

TRAINING = """
from tocsin.emitter import start
with start() as run:
    for step in range(40):
        run.log({"loss": 5.0 if step == 30 else 1.0})
"""

TOPICS = Topics()


@pytest.fixture
def site(embedded_site: Site) -> Site:
    return with_rules(embedded_site)


def with_rules(site: Site) -> Site:
    rules = site.folder / "rules"
    rules.mkdir()
    (rules / "sick.py").write_text(FILE.read_text())
    site.config.write_text(site.config.read_text() + RULES)
    (site.folder / "train.py").write_text(TRAINING)
    return site


def test_a_run_is_watched_by_rules_of_ones_own(site: Site) -> None:
    done = site.run(sys.executable, "train.py")

    assert done.exit_code == 0, done
    mine = [issue for issue in done.summary["issues"] if issue["rule"] == "mine"]
    assert [(issue["first_step"], issue["severity"]) for issue in mine] == [(30, "warning")], done
    assert done.summary["rules"]["mine"] == "issues_found"
    assert done.summary["rules"]["bad"] == "error"
    failed = [issue for issue in done.summary["issues"] if issue["rule"] == "rule_failed"]
    assert ["exit code 0" in issue["reason"] for issue in failed] == [True], done
    assert done.summary["deliveries"], done
    left = [p for p in psutil.process_iter(["cmdline"]) if _is_child_of(p, site.folder)]
    assert left == []


def test_nothing_starts_with_a_rule_that_cannot_be_loaded(site: Site) -> None:
    (site.folder / "rules" / "sick.py").write_text("import no_such_module\n")

    done = site.run(sys.executable, "train.py")

    assert done.exit_code == 2
    assert "tocsin.yaml:" in done.stderr
    assert "No module named 'no_such_module' (line 1)" in done.stderr
    assert not (site.folder / "bus.db").exists()


def _is_child_of(process: psutil.Process, folder: Path) -> bool:
    try:
        words = " ".join(process.info["cmdline"] or [])
        return "stream_rules.custom.child" in words and process.cwd() == str(folder)
    except psutil.Error:
        return False


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(3))
def test_workers_and_children_that_are_killed_lose_and_double_nothing(
    site: Site, tmp_path_factory: pytest.TempPathFactory, receiver: Receiver, seed: int
) -> None:
    chance = random.Random(seed)
    run = RunBuilder("gpt-1")
    run.started()
    # An issue that comes back is resolved after a longer pause, 1,000 steps at most.
    high = [20, 140, 340, *range(1400, 6000, 1050)]
    for step in range(6000):
        run.steps([step], loss=5.0 if step in high else 1.0)
    undisturbed = with_rules(embedded_site_in(tmp_path_factory.mktemp("undisturbed"), receiver))
    asyncio.run(_publish(undisturbed, run.records))
    worker = undisturbed.service("rules")
    try:
        wait_until(lambda: _covered(undisturbed) == len(run.records), 60, "all is read undisturbed")
    finally:
        end(worker)
    expected = _issues(undisturbed, "mine")
    assert (20, "loss 5 at step 20, the 21th") in expected
    assert len(expected) == len(high)

    rounds = 10
    cuts = [len(run.records) * number // rounds for number in range(rounds + 1)]
    asyncio.run(_publish(site, run.records[: cuts[1]]))
    worker = site.service("rules")
    try:
        for began, cut, following in zip(cuts, cuts[1:], cuts[2:], strict=False):
            # A child that has saved nothing since the last kill is rightly given up.
            wait_until(partial(_covers_more, site, began), 60, "the rules go on")
            asyncio.run(_publish(site, run.records[cut:following]))
            time.sleep(chance.uniform(0, 0.5))
            if chance.random() < 0.5:
                worker.kill()
                worker.wait(10)
                worker = site.service("rules")
                continue
            for child in psutil.Process(worker.pid).children():
                child.kill()
        wait_until(lambda: _covered(site) == len(run.records), 60, "all is saved")
    finally:
        end(worker)

    assert _issues(site, "mine") == expected


async def _publish(site: Site, records: list[Record]) -> None:
    async with EmbeddedBus(site.folder / "bus.db") as bus:
        await bus.init(TOPICS.specs())
        await send(bus, records)


async def _read(site: Site, topic: str, number: int) -> list[Record]:
    async with EmbeddedBus(site.folder / "bus.db", create=False) as bus:
        return await read_all(bus, topic, number)


def _issues(site: Site, rule: str) -> set[tuple[int | None, str]]:
    """First step and reason of each that fires; each time it does, one id has one of them."""
    records = asyncio.run(_read(site, TOPICS.issues, issue_partition("gpt-1")))
    found: dict[tuple[str, int], tuple[int | None, str]] = {}
    for record in records:
        event = decode(read_meta(record.headers), record.value or b"")
        assert isinstance(event, Event)
        issue = event.data
        if isinstance(issue, IssueFiring) and issue.rule == rule and issue.state == "firing":
            told = (issue.first_step, issue.reason)
            assert found.setdefault((issue.issue_id, issue.times), told) == told
    return set(found.values())


def _covers_more(site: Site, than: int) -> bool:
    return _covered(site) > than


def _covered(site: Site) -> int:
    """What the states of the custom rules cover."""
    number = telemetry_partition("gpt-1")
    records = asyncio.run(_read(site, TOPICS.state, number))
    saved = [Snapshot.decode(record.value) for record in records if record.value]
    return max((one.next_offset for one in saved if one.rule == "_custom"), default=0)
