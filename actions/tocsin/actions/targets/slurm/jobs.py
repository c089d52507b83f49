"""Jobs as Slurm lists them, and which of them is the one that is to end. Pure.

A job id alone names no incarnation: a requeue keeps it, and counts one restart more. And some ids
name several jobs: that of an array, which is the id of its last task, too; and that of a
heterogeneous job, which all of its parts take for their own, and which ends all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tocsin.actions.targets.answers import why_another, word
from tocsin.actions.targets.kind import JobSeen, TargetJob
from tocsin.schemas.records.runs import SchedulerJob

_NUMBER: Final = re.compile(r"[0-9]{1,10}")

ENDED: Final = frozenset(
    (
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "LAUNCH_FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "TIMEOUT",
    )
)
"""States after which no process of a job is left. COMPLETING is none of them."""

SEVERAL: Final = -1
"""The array task of an entry that is several tasks, none of which was started yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedJob:
    """One job of a list.

    Attributes:
        job: its own id.
        restarts: how often it was requeued.
        states: the state, and flags like COMPLETING.
        requeue: whether it may be queued again.
        array_task: its index in an array; None outside of one.
        het_job: the id of the heterogeneous job that it is a part of, else 0.
        started_s: when it was started last, in Unix seconds; 0 if that is not known.
    """

    job: int
    restarts: int
    states: tuple[str, ...]
    requeue: bool
    array_task: int | None = None
    het_job: int = 0
    started_s: int = 0

    @property
    def ended(self) -> bool:
        """Whether nothing of it runs any more."""
        return bool(self.states) and ENDED.issuperset(self.states)

    @property
    def state(self) -> str:
        """The states in Slurm's words."""
        return "+".join(map(word, self.states)) or word(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedJob:
    """The incarnation of a job that a run has recorded.

    Attributes:
        called: how it is asked for so that no other job is meant: `4711`, or `4711_3` in an array.
    """

    called: str
    job: int
    restarts: int
    cluster: str
    array_task: int | None


def wanted_job(scheduler: SchedulerJob) -> WantedJob:
    """What a run has recorded.

    Raises:
        ValueError: it is not enough to end exactly one job; the message says what is missing.
    """
    names = scheduler.names
    job, restarts = number_of(names, "job"), number_of(names, "restarts")
    array_job, array_task = number_of(names, "array_job"), number_of(names, "array_task")
    if not job:
        raise ValueError("the run recorded no Slurm job id")
    if not names.get("cluster"):
        raise ValueError("the run recorded no name of its Slurm cluster")
    if (array_job is None) != (array_task is None):
        raise ValueError("the run recorded only a part of the name of an array task")
    return WantedJob(
        called=str(job) if array_job is None else f"{array_job}_{array_task}",
        job=job,
        restarts=restarts or 0,
        cluster=names["cluster"],
        array_task=array_task,
    )


def number_of(names: Mapping[str, str], name: str) -> int | None:
    """A number that a run has recorded; None if it has not. Raises ValueError: it is not one."""
    text = names.get(name, "")
    if not text:
        return None
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"the run recorded something as the {name} of Slurm, expected digits")
    return int(text)


def parts_of(wanted: WantedJob, listed: Sequence[ListedJob]) -> tuple[ListedJob, ...]:
    """The listed jobs that end together with the wanted one, itself first; none if it is not
    listed. A heterogeneous job has several."""
    for one in listed:
        if one.job == wanted.job and one.array_task == wanted.array_task:
            others = (
                o for o in listed if o is not one and one.het_job and o.het_job == one.het_job
            )
            return (one, *others)
    return ()


def seen(job: TargetJob, wanted: WantedJob, listed: Sequence[ListedJob]) -> JobSeen | None:
    """What a list says of the wanted job; None if nothing is listed under its name."""
    if not listed:
        return None
    parts = parts_of(wanted, listed)
    if not parts:
        return JobSeen("replaced", f"another job is called {wanted.called}")
    for part in parts:
        if part.restarts != wanted.restarts:
            return JobSeen(
                "replaced", f"{part.state}, restart {part.restarts} and not {wanted.restarts}"
            )
        # A cluster that lost its memory counts its jobs from 1 again.
        if job.started_ms and (why := why_another(part.started_s * 1000, job)) is not None:
            return JobSeen("replaced", why)
    running = [part for part in parts if not part.ended]
    return JobSeen("running" if running else "ended", (running or parts)[0].state)
