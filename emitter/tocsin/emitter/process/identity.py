"""Who speaks: run, job, training, rank, from the environment and from what was counted so far.

The incarnation of a training differs for each launch: a scheduler's id stays the same for all that
one allocation, pod or shell starts, so each launch adds an id of its own. Ranks that were launched
apart agree on one identity through the store of their process group (`Identity.joined`).

Functions of an environment, but for those that claim a number by a file, and `pod_name`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tocsin.emitter.process import runtime_folder, scheduler
from tocsin.emitter.process.environment import JOB_ID, LAUNCHER, RUN_ID, RUNTIME_DIR
from tocsin.emitter.process.pod import pod_name
from tocsin.schemas import monotonic_clock
from tocsin.schemas.ids import check_run_id, incarnation_id, new_id
from tocsin.schemas.records.frames import RecordOrigin

MAX_TRAININGS: Final = 100_000

REQUEUE: Final = 1000
"""What a requeue by Slurm or a retry by Batch adds to the restart count: more than torchelastic
ever restarts."""

LAUNCHES_KEPT_S: Final = 60 * 86_400.0
"""How long a launch within a Slurm step stays counted, after which that step is over."""

_JOB_POD: Final = re.compile(
    r"(?P<job>.+)-(?:(?:master|worker|launcher)-\d+|node-\d+-\d+(?:-[a-z0-9]{5})?)"
)
"""Names of the pods of training operators: JOB-worker-3 (Kubeflow), JOB-node-0-3 (a JobSet)."""

_begun: Final[Counter[tuple[str, int, int]]] = Counter()
"""Trainings that this process has begun, by job, restart count and rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One training of one rank. `training` counts, from 0, those that this job began before."""

    run_id: str
    job_id: str
    restart_count: int = 0
    training: int = 0
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1

    @property
    def incarnation(self) -> str:
        """Equal on all ranks and nodes of this training."""
        return incarnation_id(self.run_id, self.job_id, self.restart_count, self.training)

    @property
    def claim(self) -> str:
        """What makes the incarnation of this run, as text for `joined`."""
        return json.dumps([self.job_id, self.restart_count, self.training])

    def joined(self, claim: str) -> Identity:
        """This rank in the training that `claim` names: the one that its ranks agreed on.

        Raises:
            ValueError: that is no claim.
        """
        match json.loads(claim):
            case [str(job), int(restarts), int(training)]:
                return replace(self, job_id=job, restart_count=restarts, training=training)
        raise ValueError(f"no claim of an identity: {claim[:100]!r}")

    @property
    def origin(self) -> RecordOrigin:
        """This rank as frames name it."""
        return RecordOrigin(
            run_id=self.run_id,
            incarnation=self.incarnation,
            rank=self.rank,
            world_size=self.world_size,
        )


def scheduler_job(environ: Mapping[str, str]) -> str | None:
    """The id that Slurm, torchelastic, SageMaker, AWS Batch, Ray or a Kubernetes operator gave this
    job; None outside of them.

    It stays the same for all launches in one allocation, pod or job.
    """
    slurm = environ.get("SLURM_JOB_ID")
    if slurm:
        task = environ.get("SLURM_ARRAY_TASK_ID")
        array = environ.get("SLURM_ARRAY_JOB_ID")
        return f"slurm-{array}_{task}" if array and task else f"slurm-{slurm}"
    elastic = environ.get("TORCHELASTIC_RUN_ID")
    # torchrun without --rdzv-id uses the literal "none" on every machine.
    if elastic and elastic != "none":
        return f"torchelastic-{elastic}"
    return _submitted_job(environ) or _kubernetes_job(environ)


def _submitted_job(environ: Mapping[str, str]) -> str | None:
    """The job that was submitted to Ray, SageMaker or Batch; equal on all its nodes.

    Ray's own job ids count from 1 in each cluster: these tell no two jobs apart.
    """
    for job, name in (
        (scheduler.ray(environ), "submission"),
        (scheduler.sagemaker(environ), "job"),
        (scheduler.batch(environ), "job"),
    ):
        if job is not None and name in job.names:
            return f"{job.kind}-{job.names[name]}"
    return None


def _kubernetes_job(environ: Mapping[str, str]) -> str | None:
    """The job whose pod this is; None where the pod's own environment does not show it.

    An indexed Job names its pods JOB-INDEX, and sets the index. The Jobs of a JobSet are such ones,
    called JOBSET-node-NUMBER by training operators, and are one run. The pods of a plain Job have
    chance at the end of their names, like those of a Deployment: nothing in there distinguishes the
    two.
    """
    if not environ.get("KUBERNETES_SERVICE_HOST"):
        return None
    pod = pod_name(environ)
    index = environ.get("JOB_COMPLETION_INDEX")
    if index:
        named = re.fullmatch(
            rf"(?P<job>.+?)(?:-node-\d+)?-{re.escape(index)}(?:-[a-z0-9]{{5}})?", pod
        )
    else:
        named = _JOB_POD.fullmatch(pod)
    return None if named is None else f"k8s-{named['job']}"


def resolve_run_id(explicit: str | None, environ: Mapping[str, str]) -> str:
    """The run id: what was asked for, else TOCSIN_RUN_ID, else the scheduler's id, else a new one.

    Raises:
        ConfigurationError: the one that was asked for or set cannot be a run id.
    """
    given = explicit or environ.get(RUN_ID)
    if given:
        return check_run_id(given)
    found = scheduler_job(environ)
    if found is not None:
        cleaned = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in found)
        return check_run_id(cleaned[:200])
    return f"run-{new_id()[:8]}"


def launch_job_id(environ: Mapping[str, str]) -> str:
    """The job id of a launch that begins now: the scheduler's id, and an id of this launch alone.

    A TOCSIN_JOB_ID that was set by hand holds, so that launchers on several nodes can be given the
    same one. Below another launcher it is that one's, and this launch is a job of its own.
    """
    given = environ.get(JOB_ID)
    if given and not environ.get(LAUNCHER):
        return given[:200]
    found = scheduler_job(environ)
    if found is None:
        return new_id()
    return f"{found[:150]}/{_launch_in_step(environ) or new_id()}"


def _launch_in_step(environ: Mapping[str, str]) -> str | None:
    """The launch within a Slurm step of several tasks; None elsewhere.

    Each task launches, and all must come to the same id without a word between them, for not every
    job has a process group of torch. They do the same, so they count the same.
    """
    step = environ.get("SLURM_STEP_ID", "")
    tasks = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS", "")
    if not step.isdigit() or _number(tasks) < 2:
        return None
    names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID", "SLURM_PROCID")
    digest = _digest("/".join(environ.get(name, "") for name in names))
    own = f"launch-{digest}"
    try:
        folder = runtime_folder.private_folder(environ) / "launches"
        folder.mkdir(mode=0o700, exist_ok=True)
        number = _claim(folder, own)
        _remove_old(folder, monotonic_clock.unix_ms() / 1000 - LAUNCHES_KEPT_S, but=own)
        return f"{step}.{number}"
    except OSError:
        return None


def _remove_old(folder: Path, before: float, *, but: str) -> None:
    """Remove claims from before that time, in Unix seconds: their steps are over. A step that goes
    on keeps its own, for it counts on from there.
    """
    for path in folder.iterdir():
        if path.name.startswith(f"{but}-"):
            continue
        with suppress(FileNotFoundError):  # another task has removed it
            if path.stat().st_mtime < before:
                path.unlink()


def node_key(environ: Mapping[str, str], run_id: str) -> str:
    """What ranks that nobody launched have in common on a node, and other jobs there have not."""
    names = (
        JOB_ID, "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT",
        "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT",
    )  # fmt: skip
    return "\x1f".join((run_id, *(environ.get(name, "") for name in names)))


def resolve_job_id(environ: Mapping[str, str]) -> str:
    """The job of this process: TOCSIN_JOB_ID as it was handed down, else a launch of its own."""
    return environ.get(JOB_ID, "")[:200] or launch_job_id(environ)


def restart_count(environ: Mapping[str, str]) -> int:
    """Which life of this job it is: torchelastic's restarts, and `REQUEUE` for each of Slurm's, or
    each attempt of AWS Batch after the first.

    torchelastic begins at 0 again when the job was started anew, and only its workers see its
    count: without both, the ranks of the second life would speak as those of the first.
    """
    elastic = _number(environ.get("TORCHELASTIC_RESTART_COUNT", ""))
    requeued = _number(environ.get("SLURM_RESTART_COUNT", ""))
    requeued += max(0, _number(environ.get("AWS_BATCH_JOB_ATTEMPT", "")) - 1)
    return requeued * REQUEUE + min(elastic, REQUEUE - 1)


def rank_of(environ: Mapping[str, str]) -> tuple[int, int, int]:
    """(rank, local rank, world size) from the environment; (0, 0, 1) if it has none."""
    for rank, local, world in (
        ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
        ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
    ):
        if environ.get(rank, "").isdigit() and environ.get(world, "").isdigit():
            number = _number(environ[rank])
            return (
                number,
                _number(environ.get(local, "0")),
                max(_number(environ[world]), number + 1),
            )
    return 0, 0, 1


def count_training(folder: Path | None, restarts: int, rank: int, *, least: int = 0) -> int:
    """Claim the number of a training that begins now, by a file in the job's private folder.

    It is at least `least`, and without a folder it is that. Raises OSError if the folder cannot be
    written.
    """
    return least if folder is None else _claim(folder, f"training-{restarts}-{rank}", least=least)


def _claim(folder: Path, name: str, *, least: int = 0) -> int:
    """The lowest number that nobody has claimed under that name. Raises OSError."""
    for number in range(least, MAX_TRAININGS):
        path = folder / f"{name}-{number}"
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            continue
        return number
    raise OSError(f"{folder} holds {MAX_TRAININGS:,} of {name} already")


def identify(
    environ: Mapping[str, str], *, rank: int, local_rank: int, world_size: int
) -> Identity:
    """The identity of the training that begins now in this process.

    Raises:
        ConfigurationError: TOCSIN_RUN_ID cannot be a run id.
        OSError: the job's folder cannot be written.
    """
    folder = environ.get(RUNTIME_DIR)
    restarts, job_id = restart_count(environ), resolve_job_id(environ)
    # The folder of a job that `start()` began goes away when its training is finished.
    begun = (job_id, restarts, rank)
    training = count_training(Path(folder) if folder else None, restarts, rank, least=_begun[begun])
    _begun[begun] = training + 1
    return Identity(
        run_id=resolve_run_id(None, environ),
        job_id=job_id,
        restart_count=restarts,
        training=training,
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
