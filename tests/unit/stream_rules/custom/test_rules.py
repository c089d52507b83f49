"""Custom rules in their child process: the well and the sick."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from support.rules.custom import FILE, customs, entries
from support.rules.sick_rules import HighLoss
from tocsin.runtime.service import CaughtUp, Tick
from tocsin.stream_rules.custom.call_limits import Limits
from tocsin.stream_rules.custom.host import load_apart
from tocsin.stream_rules.engine.replay import replay
from tocsin.stream_rules.testing import RunBuilder, only

MINE = "{name: mine, use: FILE:HighLoss, params: {limit: 2.5}}"


def a_run(steps: int = 60, *, ended: bool = True) -> RunBuilder:
    run = RunBuilder()
    run.started(role="launcher")
    run.started()
    run.steps(range(steps - 10), loss=1.0, gradient_norm=1.0)
    run.steps([steps - 10], loss=5.0)
    run.steps(range(steps - 9, steps), loss=1.0)
    if ended:
        run.ended()
        run.ended(role="launcher")
    return run


def child_of(pid: int) -> psutil.Process:
    """The process of the custom rules."""
    return next(
        child
        for child in psutil.Process(pid).children()
        if any("stream_rules.custom.child" in word for word in _command(child))
    )


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # one of another test, which has ended
        return []


REASONS = {
    "raise": "ValueError: sick",
    "huge": "MemoryError",
    "sys_exit": "SystemExit",
    "segfault": "SIGSEGV",
    "loop": "0.5 s of CPU time",
    "leak": "96 MiB",
    "exit": "exit code 0",
    "sleep": "did not return within 3 s",
    "kill": "SIGKILL",
    "loop_in_snapshot": "0.5 s of CPU time",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "sick",
    [
        ["raise", "huge", "sys_exit", "segfault", "loop", "leak"],
        pytest.param(list(REASONS), marks=pytest.mark.torture),
    ],
    ids=["some", "all"],
)
def test_each_kind_of_sick_rule_is_quarantined_and_the_others_go_on(sick: list[str]) -> None:
    run = a_run()
    with customs(
        MINE, *(f"{{name: {how}, use: FILE:Sick, params: {{how: {how}}}}}" for how in sick)
    ) as c:
        c.give(run.records)
        c.settle()
        c.service.snapshots(force=True)

        why = c.failures()
        assert sorted(why) == sorted(sick)
        assert [how for how in sick if REASONS[how] not in why[how]] == []
        assert len(c.issues("rule_failed")) == len(sick)
        assert [issue.first_step for issue in c.issues("mine")] == [50]
        assert c.statuses() == {"mine": "issues_found", **dict.fromkeys(sick, "error")}
        # Rules that come with tocsin have lost nothing.
        assert c.service.committable(run.records[0].partition, 10**6) == 10**6
        child = child_of(os.getpid())
    psutil.wait_procs([child], timeout=5)
    assert not child.is_running()


def test_what_is_found_is_what_a_replay_finds() -> None:
    run = a_run()
    with customs(MINE) as c:
        c.give(run.records)
        c.settle()
        live = [told for told in c.told if told.issue.rule == "mine"]
    again = replay(run.records, [replace(spec, name="mine") for spec in only(HighLoss, limit=2.5)])

    assert [told.issue for told in live] == [told.issue for told in again]
    assert live


def test_a_rule_on_tensors_reads_each_part_of_a_model_that_ranks_share() -> None:
    run = RunBuilder(world_size=2)
    for rank in (0, 1):
        run.started(rank=rank)
    for step in (0, 10, 20):
        for rank, size in ((0, 1.0), (1, 1.0 if step < 20 else 99.0)):
            run.steps([step], rank=rank, loss=1.0)
            part = {"absmax": size}
            run.tensors(step, "weights", [f"head@pp{rank}"], rank=rank, columns=part)
            run.tensors(step, "weights", [f"skipped@pp{rank}"], rank=rank, columns={"absmax": 99.0})
    with customs("{name: mine, use: FILE:LargeRow}") as c:
        c.give(run.records)
        c.settle()
        c.service.snapshots(force=True)
        assert c.failures() == {}
        assert [(i.first_step, i.subject.name) for i in c.issues("mine")] == [(20, "head@pp1")]


def test_the_built_in_rules_do_not_wait_for_one_that_loops() -> None:
    run = RunBuilder()
    run.started()
    run.steps(range(20), loss=1.0)
    with customs("{name: bad, use: FILE:Sick, params: {how: loop}}", limits=Limits()) as c:
        c.give(run.records)
        given = len(run.records)
        run.steps([20], loss=math.nan)
        began_s = time.monotonic()
        c.give(run.records[given:])
        took_s = time.monotonic() - began_s

        assert c.issues("nonfinite")
        assert took_s < 1.0
        assert not c.service.settled()
        assert c.service.committable(run.records[0].partition, 100) < 100


def test_one_that_is_slow_is_quarantined_when_it_is_too_far_behind() -> None:
    run = a_run(40)
    with customs(MINE, "{name: slow, use: FILE:Sick, params: {how: slow, at: 0}}") as c:
        c.give(run.records)
        c.settle()

        assert "too slow" in c.failures()["slow"]
        assert [issue.first_step for issue in c.issues("mine")] == [30]


def test_a_child_that_is_killed_from_outside_loses_and_doubles_nothing() -> None:
    run = a_run(ended=False)
    half = len(run.records) // 2
    with customs(MINE) as c:
        c.give(run.records[:half])
        c.settle()
        child_of(os.getpid()).send_signal(signal.SIGKILL)
        c.give(run.records[half:])
        c.settle()

        assert c.failures() == {}
        assert [issue.reason for issue in c.issues("mine")] == ["loss 5 at step 50, the 51th"]


def test_a_disabled_rule_is_tried_again_in_the_next_training() -> None:
    first = a_run(20)
    second = RunBuilder(incarnation="made-2")
    second.now_ms = first.now_ms
    second.boot = "second"
    second.started()
    second.steps(range(5), loss=1.0)
    with customs("{name: bad, use: FILE:Sick, params: {how: exit}}") as c:
        c.give(first.records)
        c.settle()
        c.service.snapshots(force=True)
        assert c.statuses() == {"bad": "error"}
        later = [
            type(r)(r.partition, r.offset + 1000, r.append_ms, r.key, r.value, r.headers)
            for r in second.records
        ]
        c.give(later)
        c.settle()
        c.service.snapshots(force=True)

        assert c.statuses() == {"bad": "in_progress"}
        assert len(c.failures()) == 1


def test_a_file_that_goes_bad_while_it_is_used_is_said(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE.read_text())
    run = a_run(40, ended=False)
    with customs(f"{{name: mine, use: '{file}:HighLoss'}}") as c:
        c.give(run.records[:20])
        c.settle()
        file.write_text("raise RuntimeError('edited')")
        child_of(os.getpid()).kill()
        c.give(run.records[20:])
        c.settle()

        assert "RuntimeError: edited (line 1)" in c.failures()["mine"]


def test_loading_that_ends_the_process_or_does_not_end_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import os\nos._exit(7)\n")
    (tmp_path / "hangs.py").write_text("while True: pass\n")
    for name, why, load_s in (("ends", "(exit code 7)", 30.0), ("hangs", "within 2 s", 2.0)):
        given = entries(f"{{name: mine, use: '{tmp_path}/{name}.py:Mine'}}")
        loaded = load_apart(given, folder=tmp_path, limits=Limits(load_s=load_s))

        assert [problem.code for problem in loaded.problems] == ["rule_not_loaded"]
        assert why in loaded.problems[0].message
        assert loaded.problems[0].loc == ("rules", 0, "use")


def test_a_timer_comes_when_it_is_due() -> None:
    run = a_run(20, ended=False)
    with customs(MINE) as c:
        c.give(run.records)
        c.settle()
        due = c.service.next_due_ms()

        # Each run has a time at which nothing was heard of it for too long.
        assert due is not None
        assert c.host.due_ms() is not None
        number = run.records[0].partition.number
        later = due + 200_000
        caught_up = {number: CaughtUp(later, later - 100_000)}
        c.service.apply([], Tick(later, frozenset([number]), caught_up))
        c.settle()
        assert (c.host.due_ms() or 0) > later


HOSTS = """
from support.rules.custom import Customs
from support.waiting import wait_until
from tocsin.stream_rules.custom.call_limits import Limits
from tocsin.stream_rules.testing import RunBuilder
limits = Limits(call_cpu_s=100, call_s=100)
c = Customs("{name: bad, use: FILE:Sick, params: {how: loop}}", limits=limits)
run = RunBuilder()
run.started()
run.steps(range(20), loss=1.0)
c.give(run.records)
wait_until(lambda: c.host._backlog.under_way)
print("looping", flush=True)
input()
"""


def test_the_child_ends_with_the_worker_though_a_rule_loops_and_has_nothing_of_it() -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", HOSTS],
        env={**os.environ, "PYTHONPATH": str(FILE.parents[2])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "looping\n"
        child = child_of(worker.pid)
        assert child.nice() >= 10
        assert os.getsid(child.pid) == child.pid
        # Its standard streams, the socket, the page (which is mapped), and its memory figures.
        assert child.num_fds() <= 8
        worker.kill()
    gone, _ = psutil.wait_procs([child], timeout=10)
    assert gone == [child]


@pytest.mark.torture
def test_a_state_that_ends_the_process_is_not_read_again() -> None:
    run = a_run(40, ended=False)
    with customs(MINE, "{name: bad, use: FILE:Sick, params: {how: exit_in_restore}}") as c:
        c.give(run.records[:20])
        c.settle()
        c.service.snapshots(force=True)
        child_of(os.getpid()).kill()
        c.give(run.records[20:])
        c.settle()

        assert "exit code 3" in c.failures()["bad"]
        assert [issue.first_step for issue in c.issues("mine")] == [30]
