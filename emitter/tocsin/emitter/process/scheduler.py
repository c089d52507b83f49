"""What the scheduler calls the job that a process runs in, from its environment.

With these names `tocsin actions` can ask the scheduler to end exactly this job.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from tocsin.emitter.process.environment import SCHEDULER, parse_labels
from tocsin.emitter.process.pod import kubernetes
from tocsin.schemas.records.fields import MAX_ENTRIES
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
    """The names that are in the environment, by name: `variables` is the variable of each.
    What is empty, too long or not printable is left out."""
    found = {name: environ.get(variable, "").strip() for name, variable in variables.items()}
    return {
        name: value
        for name, value in found.items()
        if 0 < len(value) <= MAX_SCHEDULER_NAME and value.isprintable()
    }


def own(environ: Mapping[str, str]) -> SchedulerJob | None:
    """A job of a scheduler that is not known here, as `TOCSIN_SCHEDULER` has it:
    `lab:job=17,start=2`. What is written otherwise is none."""
    kind, _, listed = environ.get(SCHEDULER, "").partition(":")
    names = parse_labels(listed)
    names = given(names, {name: name for name in list(names)[:MAX_ENTRIES]})
    if not 0 < len(kind) <= 32 or not names:
        return None
    return SchedulerJob(kind=kind, names=names)


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
            # Set in all parts of a heterogeneous job, whose job id is that of the first part.
            "het_job": "SLURM_JOB_ID_HET_GROUP_0",
        },
    )
    if "job" not in names:
        return None
    # Slurm does not set it before the first restart.
    return SchedulerJob(kind="slurm", names={"restarts": "0", **names})


def sagemaker(environ: Mapping[str, str]) -> SchedulerJob | None:
    """A training job of SageMaker. `job` is its exact name; the ARN has it in lower case."""
    names = given(environ, {"job": "TRAINING_JOB_NAME", "arn": "TRAINING_JOB_ARN"})
    # Local mode has no ARN, and no job at SageMaker.
    if len(names) < 2:
        return None
    return SchedulerJob(kind="sagemaker", names={**names, **given(environ, _REGION)})


def batch(environ: Mapping[str, str]) -> SchedulerJob | None:
    """A job of AWS Batch, or a child of an array job (`ID:INDEX`). `attempt` counts from 1."""
    names = given(environ, {"job": "AWS_BATCH_JOB_ID", "attempt": "AWS_BATCH_JOB_ATTEMPT"})
    if "job" not in names:
        return None
    # A node of a multi-node job is `ID#INDEX`; the job ends on all its nodes.
    names["job"] = names["job"].partition("#")[0]
    return SchedulerJob(kind="batch", names={**names, **given(environ, _REGION)})


def ray(environ: Mapping[str, str]) -> SchedulerJob | None:
    """A job of Ray. A driver that was submitted knows its submission id, and has no job id before
    it connects; a worker knows only the job id."""
    names = given(environ, {"job": "RAY_JOB_ID"})
    try:
        config = json.loads(environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", ""))
    except (ValueError, RecursionError):
        config = None
    match config:
        case {"metadata": {"job_submission_id": str(submission)}}:
            names |= given({"id": submission}, {"submission": "id"})
    if not names:
        return None
    return SchedulerJob(kind="ray", names={**names, **given(environ, {"address": "RAY_ADDRESS"})})


_REGION: Final = {"region": "AWS_REGION"}

_SCHEDULERS: Final[Sequence[Callable[[Mapping[str, str]], SchedulerJob | None]]] = (
    own,
    ray,
    slurm,
    sagemaker,
    batch,
    kubernetes,
)
"""What was set by hand, then the innermost first: a Ray job in a pod is ended by Ray, for the pod
is others' too."""
