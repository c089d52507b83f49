"""What the objects of the API server say about one incarnation of a run. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tocsin.actions.targets.kind import JobSeen
from tocsin.actions.targets.kubernetes.config import Operation
from tocsin.actions.targets.kubernetes.objects import Job, Pod, Recorded
from tocsin.actions.targets.kubernetes.workloads import Resource


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What was found.

    Attributes:
        resource: the kind of the job.
        job_name: the name of the job; None: neither the run nor a pod tells.
        job_uid: the uid of the job that the run belongs to; None: not known.
        job: the job that has that name now; None: none has.
        pods: the pods of jobs of that name, without those that are done.
        met: whether a pod of the run was seen here, so that this is its cluster.
    """

    resource: Resource
    job_name: str | None
    job_uid: str | None
    job: Job | None
    pods: Sequence[Pod]
    met: bool

    @property
    def same_job(self) -> bool:
        """Whether the job that has the name now is the one of the run."""
        return self.job is not None and self.job.uid == self.job_uid

    @property
    def called(self) -> str:
        """The job, for messages."""
        return f"{self.resource.kind} {self.job_name}"


def evaluate(recorded: Recorded, seen: Seen) -> JobSeen:
    """Whether this incarnation still runs.

    A job's own status does not tell: it is suspended, and after a deletion gone, while processes
    still have their time to save. So the pods decide.
    """
    own = next((pod for pod in seen.pods if pod.uid == recorded.pod_uid), None)
    if own is not None:
        if own.restarted_since(recorded):
            return JobSeen("replaced", f"the container in pod {own.name} was restarted")
        return JobSeen("running", f"pod {own.name} is {_state(own)}")
    if seen.job_name is None:
        return JobSeen(
            "unknown",
            f"the run's pod is not in namespace {recorded.namespace}, and the run recorded neither "
            "TOCSIN_JOB_NAME nor TOCSIN_JOB_UID",
        )
    if seen.same_job or seen.job_uid is None:
        successor = _successor(recorded, seen.pods)
        if successor is not None:
            return JobSeen("replaced", f"pod {successor.name} runs in place of the run's own")
    left = [pod for pod in seen.pods if seen.same_job or _from_before(pod, seen.job)]
    if left and seen.job_uid is not None:
        return JobSeen("running", f"pod {left[0].name} of {seen.called} is {_state(left[0])}")
    return _without_pods(seen)


def why_not(job: Job, seen: Seen, operation: Operation) -> str | None:
    """Why ending a job in this way would not last; None if it would."""
    owner = job.owner
    # A CronJob does not touch the Jobs that it has made.
    if owner is not None and (owner.group, owner.kind) != ("batch", "CronJob"):
        return f"{seen.called} is managed by {owner.kind} {owner.name}: use a target of that kind"
    if operation == "suspend" and job.queue is not None:
        return (
            f"{seen.called} waits in a queue of Kueue, which would resume it: use a target with "
            "op: delete"
        )
    return None


def _without_pods(seen: Seen) -> JobSeen:
    """What the job says if nothing of it runs."""
    job = seen.job
    if seen.job_uid is None and (job is None or seen.pods):
        return JobSeen("unknown", f"the run's pod is gone, and it recorded no uid of {seen.called}")
    if job is None and not seen.met:
        return JobSeen(
            "unknown", f"{seen.called} is not there: it is gone, or runs in another cluster"
        )
    if job is None:
        return JobSeen("ended", f"{seen.called} is gone")
    if seen.job_uid is not None and not seen.same_job:
        return JobSeen("replaced", f"{seen.called} is another one now, with the uid {job.uid}")
    if job.finished is not None:
        return JobSeen("ended", f"{seen.called} is {job.finished}")
    if job.asked and job.suspended:
        return JobSeen("ended", f"{seen.called} is suspended")
    if job.asked:
        return JobSeen("running", f"{seen.called}: its controller has not suspended it yet")
    if job.leaving:
        return JobSeen("running", f"{seen.called} is being deleted")
    return JobSeen("replaced", f"the run's pod is gone, and {seen.called} starts another")


def _successor(recorded: Recorded, pods: Sequence[Pod]) -> Pod | None:
    """The pod that took the place of the run's own, which is gone."""
    name = recorded.pod or recorded.host
    if recorded.pod_uid is None or name is None:
        return None
    return next((pod for pod in pods if pod.is_slot_of(name) and not pod.leaving), None)


def _from_before(pod: Pod, job: Job | None) -> bool:
    """Whether a pod is older than the job that has the name now, so belongs to one before it."""
    return job is None or pod.created < job.created


def _state(pod: Pod) -> str:
    return f"{pod.phase}, being ended" if pod.leaving else pod.phase
