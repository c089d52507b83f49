"""What stands in examples/ runs, is watched whole, and is left alone where it is healthy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from support.processes.site import Finished, Site
from support.servers.slurm import slurm_cluster, unavailable
from support.trainings.watched import records
from support.waiting import wait_until
from tocsin.console.context import section_registry
from tocsin.schemas.configuration.file import check_config
from tocsin.schemas.records import wire
from tocsin.schemas.records.checkpoints import CheckpointWritten
from tocsin.schemas.records.events import Event
from tocsin.schemas.records.frames import StepFrame, TensorFrame

EXAMPLES = Path(__file__).parents[3] / "examples"
PYTHON = sys.executable
TORCHRUN = (PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "2")


@pytest.fixture
def examples(embedded_site: Site) -> Site:
    """A copy of the folder, so that what a run leaves beside its script is left there."""
    shutil.copytree(EXAMPLES, embedded_site.folder / "examples")
    environ = {
        **embedded_site.environ,
        "TOCSIN_BUS": embedded_site.bus_url,
        "PATH": f"{Path(PYTHON).parent}{os.pathsep}{os.environ['PATH']}",
    }
    return replace(embedded_site, environ=environ)


def run(site: Site, name: str, *command: str) -> Finished:
    """Run it as its own first lines say, with the configuration beside it."""
    folder = site.folder / "examples" / name
    own = replace(site, config=folder / "tocsin.yaml")
    return own.run(*command, cwd=folder, run_id=name, timeout_s=110)


def assert_watched_and_left_alone(finished: Finished, site: Site, *, steps: int) -> None:
    """It has ended well, all its steps were seen whole, and nobody was told anything."""
    assert finished.exit_code == 0, finished
    assert finished.summary["steps"] == steps, finished
    assert finished.issues == [], finished
    assert finished.summary["capture"]["degraded"] == [], finished
    seen = Seen(site, finished.summary["run_id"])
    assert seen.train == set(range(steps))
    assert seen.columns >= {"loss", "gradient_norm", "lr.0"}
    assert seen.collections >= {"gradients", "weights", "updates"}


class Seen:
    """What of a run is on the bus."""

    def __init__(self, site: Site, run_id: str) -> None:
        self.train: set[int] = set()
        self.evaluations: dict[int, list[float]] = {}
        self.columns: set[str] = set()
        self.collections: set[str] = set()
        self.checkpoints: list[tuple[int, str]] = []
        for record in records(site.folder, run_id):
            assert record.value is not None
            frame = wire.decode(wire.read_meta(record.headers), record.value)
            if isinstance(frame, TensorFrame):
                self.collections.add(frame.collection)
            elif isinstance(frame, Event) and isinstance(frame.data, CheckpointWritten):
                written = frame.data.checkpoint
                self.checkpoints.append((written.step, Path(written.path).suffix))
            elif isinstance(frame, StepFrame) and frame.mode == "train":
                self.train.update(frame.steps.tolist())
                self.columns.update(frame.columns)
            elif isinstance(frame, StepFrame):
                losses = frame.column("loss")
                if losses is None:  # what a callback has named
                    continue
                for step, loss in zip(frame.steps.tolist(), losses.tolist(), strict=True):
                    self.evaluations.setdefault(step, []).append(loss)


def test_the_plain_loop_is_healthy(examples: Site) -> None:
    finished = run(examples, "plain", PYTHON, "train.py")
    assert_watched_and_left_alone(finished, examples, steps=400)


@pytest.mark.torture  # the demo's `diverge` is stopped for the same reason
def test_the_plain_loop_with_a_wild_learning_rate_is_stopped(examples: Site) -> None:
    wild = ("--learning-rate", "1e6", "--steps", "200000")
    finished = run(examples, "plain", PYTHON, "train.py", *wild)
    assert finished.exit_code == 79, finished


@pytest.mark.torture  # in CI: matrix/test_matrix_frameworks
@pytest.mark.parametrize("callback", [(), ("--callback",)], ids=["no code", "callback"])
def test_lightning_is_healthy_and_its_evaluations_are_seen(
    examples: Site, callback: tuple[str, ...]
) -> None:
    finished = run(examples, "lightning", PYTHON, "train.py", *callback)
    assert_watched_and_left_alone(finished, examples, steps=276)
    assert "276 steps, accuracy 9" in finished.stdout
    # One evaluation of 360 images after each of 12 epochs, none of Lightning's own trial before.
    seen = Seen(examples, "lightning")
    evaluations = seen.evaluations
    assert [len(evaluations.get(23 * epoch + 22, [])) for epoch in range(12)] == [6] * 12
    assert len(evaluations) == 12
    # The best one is saved, after the evaluation; and nothing else.
    assert seen.checkpoints
    assert set(seen.checkpoints) <= {(23 * epoch + 22, ".ckpt") for epoch in range(12)}


@pytest.mark.torture  # in CI: matrix/test_matrix_frameworks
@pytest.mark.parametrize("callback", [(), ("--callback",)], ids=["no code", "callback"])
def test_hugging_face_s_trainer_is_healthy_and_its_evaluations_are_seen(
    examples: Site, callback: tuple[str, ...]
) -> None:
    finished = run(examples, "transformers", PYTHON, "train.py", *callback)
    assert_watched_and_left_alone(finished, examples, steps=120)
    evaluations = Seen(examples, "transformers").evaluations
    assert sorted(evaluations) == [39, 79, 119]
    said = [
        float(line.split("'eval_loss': '")[1].split("'")[0])
        for line in finished.stdout.splitlines()
        if "eval_loss" in line
    ]
    means = [sum(losses) / len(losses) for _, losses in sorted(evaluations.items())]
    # Its own mean is over all characters, ours over batches, of which the last is smaller.
    assert means == pytest.approx(said, rel=0.05)
    if callback:
        assert {"log.loss", "log.grad_norm"} <= Seen(examples, "transformers").columns


@pytest.mark.torture
@pytest.mark.parametrize("callback", [(), ("--callback",)], ids=["no code", "callback"])
@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_a_framework_with_a_wild_learning_rate_leaves_its_loop(
    examples: Site, name: str, callback: tuple[str, ...]
) -> None:
    longer = {"lightning": ("--epochs", "2000"), "transformers": ("--steps", "20000")}[name]
    wild = ("--learning-rate", "1e6", *longer, *callback)
    finished = run(examples, name, PYTHON, "train.py", *wild)
    assert finished.exit_code == 79, finished
    assert finished.summary["stop"]["how"] == "edge", finished


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_no_seed_raises_an_alarm(examples: Site, name: str, seed: int) -> None:
    finished = run(examples, name, PYTHON, "train.py", "--seed", str(seed))
    assert finished.exit_code == 0, finished
    assert finished.issues == [], finished


@pytest.mark.torture  # the batch script runs the same training, under torchrun too
def test_torchrun_is_healthy_on_both_ranks(examples: Site) -> None:
    finished = run(examples, "torchrun", *TORCHRUN, "train.py")
    assert_watched_and_left_alone(finished, examples, steps=300)


@pytest.mark.torture
def test_torchrun_with_a_wild_learning_rate_is_stopped(examples: Site) -> None:
    wild = ("--learning-rate", "1e6", "--steps", "200000")
    finished = run(examples, "torchrun", *TORCHRUN, "train.py", *wild)
    assert finished.exit_code == 79, finished


@pytest.mark.torture  # in CI: the loop of docs/how-to/notebook.md, by test_docs
def test_the_python_interface_watches_without_a_launcher(embedded_site: Site) -> None:
    done = subprocess.run(
        [PYTHON, str(EXAMPLES / "in_python.py")],
        cwd=embedded_site.folder,
        env={**os.environ, **embedded_site.environ, "TOCSIN_RUN_ID": "in-python"},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    status = embedded_site.tocsin("status", "in-python", "--json")
    assert '"last_step": 399' in status.stdout, status.stdout + status.stderr + done.stderr


# -- the batch script


BATCH = EXAMPLES / "slurm" / "train.sbatch"

# What the script calls of Slurm, where there is none: srun runs its command here and now.
COMMANDS_OF_SLURM = """
srun() { while [[ $1 == -* ]]; do shift; done; "$@"; }
scontrol() { [[ $1 == show ]] && echo localhost; }
export -f srun scontrol
exec bash "$0" "$@"
"""


def test_the_batch_script_is_sound() -> None:
    subprocess.run(["bash", "-n", str(BATCH)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(BATCH)], check=True)


def batch_without_slurm(
    site: Site, *arguments: str, nodes: int = 1
) -> subprocess.CompletedProcess[str]:
    """Run the script in bash with Slurm's variables, srun and scontrol being functions of bash."""
    slurm = {
        "SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_NODEID": "0",
        "SLURM_JOB_NODELIST": "localhost", "SLURM_NTASKS": "1", "SLURM_PROCID": "0",
        "SLURM_CPUS_PER_TASK": "1",
    }  # fmt: skip
    return subprocess.run(
        ["bash", "-c", COMMANDS_OF_SLURM, "train.sbatch", *arguments],
        cwd=site.folder / "examples" / "slurm",
        env={**os.environ, **site.environ, **slurm},
        capture_output=True,
        text=True,
        timeout=110,
    )


@pytest.mark.torture
def test_the_batch_script_without_slurm_but_its_variables_is_healthy(examples: Site) -> None:
    done = batch_without_slurm(examples)
    assert done.returncode == 0, done.stderr
    assert "tocsin: 300 steps watched, 0 issues" in done.stderr
    status = examples.tocsin("status", "slurm-4711", "--json")
    (run,) = json.loads(status.stdout)["runs"]
    assert (run["outcome"], run["last_step"]) == ("completed", 299)
    assert run["labels"] == {"team": "examples", "cluster": "slurm"}


def test_several_nodes_need_a_bus_that_all_of_them_reach(examples: Site) -> None:
    done = batch_without_slurm(examples, nodes=2)
    assert done.returncode == 2
    assert "TOCSIN_BUS=kafka://" in done.stderr


@pytest.mark.torture
@pytest.mark.timeout(400)
@pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")
def test_a_real_slurm_runs_stops_and_requeues_the_batch_script(examples: Site) -> None:
    folder = examples.folder / "examples" / "slurm"
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as short,
        slurm_cluster(Path(short), examples.environ) as slurm,
    ):

        def submit(*arguments: str) -> str:
            return slurm.call("sbatch", "--parsable", f"--chdir={folder}", str(BATCH), *arguments)

        healthy = submit()
        assert slurm.finish(healthy)["ExitCode"] == "0:0"
        wild = submit("--learning-rate", "1e6", "--steps", "1000000")
        stopped = slurm.finish(wild)
        assert (stopped["JobState"], stopped["ExitCode"]) == ("FAILED", "79:0")
        assert stopped["Restarts"] == "0"

        long = submit("--steps", "1000000")
        said = folder / f"wave-{long}.out"
        wait_until(lambda: said.exists() and "step 100 " in said.read_text(), 60, "it trains")
        slurm.call("scancel", "--batch", "--signal=USR1", long)
        wait_until(lambda: said.read_text().count("step 100 ") == 2, 90, "it trains again")
        assert slurm.job(long)["Restarts"] == "1"

        def second_life() -> bool:
            (run,) = json.loads(examples.tocsin("status", f"slurm-{long}", "--json").stdout)["runs"]
            return len(run["ranks"]) == 2 and run["last_step"] > 100

        wait_until(second_life, 30, "both ranks of the second life are seen")


@pytest.mark.parametrize(
    "config", sorted(EXAMPLES.glob("*/tocsin.yaml")), ids=lambda p: p.parent.name
)
def test_each_configuration_is_valid(config: Path) -> None:
    _, problems = check_config(config.read_text(), "tocsin.yaml", section_registry())
    assert problems == []
