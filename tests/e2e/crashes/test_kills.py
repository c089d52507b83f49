"""Processes of ours are killed in the middle: same issue ids, one stop, each delivery final."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from support.processes.site import (
    SCRIPTS,
    Finished,
    Running,
    Site,
    embedded_site_in,
    end,
    family_of,
    helpers_of,
    kafka_site_in,
)
from support.servers.receiver import Receiver
from support.trainings.captured import said
from support.waiting import wait_until
from tocsin.bus.port import Partition
from tocsin.schemas.ids import incarnation_id, issue_id
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.events import Event
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.runs import RunEnded
from tocsin.schemas.records.stops.commands import StopRequested
from tocsin.schemas.records.wire import decode, read_meta
from tocsin.schemas.topics import Topics, issue_partition
from tocsin.stream_rules.rules.numerical.nonfinite import Nonfinite

K = 60
"""The step of the NaN: late enough that all is up and the killing can begin before it."""

UNDISTURBED = issue_id(
    "killed", incarnation_id("killed", "4711", 0, 0), "nonfinite", Nonfinite.meta.version,
    f"||{K}|gradients|0.weight",
)  # fmt: skip
"""The issue's id where nothing is killed: it is made of what was observed alone."""


@dataclass
class Found:
    """What stands on the bus about one run, read without any view of ours."""

    issue_ids: set[str] = field(default_factory=set)
    commands: set[str] = field(default_factory=set)
    deliveries: dict[str, Delivery] = field(default_factory=dict)


def look(site: Site, run_id: str) -> Found:
    """Read issues, actions and control."""
    found = Found()
    topics = Topics(site.prefix)
    number = issue_partition(run_id)
    names = (topics.issues, topics.actions, topics.control)
    for record in site.records([Partition(name, number) for name in names]):
        if record.value is None:
            continue
        event = decode(read_meta(record.headers), record.value)
        assert isinstance(event, Event)
        data = event.data
        if isinstance(data, IssueFiring) and data.run_id == run_id:
            # A job that is left alone a while longer may rightly give other issues too.
            if data.rule == "nonfinite":
                found.issue_ids.add(data.issue_id)
        elif isinstance(data, StopRequested) and data.run_id == run_id:
            found.commands.add(data.command_id)
        elif isinstance(data, Delivery) and data.run_id == run_id:
            found.deliveries[data.key] = data
    return found


def train_with_nan(site: Site, run_id: str, **options: Any) -> Running:
    """A perceptron with a NaN in one gradient at step K; its incarnation is made of given ids.

    All is captured at each step: within a budget, that NaN may be seen one step later.
    """
    config = site.config.read_text()
    if "capture:" not in config:
        site.config.write_text(
            config + "\ncapture: {budget: 100%, collections: {gradients: {every: 1}}}\n"
        )
    return site.start(
        sys.executable, str(SCRIPTS / "same_nan.py"), "--nan-at", str(K), "--pause", "0.05",
        run_id=run_id, options=["--drain", "30"],
        environ={"TOCSIN_JOB_ID": "4711", **options.pop("environ", {})}, **options,
    )  # fmt: skip


def check(finished: Finished, found: Found) -> None:
    """One issue, with the id that it has where nothing is killed; one stop, everything final."""
    assert finished.exit_code == 79, finished
    (issue,) = [i for i in finished.issues if i["rule"] == "nonfinite"]
    assert found.issue_ids == {issue["id"]} == {UNDISTURBED}, finished
    assert len(found.commands) == 1, finished
    states = {key.split("/", 1)[1]: d.state for key, d in found.deliveries.items()}
    assert states == {"stop": "delivered", "hook": "delivered"}, finished


@pytest.mark.torture  # once, in the middle of a stop, is enough for each day
def test_the_helper_is_killed_again_and_again(embedded_site: Site) -> None:
    running = train_with_nan(embedded_site, "killed")
    killed = 0
    while running.process.poll() is None and killed < 4:
        wait_until(
            lambda: helpers_of(running) or running.process.poll() is not None,
            what="a new helper",
        )
        for helper in helpers_of(running):
            # Some die at their start, some at work.
            time.sleep(0.0 if killed % 2 else 0.04)
            with suppress(psutil.NoSuchProcess):
                helper.kill()
                killed += 1
    finished = running.finish()
    assert killed == 4
    check(finished, look(embedded_site, "killed"))


def test_the_helper_is_killed_while_the_stop_is_under_way(embedded_site: Site) -> None:
    running = train_with_nan(embedded_site, "killed")
    wait_until(lambda: look(embedded_site, "killed").issue_ids, timeout_s=60, what="the issue")
    for helper in helpers_of(running):
        helper.kill()
    check(running.finish(), look(embedded_site, "killed"))


@pytest.mark.torture  # in CI: test_chaos_of_a_fleet
@pytest.mark.kafka
@pytest.mark.parametrize("service", ["rules", "actions"])
def test_a_worker_is_killed_and_another_takes_over(
    kafka_url: str, receiver: Receiver, tmp_path: Path, service: str
) -> None:
    site = kafka_site_in(tmp_path, kafka_url, receiver)
    commands = {"rules": ("rules",), "actions": ("actions", "--allow-cidr", "127.0.0.0/8")}
    workers = {name: site.service(*command) for name, command in commands.items()}
    try:
        running = train_with_nan(site, "killed")
        wait_until(lambda: look(site, "killed").issue_ids, timeout_s=60, what="the issue")
        workers[service].kill()
        workers[service].wait(10)
        workers[service] = site.service(*commands[service])
        finished = running.finish(120)
        found = look(site, "killed")
        wait_until(
            lambda: all(d.final for d in look(site, "killed").deliveries.values()),
            timeout_s=60,
            what="all deliveries final",
        )
        found = look(site, "killed")
    finally:
        for worker in workers.values():
            end(worker)
    assert finished.exit_code == 79, finished
    assert found.issue_ids == {UNDISTURBED}, finished
    assert len(found.commands) == 1
    assert {d.state for d in found.deliveries.values()} == {"delivered"}, found.deliveries


def test_the_launcher_is_killed_and_the_job_goes_on(embedded_site: Site) -> None:
    running = embedded_site.start(
        sys.executable, "-u", str(SCRIPTS / "long_loop.py"), "--steps", "400", run_id="orphan"
    )
    wait_until(lambda: "step 0" in running.stdout, timeout_s=60, what="the job trains")
    wait_until(lambda: helpers_of(running), what="the helper")
    jobs, helpers = family_of(running, "long_loop.py"), helpers_of(running)
    running.process.kill()
    running.process.wait(10)
    _, alive = psutil.wait_procs(helpers, timeout=15)
    assert alive == [], "the helper outlived its launcher"
    assert all(job.is_running() for job in jobs), "the job died with the launcher"
    _, alive = psutil.wait_procs(jobs, timeout=60)
    assert alive == []
    # Nobody was there to take its last records in; whoever opens the bus does.
    assert 399 in said(embedded_site.folder, "orphan").steps()
    assert said(embedded_site.folder, "orphan").of(RunEnded)
    wait_until(lambda: "done after 400 steps" in running.stdout, what="the last line of the job")


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_no_job_hangs_whenever_its_launcher_is_killed(tmp_path: Path, receiver: Receiver) -> None:
    """`TOCSIN_KILLS` launchers, at most 200, four at a time: from the start to past the last step.

    Whatever a launcher holds for its job (pipes, terminal, sockets, locks) goes with it.
    """
    kills = min(200, int(os.environ.get("TOCSIN_KILLS", "200")))
    chosen = Random(os.environ.get("TOCSIN_KILL_SEED", "20261126"))
    steps = 150

    def kill(number: int, after_s: float) -> str:
        folder = tmp_path / str(number)
        folder.mkdir()
        running = embedded_site_in(folder, receiver).start(
            sys.executable, "-u", str(SCRIPTS / "long_loop.py"), "--steps", str(steps)
        )
        time.sleep(after_s)
        jobs = family_of(running, "long_loop.py")
        running.process.kill()
        running.process.wait(10)
        _, alive = psutil.wait_procs(jobs, timeout=90)
        if alive:
            where = running.stdout.splitlines()[-1:]
            for one in alive:
                one.kill()
            return f"{after_s:.2f} s: it hangs after {where}"
        if not jobs:
            return ""
        done = f"done after {steps} steps"
        wait_until(lambda: done in running.stdout, what=f"the last line of job {number}")
        return "goes on"

    with ThreadPoolExecutor(4) as pool:
        moments = [chosen.uniform(0.0, 9.0) for _ in range(kills)]
        ended = list(pool.map(kill, range(kills), moments))
    assert [one for one in ended if one not in ("", "goes on")] == []
    assert ended.count("goes on") > kills / 5, "the others had not started their jobs"
