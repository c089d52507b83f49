"""Who speaks: run, job, training, rank, from the environment and from what was counted so far.

Pure functions of an environment, but for `count_training`, which claims a number by a file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypedDict

from tocsin.emitter.settings import JOB_ID, RUN_ID, RUNTIME_DIR
from tocsin.schemas.identity import check_run_id, incarnation_id, new_id
from tocsin.schemas.telemetry import Speaker

MAX_TRAININGS: Final = 100_000

REQUEUE: Final = 1000
"""What a requeue by Slurm adds to the restart count: more than torchelastic ever restarts."""


class Who(TypedDict):
    """The fields that each event of a rank begins with."""

    run_id: str
    incarnation: str
    rank: int
    world_size: int


def who_speaks(speaker: Speaker) -> Who:
    """The same as a frame's speaker, for an event."""
    return {
        "run_id": speaker.run_id,
        "incarnation": speaker.incarnation,
        "rank": speaker.rank,
        "world_size": speaker.world_size,
    }


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
    def speaker(self) -> Speaker:
        """As frames name it."""
        return Speaker(
            run_id=self.run_id,
            incarnation=self.incarnation,
            rank=self.rank,
            world_size=self.world_size,
        )


def scheduler_job(environ: Mapping[str, str]) -> str | None:
    """The id that Slurm or torchelastic gave this job; None outside of them."""
    slurm = environ.get("SLURM_JOB_ID")
    if slurm:
        task = environ.get("SLURM_ARRAY_TASK_ID")
        array = environ.get("SLURM_ARRAY_JOB_ID")
        return f"slurm-{array}_{task}" if array and task else f"slurm-{slurm}"
    elastic = environ.get("TORCHELASTIC_RUN_ID")
    # torchrun without --rdzv-id says the literal "none" on every machine.
    return f"torchelastic-{elastic}" if elastic and elastic != "none" else None


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


def resolve_job_id(environ: Mapping[str, str]) -> str:
    """The job: TOCSIN_JOB_ID, else the scheduler's id, else a new one."""
    return (environ.get(JOB_ID) or scheduler_job(environ) or new_id())[:200]


def restart_count(environ: Mapping[str, str]) -> int:
    """Which life of this job it is: torchelastic's restarts, and `REQUEUE` for each of Slurm's.

    torchelastic begins at 0 again when Slurm has started the job anew, and only its workers see its
    count: without both, the ranks of the second life would speak as those of the first.
    """
    elastic = _number(environ.get("TORCHELASTIC_RESTART_COUNT", ""))
    requeued = _number(environ.get("SLURM_RESTART_COUNT", ""))
    return requeued * REQUEUE + min(elastic, REQUEUE - 1)


def rank_of(environ: Mapping[str, str]) -> tuple[int, int, int]:
    """(rank, local rank, world size) as the environment says; (0, 0, 1) if it says nothing."""
    for rank, local, world in (
        ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
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


def count_training(folder: Path | None, restarts: int, rank: int) -> int:
    """Claim the number of a training that begins now, by a file in the job's private folder.

    Without a folder it is 0. Raises OSError if the folder cannot be written.
    """
    if folder is None:
        return 0
    for number in range(MAX_TRAININGS):
        name = folder / f"training-{restarts}-{rank}-{number}"
        try:
            os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            continue
        return number
    raise OSError(f"{folder} holds {MAX_TRAININGS:,} trainings already")


def identify(
    environ: Mapping[str, str], *, rank: int, local_rank: int, world_size: int
) -> Identity:
    """The identity of the training that begins now in this process.

    Raises:
        ConfigurationError: TOCSIN_RUN_ID cannot be a run id.
        OSError: the job's folder cannot be written.
    """
    folder = environ.get(RUNTIME_DIR)
    restarts = restart_count(environ)
    return Identity(
        run_id=resolve_run_id(None, environ),
        job_id=resolve_job_id(environ),
        restart_count=restarts,
        training=count_training(Path(folder) if folder else None, restarts, rank),
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
    )


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
