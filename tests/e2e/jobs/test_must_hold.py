"""What must hold before anything else, once each on real processes, in CI on each day.

Lines that other files of this folder hold, in CI too: a NaN in one gradient of the GPT on Kafka
(test_faults), the mail that outlives its helper (test_mail_kill), processes of ours that are killed
(test_kills, test_worker_crashes), a command of an earlier incarnation (test_run_commands), jobs of
all kinds (test_jobs), the plain example (test_examples), a wild learning rate (test_demo).

Runs are shared: each fixture starts its own once, and several tests look at it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.processes.children import startup_environ
from support.processes.launches import TESTS
from support.processes.site import GPT, SCRIPTS, Finished, Site, embedded_site_in
from support.servers.receiver import Receiver
from tocsin.schemas.records.stops.commands import StopLeft

pytestmark = pytest.mark.timeout(600)

PYTHON = sys.executable
CNN = str(SCRIPTS / "tiny_cnn.py")
COLLIDE = SCRIPTS / "collide"
K = 25
"""The step of each fault: the default of the script."""

WAIT_S = 240
HEALTHY = {GPT: ("-m", GPT, "--threads", "1", "--steps", "20", "--weights-hash"),
           CNN: (CNN, "--steps", "120")}  # fmt: skip


def plain(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A job without tocsin."""
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        check=False,
    )


def assert_left_alone(watched: Finished, *, steps: int, stdout: str) -> None:
    """No alarm, nothing lost, and the last line, a hash of the weights, is the same."""
    assert watched.exit_code == 0, watched
    assert "weights sha256" in stdout
    assert watched.stdout == stdout
    assert watched.issues == [], watched
    assert watched.summary["outcome"] == "completed"
    assert watched.summary["steps"] == steps
    assert watched.summary["stop"] is None
    assert watched.summary["capture"]["dropped"] == 0, watched
    assert f"{steps} steps watched" in watched.stderr


# -- one folder: a corrupt batch, twice in one allocation, and a healthy run beside it


@dataclass(frozen=True)
class OneFolder:
    """The runs in it: two at once, then one of them again, quietly."""

    site: Site
    first: Finished
    beside: Finished
    again: Finished


@pytest.fixture(scope="module")
def one_folder(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> OneFolder:
    site = embedded_site_in(tmp_path_factory.mktemp("one-folder"), receiver)
    # An allocation of a scheduler gives each launch in it the same run id and the same job id.
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    corrupt = (PYTHON, CNN, "--fault", "nan_batch")
    bad = site.start(*corrupt, environ=slurm)
    good = site.start(PYTHON, *HEALTHY[GPT], run_id="beside")
    first = bad.finish(WAIT_S)
    options = ["--quiet", "--label", "a=b"]
    again = site.run(*corrupt, environ=slurm, options=options, timeout_s=WAIT_S)
    return OneFolder(site, first, good.finish(WAIT_S), again)


def test_a_corrupt_batch_is_named_and_the_job_stopped(one_folder: OneFolder) -> None:
    issue = one_folder.first.stopped_by("nonfinite")
    assert issue["first_step"] == K
    # The batch itself, not what followed from it.
    assert (issue["subject"]["kind"], issue["subject"]["collection"]) == ("tensor", "inputs")
    assert "done after" not in one_folder.first.stdout


def test_a_restart_with_the_same_run_id_is_a_new_issue_and_is_stopped_again(
    one_folder: OneFolder,
) -> None:
    launches = one_folder.first, one_folder.again
    before, after = (launch.stopped_by("nonfinite") for launch in launches)
    assert {launch.summary["run_id"] for launch in launches} == {"slurm-4711"}
    assert before["id"] != after["id"]
    assert before["first_step"] == after["first_step"] == K
    assert "done after" not in one_folder.again.stdout


def test_quiet_still_reports_a_stop(one_folder: OneFolder) -> None:
    stderr = one_folder.again.stderr
    assert f"critical: nonfinite at step {K}" in stderr
    assert "stopping the job" in stderr
    assert "steps watched" not in stderr


def test_status_says_what_was_found_and_done(one_folder: OneFolder) -> None:
    site = one_folder.site
    done = site.tocsin("status", "slurm-4711", "--json", "--config", str(site.config))
    facts = json.loads(done.stdout)
    (run,) = facts["runs"]
    assert run["labels"] == {"a": "b"}
    assert (run["state"], run["outcome"], run["stop"]["state"]) == ("ended", "stopped", "exited")
    assert {issue["rule"] for issue in facts["issues"]} == {"nonfinite", "restart_loop"}
    assert {issue["issue_id"] for issue in facts["issues"] if issue["rule"] == "nonfinite"} == {
        launch.stopped_by("nonfinite")["id"] for launch in (one_folder.first, one_folder.again)
    }
    assert {(d["action"], d["state"]) for d in facts["deliveries"] if d["rule"] == "nonfinite"} == {
        ("stop", "delivered"), ("hook", "delivered"),
    }  # fmt: skip
    text = site.tocsin("status", "--config", str(site.config)).stdout
    assert re.search(r"slurm-4711 +stopped", text)
    assert re.search(r"beside +completed", text)
    assert "nonfinite" in text


def test_of_two_runs_in_one_folder_the_healthy_one_is_left_alone(one_folder: OneFolder) -> None:
    without = plain(PYTHON, *HEALTHY[GPT])
    assert_left_alone(one_folder.beside, steps=20, stdout=without.stdout)


# -- a healthy network and a wild learning rate, on Kafka


@pytest.mark.torture  # in CI: a healthy GPT, on a bus file
@pytest.mark.kafka
def test_a_healthy_convolutional_network_is_left_alone_on_kafka(kafka_site: Site) -> None:
    watched = kafka_site.run(PYTHON, *HEALTHY[CNN], run_id="healthy-cnn", timeout_s=WAIT_S)
    assert_left_alone(watched, steps=120, stdout=plain(PYTHON, *HEALTHY[CNN]).stdout)


@pytest.mark.torture  # in CI: the demo's `diverge`
@pytest.mark.kafka
def test_a_learning_rate_that_is_ten_thousand_times_too_high_is_stopped(kafka_site: Site) -> None:
    finished = kafka_site.run(
        PYTHON, CNN, "--fault", "diverge", run_id="diverging-cnn", timeout_s=WAIT_S
    )
    issue = finished.stopped_by("loss_diverged", "nonfinite")
    assert issue["first_step"] >= K


# -- several ranks


@pytest.mark.kafka
def test_under_torchrun_the_bad_rank_is_named_and_no_rank_is_restarted(kafka_site: Site) -> None:
    finished = kafka_site.run(
        PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "--max-restarts", "2",
        str(TESTS / "support" / "ranks" / "until_stopped.py"), "--nan-at", str(K),
        run_id="bad-rank", timeout_s=WAIT_S,
    )  # fmt: skip
    issue = finished.stopped_by("nonfinite")
    assert (issue["first_rank"], issue["first_step"]) == (1, K), finished
    assert finished.stdout.count("begin rank") == 2, finished  # no second start
    assert "end rank" not in finished.stdout
    left = {each.rank: each.step for each in kafka_site.said("bad-rank", StopLeft)}
    assert set(left) == {0, 1}
    assert set(left.values()) == {finished.summary["stop"]["step"]}, "all at one exit point"


# -- a loop that hangs


def test_a_training_that_stalls_is_stopped_by_signals(embedded_site: Site) -> None:
    finished = embedded_site.run(
        PYTHON, CNN, "--fault", "stall", run_id="stall", options=["--label", "patience=little"],
        timeout_s=WAIT_S,
    )  # fmt: skip
    issue = finished.stopped_by("stalled-soon", how="SIGTERM")
    assert finished.summary["steps"] == issue["first_step"] == K


# -- surroundings: modules that bear our names, a folder where nothing can be written, an exception


@dataclass(frozen=True)
class Surroundings:
    """The same job without and with tocsin, from a folder that is read-only."""

    without: subprocess.CompletedProcess[str]
    watched: Finished


@pytest.fixture(scope="module")
def surroundings(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> Surroundings:
    site = embedded_site_in(tmp_path_factory.mktemp("surroundings"), receiver)
    site.config.write_text("version: 1\n")
    folder: Path = site.folder / "read-only"
    folder.mkdir()
    folder.chmod(0o555)
    # Without this capability not even root writes where the mode says no.
    wrap = ["setpriv", "--bounding-set", "-dac_override"] if os.getuid() == 0 else []
    command = (PYTHON, str(COLLIDE / "train.py"), "--raise")
    own = {"PYTHONPATH": str(COLLIDE), **startup_environ()}
    watched = site.run(
        *command, cwd=folder, wrap=wrap, run_id="surroundings", timeout_s=WAIT_S,
        environ={"XDG_RUNTIME_DIR": str(site.folder), **own},
    )  # fmt: skip
    return Surroundings(plain(*command, **own), watched)


def test_modules_and_a_sitecustomize_of_the_users_own_work(surroundings: Surroundings) -> None:
    assert surroundings.watched.stdout == surroundings.without.stdout
    assert "user sitecustomize ran: True" in surroundings.watched.stdout
    assert surroundings.watched.summary["steps"] == 20, surroundings.watched


def test_an_exception_keeps_its_traceback_its_code_and_the_steps(
    surroundings: Surroundings,
) -> None:
    watched = surroundings.watched
    assert (surroundings.without.returncode, watched.exit_code) == (1, 1), watched
    assert "RuntimeError: the user's own mistake" in watched.stderr
    assert watched.summary["outcome"] == "failed"
    assert watched.summary["exit_code"] == 1
    assert watched.summary["steps"] == 20, "the last records were lost"


def test_a_read_only_folder_is_watched_from_one_of_this_machine(surroundings: Surroundings) -> None:
    watched = surroundings.watched
    assert "not writable" in watched.stderr, watched
    assert watched.summary["judged_steps"] == 20, watched
