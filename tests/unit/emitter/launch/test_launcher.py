"""The launcher with real processes: exit codes, signals, orphans, terminal, helper."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pexpect
import psutil
import pytest

from support.processes.launches import SCRIPTS, Launched, command_line, environment, start
from support.records.stops import StopSigner, outgoing
from support.trainings.captured import said
from support.waiting import wait_until
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.emitter.checkpoints.health import health
from tocsin.emitter.stop.verification import SignedCommand
from tocsin.schemas.records.frames import SystemFrame
from tocsin.schemas.records.runs import RunEnded, RunStarted

PYTHON = sys.executable


def publish(folder: Path, *signed: SignedCommand) -> None:
    async def go() -> None:
        async with EmbeddedBus(folder / "bus.db") as bus:
            producer = await bus.producer()
            await producer.publish([outgoing(each, "r1") for each in signed])
            await producer.close()

    asyncio.run(go())


def pid_in(path: Path) -> int:
    wait_until(lambda: path.exists() and path.read_text().strip())
    return int(path.read_text())


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(
    ("command", "code", "outcome"),
    [
        (["true"], 0, "completed"),
        (["sh", "-c", "exit 3"], 3, "failed"),
        (["sh", "-c", "kill -KILL $$"], 137, "failed"),
        (["sh", "-c", "kill -TERM $$"], 143, "interrupted"),
        (["/etc/passwd"], 126, "failed"),
    ],
)
def test_the_exit_code_is_the_jobs(
    tmp_path: Path, command: list[str], code: int, outcome: str
) -> None:
    job = start(tmp_path, *command)
    assert job.wait() == code
    summary = job.summary()
    assert (summary["exit_code"], summary["outcome"]) == (code, outcome)
    (ended,) = job.observed("tocsin.run.ended")
    assert (ended["role"], ended["exit_code"]) == ("launcher", code)
    # Of a command that was not started there is one line, why.
    assert ("no training seen, 0 issues" in job.err) == (code != 126)


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("pyhton", "pyhton: not found on PATH: expected a program, or a path like ./it"),
        ("./train", "./train: not found"),
    ],
)
def test_a_mistyped_command_is_no_run(tmp_path: Path, command: str, line: str) -> None:
    job = start(tmp_path, command, "train.py")
    assert job.wait() == 127
    assert job.err == f"tocsin: {line}\n"
    assert (job.summary()["exit_code"], job.summary()["outcome"]) == (127, "failed")
    assert not (tmp_path / "bus.db").exists()


def test_stdin_stdout_and_stderr_are_the_jobs(tmp_path: Path) -> None:
    job = start(tmp_path, "sh", "-c", "read x; echo got $x; echo err >&2", stdin=subprocess.PIPE)
    assert job.process.stdin is not None
    job.process.stdin.write("hello\n")
    job.process.stdin.flush()
    assert job.wait() == 0
    assert job.out == "got hello\n"
    assert [line for line in job.err.splitlines() if not line.startswith("tocsin: ")] == ["err"]


def test_descriptors_of_the_shell_are_the_jobs_too(tmp_path: Path) -> None:
    line = shlex.join(command_line(tmp_path, "cat"))
    done = subprocess.run(
        ["bash", "-c", f"{line} <(echo of the shell) 2> err"],
        env=environment(tmp_path), cwd=tmp_path, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "of the shell\n")


def test_quiet_says_nothing(tmp_path: Path) -> None:
    job = start(tmp_path, "true", quiet="yes")
    assert job.wait() == 0
    assert job.err == ""


def test_a_bus_that_cannot_be_opened_costs_a_line_not_the_job(tmp_path: Path) -> None:
    job = start(tmp_path, "sh", "-c", "echo ran; exit 5", bus="embedded:/proc/none/bus.db")
    assert job.wait() == 5
    assert job.out == "ran\n"
    assert "NOT WATCHING" in job.err
    assert job.summary()["outcome"] == "failed"


def test_a_required_bus_that_cannot_be_opened_starts_nothing(tmp_path: Path) -> None:
    job = start(tmp_path, "touch", "ran", bus="embedded:/proc/none/bus.db", require_bus="yes")
    assert job.wait() == 2
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_signals_are_passed_on(tmp_path: Path, number: signal.Signals) -> None:
    script = f"trap 'echo seen; exit 9' {number.value}; echo ready; while :; do sleep 0.05; done"
    job = start(tmp_path, "sh", "-c", script)
    assert job.process.stdout is not None
    assert job.process.stdout.readline() == "ready\n"
    job.signal(number)
    assert job.wait() == 9
    assert job.out == "seen\n"


def test_a_job_that_dies_of_a_passed_on_signal_was_interrupted(tmp_path: Path) -> None:
    job = start(tmp_path, "sh", "-c", "echo ready; exec sleep 60")
    assert job.process.stdout is not None
    job.process.stdout.readline()
    job.signal(signal.SIGTERM)
    assert job.wait() == 143
    assert job.summary()["outcome"] == "interrupted"


def test_an_ignored_signal_stays_ignored_in_the_job(tmp_path: Path) -> None:
    line = " ".join([*command_line(tmp_path), "sh", "-c", "'kill -HUP $$; echo alive'"])
    done = subprocess.run(
        ["sh", "-c", f"trap '' HUP; {line}"],
        env=environment(tmp_path), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "alive\n")


def test_what_the_job_leaves_in_its_group_is_ended(tmp_path: Path) -> None:
    job = start(tmp_path, "sh", "-c", "sleep 300 & echo $! > left; exit 0")
    assert job.wait() == 0
    assert gone(pid_in(tmp_path / "left"))


def test_an_orphan_outside_the_group_is_ended_with_an_interrupted_job(tmp_path: Path) -> None:
    script = "setsid sh -c 'echo $$ > left; exec sleep 300' & echo ready; wait"
    job = start(tmp_path, "sh", "-c", script)
    pid = pid_in(tmp_path / "left")
    job.signal(signal.SIGTERM)
    assert job.wait() == 143
    assert gone(pid)


def test_an_orphan_is_ended_too_where_the_signal_did_not_come_through_us(tmp_path: Path) -> None:
    # As Ctrl-C does: the terminal sends it to the job's group alone.
    script = "setsid sh -c 'echo $$ > left; exec sleep 300' & while [ ! -s left ]; do :; done"
    job = start(tmp_path, "sh", "-c", f"{script}; kill -INT $$; sleep 60")
    assert job.wait() == 130
    assert job.summary()["outcome"] == "interrupted"
    assert gone(pid_in(tmp_path / "left"))


SAVES_ON_TERM = (
    "import pathlib, signal, sys, time\n"
    "def save(*_):\n"
    "    pathlib.Path('asked').touch()\n"
    "    time.sleep(float(sys.argv[1]))\n"
    "    pathlib.Path('saved').touch()\n"
    "    sys.exit()\n"
    "signal.signal(signal.SIGTERM, save)\n"
    "pathlib.Path('ready').touch()\n"
    "time.sleep(300)\n"
)


@pytest.mark.slow
def test_below_a_shell_a_training_has_time_to_save(tmp_path: Path) -> None:
    (tmp_path / "saves.py").write_text(SAVES_ON_TERM)
    job = start(tmp_path, "sh", "-c", f"{PYTHON} saves.py 7; true")
    wait_until((tmp_path / "ready").exists)
    job.signal(signal.SIGTERM)
    assert job.wait() == 143
    assert (tmp_path / "saved").exists()


@pytest.mark.slow
def test_a_second_signal_leaves_less_time_to_save(tmp_path: Path) -> None:
    (tmp_path / "saves.py").write_text(SAVES_ON_TERM)
    job = start(tmp_path, "sh", "-c", f"{PYTHON} saves.py 20; true")
    wait_until((tmp_path / "ready").exists)
    job.signal(signal.SIGTERM)
    wait_until((tmp_path / "asked").exists)
    job.signal(signal.SIGTERM)
    assert job.wait() == 143
    assert not (tmp_path / "saved").exists()


def test_a_signal_before_the_job_is_started_starts_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        job = start(tmp_path, "touch", "ran", bus=f"kafka://127.0.0.1:{port}")
        silent.settimeout(60)
        silent.accept()[0].close()
        job.signal(signal.SIGTERM)
        assert job.wait() == 143
    assert not (tmp_path / "ran").exists()
    summary = job.summary()
    assert (summary["outcome"], summary["exit_code"]) == ("interrupted", 143)


def test_the_runtime_folder_is_private_and_taken_away(tmp_path: Path) -> None:
    job = start(tmp_path, "sh", "-c", 'stat -c "%a %n" "$TOCSIN_RUNTIME_DIR"; echo $TOCSIN_BUS')
    assert job.wait() == 0
    found = re.fullmatch(r"700 (\S+)\nembedded:(/.*)\n", job.out)
    assert found is not None
    assert not Path(found[1]).exists()
    assert Path(found[2]) == tmp_path / "bus.db"


def test_a_killed_launcher_leaves_the_job_running(tmp_path: Path) -> None:
    job = start(tmp_path, "sh", "-c", "echo $$ > pid; sleep 0.5; echo done > end")
    pid = pid_in(tmp_path / "pid")
    job.signal(signal.SIGKILL)
    assert job.wait() == -9
    wait_until((tmp_path / "end").exists)
    wait_until(lambda: gone(pid))


# Samples of the node


def test_without_a_helper_the_launcher_samples_the_node_and_the_job(tmp_path: Path) -> None:
    job = start(tmp_path, "sh", "-c", "sleep 1.3")
    assert job.wait() == 0
    told = said(tmp_path)
    frame = told.samples[-1]
    assert frame.origin.incarnation == job.incarnation()
    assert {"memory.used_bytes", "cpu.percent"} <= set(frame.columns)
    of_the_job = [each for each in told.samples if "memory.process_tree_bytes" in each.columns]
    column = of_the_job[0].columns.index("memory.process_tree_bytes")
    assert of_the_job[0].values[:, column].max() > 0
    # What was sampled last, of less than a whole frame, stands before the end of the run.
    kinds = [meta.type for meta in told.metas]
    last_sample = max(i for i, kind in enumerate(kinds) if kind == SystemFrame.type)
    assert last_sample < kinds.index("tocsin.run.ended")


def test_with_a_helper_the_launcher_leaves_the_samples_to_it(tmp_path: Path) -> None:
    job = start(tmp_path, "sh", "-c", "sleep 0.7", helper=helper_option(tmp_path))
    assert job.wait() == 0
    assert said(tmp_path).samples == []


# Stops of a job without a training


def started(
    tmp_path: Path, signer: StopSigner, script: str, *, stop: str = "on", drain_s: str = "0.2"
) -> Launched:
    command = ("sh", "-c", f"echo ready; {script}")
    job = start(tmp_path, *command, signer=signer, stop=stop, drain_s=drain_s)
    assert job.process.stdout is not None
    job.process.stdout.readline()
    return job


def test_a_job_without_a_training_is_terminated_and_confirmed(tmp_path: Path) -> None:
    signer = StopSigner()
    job = started(tmp_path, signer, "exec sleep 300")
    command = signer.command("r1", job.incarnation())
    publish(tmp_path, signer.sign(command))
    assert job.wait() == 79
    summary = job.summary()
    assert (summary["outcome"], summary["exit_code"]) == ("stopped", 79)
    assert summary["stop"]["how"] == "SIGTERM"
    assert summary["stop"]["exit_code"] == 143
    assert job.observed("tocsin.stop.acknowledged")[0]["command_id"] == command.command_id
    (exited,) = job.observed("tocsin.stop.exited")
    assert (exited["how"], exited["exit_code"]) == ("SIGTERM", 143)
    assert "stopping the job: a test says so" in job.err


def test_a_job_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    signer = StopSigner()
    job = started(tmp_path, signer, "trap '' TERM; while :; do sleep 0.05; done")
    publish(tmp_path, signer.sign(signer.command("r1", job.incarnation(), grace_s=0.3)))
    assert job.wait() == 79
    how = [each["how"] for each in job.observed("tocsin.stop.escalated")]
    assert how == ["SIGTERM", "SIGKILL"]
    assert job.summary()["stop"]["how"] == "SIGKILL"


def test_a_stop_reaches_children_outside_the_group(tmp_path: Path) -> None:
    signer = StopSigner()
    script = "setsid sh -c 'trap \"\" TERM; echo $$ > left; while :; do sleep 0.05; done' & wait"
    job = started(tmp_path, signer, script)
    pid = pid_in(tmp_path / "left")
    publish(tmp_path, signer.sign(signer.command("r1", job.incarnation(), grace_s=0.3)))
    assert job.wait() == 79
    assert gone(pid)


def test_bad_commands_stop_nothing_and_are_answered(tmp_path: Path) -> None:
    signer, stranger = StopSigner(), StopSigner()
    job = started(tmp_path, signer, "while [ ! -e go ]; do sleep 0.05; done; exit 4")
    incarnation = job.incarnation()
    good = signer.sign(signer.command("r1", incarnation))
    publish(
        tmp_path,
        SignedCommand(good.key, good.value, None),
        SignedCommand(good.key, good.value.replace(b"20.0", b"0.0"), good.signature),
        stranger.sign(signer.command("r1", incarnation)),
        signer.sign(signer.command("r1", "an-earlier-one")),
        signer.sign(signer.command("r1", incarnation, not_after_ms=1)),
    )
    wait_until(lambda: job.observed("tocsin.stop.expired"))
    (tmp_path / "go").touch()
    assert job.wait() == 4
    assert [each["why"] for each in job.observed("tocsin.stop.refused")] == [
        "bad_signature", "bad_signature", "untrusted_key", "other_incarnation",
    ]  # fmt: skip
    assert len(job.observed("tocsin.stop.expired")) == 1
    assert job.summary()["stop"] is None


def test_no_stop_refuses_and_says_so(tmp_path: Path) -> None:
    signer = StopSigner()
    job = started(tmp_path, signer, "while [ ! -e go ]; do sleep 0.05; done", stop="off")
    publish(tmp_path, signer.sign(signer.command("r1", job.incarnation())))
    wait_until(lambda: job.observed("tocsin.stop.refused"))
    (tmp_path / "go").touch()
    assert job.wait() == 0
    assert job.observed("tocsin.stop.refused")[0]["why"] == "stops_off"
    assert job.observed("tocsin.run.started")[0]["stop"] == "off"


def test_a_command_that_comes_after_the_end_is_answered_so(tmp_path: Path) -> None:
    signer = StopSigner()
    job = started(tmp_path, signer, "exit 6", drain_s="20")
    wait_until(lambda: job.observed("tocsin.run.ended"))
    publish(tmp_path, signer.sign(signer.command("r1", job.incarnation())))
    wait_until(lambda: job.observed("tocsin.stop.exited"))
    job.signal(signal.SIGTERM)
    assert job.wait() == 6
    (exited,) = job.observed("tocsin.stop.exited")
    assert (exited["how"], exited["exit_code"]) == ("itself", 6)


# The helper

HELPER = """
import os, sys
sys.stdout = open(os.path.dirname(__file__) + "/told.log", "a")
print("up", os.getpid(), os.nice(0), os.getsid(0) == os.getpid(), flush=True)
for line in sys.stdin:
    print(line.strip(), flush=True)
    if line.startswith("drain"):
        sys.exit(0)
print("launcher gone", flush=True)
"""


def helper_option(tmp_path: Path, text: str = HELPER) -> str:
    (tmp_path / "helper.py").write_text(text)
    return f"{PYTHON} {tmp_path / 'helper.py'}"


def log_of(tmp_path: Path) -> list[str]:
    path = tmp_path / "told.log"
    return path.read_text().splitlines() if path.exists() else []


def test_the_helper_is_niced_apart_and_told_to_drain(tmp_path: Path) -> None:
    job = start(
        tmp_path, "sh", "-c", "echo $$ > pid; sleep 1",
        helper=helper_option(tmp_path), drain_s="5",
    )  # fmt: skip
    assert job.wait() == 0
    up, told, drain = log_of(tmp_path)
    assert re.fullmatch(r"up \d+ 3 True", up)
    assert told == f"job {(tmp_path / 'pid').read_text().strip()}"
    assert 4 < float(drain.removeprefix("drain ")) <= 5
    assert not (tmp_path / "helper.log").exists(), "the log of one that ended well is removed"


def test_a_helper_that_dies_is_started_again_and_told_again(tmp_path: Path) -> None:
    job = start(
        tmp_path, "sh", "-c", "echo ready; while [ ! -e go ]; do sleep 0.05; done",
        helper=helper_option(tmp_path), drain_s="5",
    )  # fmt: skip
    wait_until(lambda: len(log_of(tmp_path)) == 2)
    os.kill(int(log_of(tmp_path)[0].split()[1]), signal.SIGKILL)
    wait_until(lambda: len(log_of(tmp_path)) == 4)
    first, second = log_of(tmp_path)[1], log_of(tmp_path)[3]
    assert first == second
    assert first.startswith("job ")
    (tmp_path / "go").touch()
    assert job.wait() == 0
    assert "restarting it" in job.err


def test_a_run_that_nobody_judges_is_not_called_watched(tmp_path: Path) -> None:
    helper = f"{PYTHON} -c 'raise SystemExit(1)'"
    job = start(tmp_path, "sleep", "2", helper=helper, judged_within_s="0.3", quiet="yes")
    assert job.wait() == 0
    assert job.err.count("RULES NOT RUNNING: this run's rules have not reported") == 1
    assert str(tmp_path / "helper.log") in job.err


def test_the_helper_ends_with_a_killed_launcher(tmp_path: Path) -> None:
    job = start(tmp_path, "sh", "-c", "sleep 2", helper=helper_option(tmp_path))
    wait_until(lambda: len(log_of(tmp_path)) == 2)
    job.signal(signal.SIGKILL)
    job.wait()
    wait_until(lambda: log_of(tmp_path)[-1] == "launcher gone")


def test_a_helper_that_cannot_drain_in_time_is_let_go(tmp_path: Path) -> None:
    stuck = helper_option(tmp_path, "import time\nprint('up', flush=True)\ntime.sleep(300)\n")
    began = time.monotonic()
    job = start(tmp_path, "true", helper=stuck, drain_s="0.5")
    assert job.wait() == 0
    assert time.monotonic() - began < 60
    assert "within 0.5 s" in job.err


def test_a_second_signal_cuts_the_drain_short(tmp_path: Path) -> None:
    job = start(tmp_path, "true", drain_s="60")
    wait_until(lambda: job.observed("tocsin.run.ended"))
    job.signal(signal.SIGINT)
    assert job.wait(40) == 0


# The terminal


def test_the_job_reads_the_terminal(tmp_path: Path) -> None:
    child = terminal(tmp_path, "sh", "-c", "echo ready; read x; echo got $x; read y; echo and $y")
    child.expect("ready")
    child.sendline("one")
    child.expect("got one")
    child.sendline("two")
    child.expect("and two")
    assert exit_of(child) == 0


def test_ctrl_c_reaches_the_job_once(tmp_path: Path) -> None:
    script = (
        "import signal, sys, time\n"
        "seen = []\n"
        "signal.signal(signal.SIGINT, lambda *_: seen.append(1))\n"
        "print('ready', flush=True)\n"
        "while not seen: time.sleep(0.01)\n"
        "time.sleep(0.5)\n"
        "print('seen', len(seen), flush=True)\n"
        "sys.exit(7)\n"
    )
    child = terminal(tmp_path, PYTHON, "-c", script)
    child.expect("ready")
    child.sendintr()
    child.expect("seen 1")
    assert exit_of(child) == 7


def test_ctrl_c_ends_a_python_as_usual(tmp_path: Path) -> None:
    child = terminal(
        tmp_path, PYTHON, "-c", "import time; print('ready', flush=True); time.sleep(60)"
    )
    child.expect("ready")
    child.sendintr()
    child.expect("KeyboardInterrupt")
    assert exit_of(child) is None
    assert child.signalstatus == signal.SIGINT
    assert json.loads((tmp_path / "summary.json").read_text())["exit_code"] == 130


SCRIPT = ("-c",)
INTERACTIVE = ("--norc", "-i", "-c")


@pytest.mark.parametrize("shell", [INTERACTIVE, pytest.param(SCRIPT, marks=pytest.mark.torture)])
def test_ctrl_c_ends_a_loop_of_the_shell(tmp_path: Path, shell: tuple[str, ...]) -> None:
    sleeper = "import time; print('ready', flush=True); time.sleep(60)"
    line = shlex.join(command_line(tmp_path, PYTHON, "-c", sleeper))
    loop = f"for i in 1 2; do {line}; echo after $i; done; echo went on"
    child = in_shell(tmp_path, loop, shell)
    child.expect("ready")
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    assert "no training seen" in (child.before or "")
    assert "after" not in (child.before or "")
    assert "went on" not in (child.before or "")


@pytest.mark.slow
def test_ctrl_c_in_a_training_keeps_its_last_records(tmp_path: Path) -> None:
    script = (
        "import time, torch\n"
        "model = torch.nn.Linear(4, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for step in range(100_000):\n"
        "    model(torch.ones(3, 4)).pow(2).mean().backward()\n"
        "    optimizer.step()\n"
        "    print('step', step, flush=True)\n"
        "    time.sleep(0.05)\n"
    )
    (tmp_path / "trains.py").write_text(script)
    child = terminal(tmp_path, PYTHON, "trains.py")
    child.expect("step 5\r")
    child.sendintr()
    child.expect("KeyboardInterrupt")
    exit_of(child)
    assert child.signalstatus == signal.SIGINT
    told = said(tmp_path)
    (trainer,) = [each for each in told.of(RunEnded) if each.role == "trainer"]
    (launcher,) = [each for each in told.of(RunEnded) if each.role == "launcher"]
    assert (trainer.outcome, launcher.outcome) == ("interrupted", "interrupted")
    assert trainer.last_step is not None
    assert sorted(told.steps()) == list(range(trainer.last_step + 1))


def test_a_debugger_works_at_the_terminal(tmp_path: Path) -> None:
    script = "x = 41\nbreakpoint()\nprint('after', x)\n"
    (tmp_path / "debugged.py").write_text(script)
    child = terminal(tmp_path, PYTHON, "debugged.py")
    child.expect_exact("(Pdb)")
    child.sendline("x = x + 1")
    child.expect_exact("(Pdb)")
    child.sendline("p x")
    child.expect("42")
    child.expect_exact("(Pdb)")
    child.sendline("continue")
    child.expect("after 42")
    assert exit_of(child) == 0


def test_ctrl_z_suspends_and_fg_goes_on(tmp_path: Path) -> None:
    shell = prompting(tmp_path)
    line = " ".join(command_line(tmp_path, "sh", "-c"))
    # What the job prints is not in the line, which the shell shows, too, wrapped somewhere.
    shell.sendline(f"{line} 'printf %s%s\\n re ady; read x; echo got $x'")
    shell.expect("ready")
    shell.sendcontrol("z")
    shell.expect("Stopped")
    shell.sendline("echo shell is back")
    shell.expect("shell is back\r")
    shell.sendline("fg")
    shell.expect("support.processes.launching")
    shell.sendline("word")
    shell.expect("got word")
    shell.expect("no training seen")
    shell.sendline("stty -a | head -1; echo still here")
    shell.expect("still here")
    shell.sendline("exit")
    shell.expect(pexpect.EOF)
    shell.close()


def test_a_ctrl_z_while_the_terminal_is_being_lent_stands(tmp_path: Path) -> None:
    slowly = (
        "import sys, time; from support.processes.launching import main; "
        "from tocsin.emitter.launch.terminal import Terminal; lend = Terminal._set; "
        "Terminal._set = lambda *given: (lend(*given), time.sleep(2)); "
        "sys.exit(main(sys.argv[1:]))"
    )
    job = ["sh", "-c", "printf '%s%s\\n' re ady; read x; echo got $x"]
    line = shlex.join([sys.executable, "-c", slowly, str(tmp_path), "--", *job])
    shell = prompting(tmp_path)
    shell.sendline(line)
    shell.expect("ready")
    shell.sendcontrol("z")
    shell.expect("Stopped")
    shell.sendline("fg")
    shell.expect("import sys, time")
    shell.sendline("word")
    shell.expect("got word")
    shell.expect("no training seen")
    shell.sendline("exit")
    shell.expect(pexpect.EOF)
    shell.close()


def test_a_job_in_the_background_is_not_in_the_way(tmp_path: Path) -> None:
    shell = prompting(tmp_path)
    line = " ".join(command_line(tmp_path, "sh", "-c"))
    shell.sendline(f"{line} 'sleep 1; echo job said' &")
    shell.sendline("read x; echo shell got $x")
    shell.sendline("mine")
    shell.expect("shell got mine")
    shell.expect("job said")
    shell.expect("no training seen")
    shell.sendline("exit")
    shell.expect(pexpect.EOF)
    shell.close()


def test_a_pager_beside_the_job_reads_the_terminal(tmp_path: Path) -> None:
    line = shlex.join(command_line(tmp_path, "sh", "-c", "echo ready; sleep 2; echo more"))
    pages = "read first; echo first $first; read key < /dev/tty; echo key $key; cat"
    pager = shlex.join(["sh", "-c", pages])
    child = in_shell(tmp_path, f"{line} | {pager}; echo over $?")
    child.expect("first ready")
    child.sendline("space")
    child.expect("key space")
    child.expect("more")
    child.expect("over 0")
    child.close()


def test_a_job_in_a_pipe_gets_the_terminal_once_it_reads_it(tmp_path: Path) -> None:
    script = "echo ready >&2; read x; echo got $x"
    line = shlex.join(command_line(tmp_path, "sh", "-c", script))
    child = in_shell(tmp_path, f"{line} | cat; echo over $?")
    child.expect("ready")
    child.sendline("word")
    child.expect("got word")
    child.expect("over 0")
    child.close()


def test_ctrl_c_ends_a_script_whose_output_goes_elsewhere(tmp_path: Path) -> None:
    sleeper = "import sys, time; print('ready', file=sys.stderr, flush=True); time.sleep(60)"
    line = shlex.join(command_line(tmp_path, PYTHON, "-c", sleeper))
    child = in_shell(tmp_path, f"for i in 1 2; do {line} > out; echo after $i; done", SCRIPT)
    child.expect("ready")
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    assert "after" not in (child.before or "")


def prompting(tmp_path: Path) -> pexpect.spawn[str]:
    """A shell at its prompt."""
    shell = pexpect.spawn(
        "bash", ["--norc", "-i"], env={**environment(tmp_path), "PS1": "$ "}, cwd=str(tmp_path),
        timeout=30, encoding="utf-8", echo=False,
    )  # fmt: skip
    shell.expect_exact("$ ")
    return shell


def in_shell(tmp_path: Path, line: str, options: Sequence[str] = INTERACTIVE) -> pexpect.spawn[str]:
    return pexpect.spawn(
        "bash", [*options, line], env=environment(tmp_path), cwd=str(tmp_path),
        timeout=60, encoding="utf-8", echo=False,
    )  # fmt: skip


def terminal(tmp_path: Path, *command: str) -> pexpect.spawn[str]:
    words = command_line(tmp_path, *command)
    return pexpect.spawn(
        words[0], words[1:], env=environment(tmp_path), cwd=str(tmp_path), timeout=120,
        encoding="utf-8", echo=False,
    )  # fmt: skip


def exit_of(child: pexpect.spawn[str]) -> int | None:
    child.expect(pexpect.EOF)
    child.close()
    return child.exitstatus


@pytest.mark.slow
def test_what_the_job_saves_is_read_beside_it(tmp_path: Path) -> None:
    job = start(tmp_path, PYTHON, str(SCRIPTS / "save_spoiled.py"), str(tmp_path))

    assert job.wait() == 0

    read = {
        Path(r["checkpoint"]["path"]).name: r for r in job.observed("tocsin.run.checkpoint_read")
    }
    assert set(read) == {"good-1.pt", "bad-3.pt", "torn-4.pt", "last-5.pt"}
    assert read["bad-3.pt"]["nonfinite"] == ["weight"]
    assert read["bad-3.pt"]["checkpoint"]["step"] == 3
    assert "cut off" in read["torn-4.pt"]["torn"]
    assert [read[name]["nonfinite_tensors"] for name in ("good-1.pt", "last-5.pt")] == [0, 0]
    assert read["last-5.pt"]["tensors"] == 2


@pytest.mark.slow
def test_a_stop_waits_for_a_save_that_takes_longer_than_its_grace(tmp_path: Path) -> None:
    signer = StopSigner()
    job = start(tmp_path, PYTHON, str(SCRIPTS / "slow_save.py"), str(tmp_path), signer=signer)
    wait_until(lambda: (tmp_path / "saving").exists())
    (started,) = [e for e in job.observed("tocsin.run.started") if e["role"] == "launcher"]
    trainer = [e for e in said(tmp_path).of(RunStarted) if e.role == "trainer"]
    incarnation = trainer[0].incarnation if trainer else started["incarnation"]

    publish(tmp_path, signer.sign(signer.command("r1", incarnation, grace_s=1.8)))

    assert job.wait() == 79
    # On a busy machine the process may get a signal at its exit, after its loop.
    late = [e["reason"] for e in job.observed("tocsin.stop.escalated")]
    assert [reason for reason in late if not reason.endswith("though its ranks left")] == []
    assert is_whole(tmp_path / "step-3.pt")


def is_whole(path: Path) -> bool:
    """Whether the whole checkpoint is there."""
    found = health(path)
    return not found.torn and found.tensors == 2
