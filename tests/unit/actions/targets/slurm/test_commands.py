"""Slurm by its commands: programs that answer as the real ones did, and note how they were run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.actions.target_jobs import target_job
from tocsin.actions.receivers.address_guard import AddressGuard
from tocsin.actions.targets.kind import JobSeen, StopAsked, TargetContext, TargetJob
from tocsin.actions.targets.slurm.commands import Commands
from tocsin.actions.targets.slurm.config import SlurmTarget
from tocsin.actions.targets.slurm.kind import Slurm, SlurmCluster
from tocsin.schemas.errors import ConfigurationError

ANSWERS = Path(__file__).parent / "answers"


def job(**names: str) -> TargetJob:
    return target_job("slurm", names, started_ms=0)


JOB = job(job="3", restarts="0", cluster="tests")
CONFIG = (ANSWERS / "scontrol-config.txt").read_text()
RUNNING = (ANSWERS / "squeue-running.txt").read_text()
KEPT_OUT = RUNNING.replace(f"{1:<40}", f"{0:<40}")

# Each call is answered by the next file of its name; the last one stays.
PROGRAM = """#!{python} -S
import json, os, sys
name = os.path.basename(sys.argv[0]) + ("-" + sys.argv[1] if "scontrol" in sys.argv[0] else "")
with open("{folder}/calls", "a") as calls:
    print(json.dumps([name, sys.argv[1:], dict(os.environ)]), file=calls)
answers = sorted(f for f in os.listdir("{folder}") if f.startswith(name + "."))
code, out, err = json.load(open("{folder}/" + answers[0]))
if len(answers) > 1:
    os.unlink("{folder}/" + answers[0])
sys.stdout.write(out)
sys.stderr.write(err)
if code is None:
    os.execvp("sleep", ["sleep", "60"])
sys.exit(code)
"""


@dataclass
class Programs:
    """A folder of programs."""

    folder: Path

    def answer(
        self, name: str, code: int | None = 0, out: str = "", err: str = "", *, nth: int = 0
    ) -> None:
        (self.folder / f"{name}.{nth}").write_text(json.dumps([code, out, err]))

    def calls(self) -> list[tuple[str, list[str], dict[str, str]]]:
        path = self.folder / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def called(self) -> list[str]:
        """What was run to change something."""
        return [
            " ".join([name.partition("-")[0], *arguments])
            for name, arguments, _ in self.calls()
            if name in ("scontrol-update", "scancel")
        ]

    def cluster(self, more: Mapping[str, str] | None = None, timeout_s: float = 30) -> SlurmCluster:
        environ = {"PATH": f"{self.folder}{os.pathsep}{os.environ['PATH']}", **(more or {})}
        return SlurmCluster(Commands("hpc", environ, timeout_s=timeout_s))


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    """A cluster with a job that runs and may be queued again."""
    made = Programs(tmp_path)
    for name in ("squeue", "scontrol", "scancel"):
        path = tmp_path / name
        path.write_text(PROGRAM.format(python=sys.executable, folder=tmp_path))
        path.chmod(0o755)
    made.answer("scontrol-show", out=CONFIG)
    made.answer("scontrol-update")
    made.answer("scancel")
    made.answer("squeue", out=RUNNING)
    return made


async def test_a_job_may_not_be_queued_again_before_it_is_cancelled(programs: Programs) -> None:
    programs.answer("squeue", out=KEPT_OUT, nth=1)
    assert await programs.cluster().stop(JOB) == StopAsked("accepted", "scancel exited with 0")
    assert programs.called() == ["scontrol update JobId=3 Requeue=0", "scancel 3"]
    # Asked again, because the answer was lost: it is forbidden already.
    assert (await programs.cluster().stop(JOB)).result == "accepted"
    assert programs.called()[2:] == ["scancel 3"]


async def test_one_that_was_queued_again_meanwhile_goes_on_as_before(programs: Programs) -> None:
    programs.answer("squeue", out=(ANSWERS / "squeue-requeued.txt").read_text(), nth=1)
    assert await programs.cluster().stop(JOB) == StopAsked(
        "refused", "PENDING, restart 1 and not 0"
    )
    assert programs.called() == [
        "scontrol update JobId=3 Requeue=0",
        "scontrol update JobId=3 Requeue=1",
    ]


async def test_one_that_stays_requeueable_is_not_cancelled(programs: Programs) -> None:
    asked = await programs.cluster().stop(JOB)
    assert asked == StopAsked("refused", "Slurm still allows a requeue of the job")
    assert programs.called() == ["scontrol update JobId=3 Requeue=0"]


async def test_what_there_is_not_is_not_touched(programs: Programs) -> None:
    other = job(job="3", restarts="1", cluster="tests")
    assert (await programs.cluster().stop(other)).result == "refused"
    elsewhere = job(job="3", restarts="0", cluster="other")
    assert await programs.cluster().inspect(elsewhere) == JobSeen(
        "unknown", "the job runs on another cluster of Slurm"
    )
    assert (await programs.cluster().stop(elsewhere)).result == "failed"
    nameless = job(job="3")
    assert await programs.cluster().inspect(nameless) == JobSeen(
        "unknown", "the run recorded no name of its Slurm cluster"
    )
    assert (await programs.cluster().stop(nameless)).result == "refused"
    programs.answer("squeue", out=RUNNING.replace("RUNNING  ", "CANCELLED"))
    assert await programs.cluster().stop(JOB) == StopAsked(
        "accepted", "there was nothing left to end: CANCELLED"
    )
    assert programs.called() == []


@pytest.mark.parametrize(
    ("private", "state"), [("none", "ended"), ("jobs,usage", "unknown"), ("usage", "ended")]
)
async def test_a_job_that_is_not_listed_has_ended_unless_it_may_be_hidden(
    programs: Programs, private: str, state: str
) -> None:
    hiding = CONFIG.replace(
        "PrivateData             = none", f"PrivateData             = {private}"
    )
    programs.answer("scontrol-show", out=hiding)
    error = "slurm_load_jobs error: Invalid job id specified\n"
    for code, err in ((1, error), (0, "")):
        programs.answer("squeue", code, err=err)
        assert (await programs.cluster().inspect(JOB)).state == state


async def test_what_a_command_prints_is_in_no_reason(programs: Programs) -> None:
    planted = "SECRET at http://planted"
    away = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    for code, err, expected in (
        (1, f"{away} {planted}", "squeue: the controller cannot be reached"),
        (3, planted, "squeue exited with 3"),
        (0, "", "squeue's output is not a job list"),
    ):
        programs.answer("squeue", code, out=planted, err=err)
        assert await programs.cluster().inspect(JOB) == JobSeen("unknown", expected)
        assert await programs.cluster().stop(JOB) == StopAsked("failed", expected)
    programs.answer("scontrol-show", 1, err=planted)
    assert await programs.cluster().inspect(JOB) == JobSeen(
        "unknown", "scontrol show config exited with 1"
    )


async def test_a_job_of_somebody_else_is_refused(programs: Programs) -> None:
    programs.answer("scontrol-update", 1, err="Invalid user id for job 13\n")
    why = "not permitted; the job's owner or an operator of Slurm may do it"
    assert await programs.cluster().stop(JOB) == StopAsked("refused", f"scontrol update: {why}")
    programs.answer("squeue", out=KEPT_OUT)
    denied = "scancel: error: Kill job error on job id 13: Access/permission denied\n"
    programs.answer("scancel", 210, err=denied)
    assert await programs.cluster().stop(JOB) == StopAsked("refused", f"scancel: {why}")


async def test_a_command_that_hangs_is_ended(programs: Programs) -> None:
    programs.answer("squeue", None)
    assert await programs.cluster(timeout_s=0.5).inspect(JOB) == JobSeen(
        "unknown", "squeue did not end in time, or could not be started"
    )


async def test_commands_see_no_secret_and_no_setting_that_changes_them(programs: Programs) -> None:
    ours = {
        "SLURM_CONF": "/etc/slurm/slurm.conf",
        "SLURM_CLUSTERS": "other",
        "SQUEUE_STATES": "PENDING",
        "SCANCEL_USER": "root",
        "SLURM_TIME_FORMAT": "relative",
        "LC_ALL": "de_DE.UTF-8",
        "AWS_SECRET_ACCESS_KEY": "x",
    }
    await programs.cluster(ours).inspect(JOB)
    assert len(programs.calls()) == 2
    for _, _, environ in programs.calls():
        assert {key: environ.get(key) for key in ours} == {
            "SLURM_CONF": "/etc/slurm/slurm.conf",
            "SLURM_CLUSTERS": None,
            "SQUEUE_STATES": None,
            "SCANCEL_USER": None,
            "SLURM_TIME_FORMAT": "%s",
            "LC_ALL": "C",
            "AWS_SECRET_ACCESS_KEY": None,
        }


def test_without_the_commands_the_target_says_what_is_missing(tmp_path: Path) -> None:
    context = TargetContext(
        secrets={}, guard=AddressGuard(private=True), folder=tmp_path, environ={"PATH": "/nowhere"}
    )
    with pytest.raises(ConfigurationError, match="target 'hpc': expected squeue on the PATH"):
        Slurm().target("hpc", SlurmTarget(type="slurm"), context)
