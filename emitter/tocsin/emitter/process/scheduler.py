"""What the scheduler calls the job that a process runs in, as its environment tells.

With these names `tocsin actions` can ask the scheduler to end exactly this job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from tocsin.schemas.records.runs import MAX_SCHEDULER_NAME, SchedulerJob


def scheduler_of(environ: Mapping[str, str]) -> SchedulerJob | None:
    """The job of this process; None outside of the schedulers that are known here. Blocks for the
    files that a scheduler leaves in its containers, at most."""
    for named in _SCHEDULERS:
        job = named(environ)
        if job is not None:
            return job
    return None


def given(environ: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """The names that are in the environment, by name: `variables` says in which variable each is.
    What is empty or too long is left out."""
    found = {name: environ.get(variable, "").strip() for name, variable in variables.items()}
    return {name: value for name, value in found.items() if 0 < len(value) <= MAX_SCHEDULER_NAME}


def slurm(environ: Mapping[str, str]) -> SchedulerJob | None:
    """A job of Slurm. `restarts` is how often Slurm has started it again (`--requeue`)."""
    names = given(
        environ,
        {
            "job": "SLURM_JOB_ID",
            "restarts": "SLURM_RESTART_COUNT",
            "cluster": "SLURM_CLUSTER_NAME",
            "array_job": "SLURM_ARRAY_JOB_ID",
            "array_task": "SLURM_ARRAY_TASK_ID",
            "het_job": "SLURM_HET_JOB_ID",
        },
    )
    if "job" not in names:
        return None
    # Slurm does not set it before the first restart.
    return SchedulerJob(kind="slurm", names={"restarts": "0", **names})


_SCHEDULERS: Final[Sequence[Callable[[Mapping[str, str]], SchedulerJob | None]]] = (slurm,)
"""The innermost first: a Ray job in a pod is ended by Ray, for the pod is others' too."""
