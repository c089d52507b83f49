"""Jobs of all kinds under `tocsin run`: each ends as its user expects."""

from __future__ import annotations

import re
import signal
import sys

import psutil
import pytest

from support.processes.site import SCRIPTS, Site
from support.waiting import wait_until

PYTHON = sys.executable


def script(name: str) -> str:
    """The path of one of the scripts."""
    return str(SCRIPTS / name)


@pytest.mark.torture  # in CI: one run twice, in test_must_hold
def test_a_shell_script_that_trains_twice_is_two_incarnations(embedded_site: Site) -> None:
    finished = embedded_site.run(
        "sh", script("twice.sh"), environ={"PYTHON": PYTHON}, run_id="twice"
    )
    assert finished.exit_code == 0, finished
    assert finished.stdout.count("weights sha256") == 1
    assert "pkgtrain done after 20 steps" in finished.stdout
    assert finished.summary["steps"] == 50, finished


def test_a_program_that_is_not_python(embedded_site: Site) -> None:
    finished = embedded_site.run("sh", script("not_python.sh"), "a", "b")
    assert finished.exit_code == 4
    assert finished.stdout == "not python: a b\n"
    assert finished.summary["outcome"] == "failed"
    assert finished.summary["steps"] == 0


def test_what_outlasts_a_job_is_ended_and_what_it_detached_is_not(embedded_site: Site) -> None:
    detached_job = "setsid sh -c 'echo $$; exec sleep 51 >/dev/null 2>&1'"
    left = f"(trap '' TERM; exec sleep 50) & {detached_job} & sleep 1; exit 3"
    finished = embedded_site.run("bash", "-c", left, run_id="left")
    assert finished.exit_code == 3
    assert "the helper exited" not in finished.stderr, finished
    assert "did not finish reading" not in finished.stderr, finished
    detached = psutil.Process(int(finished.stdout))
    assert detached.cmdline() == ["sleep", "51"]
    detached.kill()


def test_a_job_without_torch(embedded_site: Site) -> None:
    finished = embedded_site.run(PYTHON, script("no_torch.py"))
    assert finished.exit_code == 0, finished
    assert finished.summary["outcome"] == "completed"
    assert finished.issues == []


@pytest.mark.torture  # in CI: an exception, in test_must_hold; sys.exit(3), in test_capture_hook
@pytest.mark.parametrize(("name", "code"), [("exit_three.py", 3), ("raises.py", 1)])
def test_its_own_exit_code_is_kept(embedded_site: Site, name: str, code: int) -> None:
    finished = embedded_site.run(PYTHON, script(name))
    assert finished.exit_code == code, finished
    assert finished.summary["outcome"] == "failed"
    assert finished.summary["exit_code"] == code
    assert finished.summary["steps"] > 0, "the last records were lost"


def test_sigterm_is_passed_on_and_nothing_is_left_behind(embedded_site: Site) -> None:
    running = embedded_site.start(PYTHON, "-u", script("long_loop.py"), run_id="sigterm")
    wait_until(lambda: "step 0" in running.stdout, timeout_s=60, what="the job trains")
    family = psutil.Process(running.process.pid).children(recursive=True)
    running.process.send_signal(signal.SIGTERM)
    finished = running.finish(30)
    assert finished.exit_code == 128 + signal.SIGTERM, finished
    assert finished.summary["outcome"] == "interrupted", finished
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []


@pytest.mark.torture
def test_a_job_that_handles_sigterm_leaves_in_its_own_way(embedded_site: Site) -> None:
    running = embedded_site.start(
        PYTHON, "-u", script("long_loop.py"), "--on-term", "7", run_id="on-term"
    )
    wait_until(lambda: "step 0" in running.stdout, timeout_s=60, what="the job trains")
    running.process.send_signal(signal.SIGTERM)
    finished = running.finish(30)
    assert finished.exit_code == 7, finished
    assert "SIGTERM seen" in finished.stdout


@pytest.mark.torture  # forked loaders are in test_capture_harmless too
def test_forked_data_loader_workers_send_nothing_and_leave(embedded_site: Site) -> None:
    finished = embedded_site.run(PYTHON, script("workers.py"))
    assert finished.exit_code == 0, finished
    assert finished.summary["steps"] == 20, finished
    pids = re.findall(r"\d+", finished.stdout.partition("worker pids")[2])
    assert len(pids) == 4, finished  # two epochs with two workers each
    for pid in pids:
        assert not psutil.pid_exists(int(pid))
