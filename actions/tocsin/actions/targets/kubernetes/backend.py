"""One API server: jobs found by a run's pod, ended by their uid, confirmed by their pods."""

from __future__ import annotations

import asyncio
from typing import Final

from pydantic import JsonValue

from tocsin.actions.targets.answers import instead
from tocsin.actions.targets.kind import JobSeen, StopAsked, TargetJob
from tocsin.actions.targets.kubernetes.api import Answer, KubernetesApi
from tocsin.actions.targets.kubernetes.config import KubernetesTarget
from tocsin.actions.targets.kubernetes.job_state import Seen, evaluate, why_not
from tocsin.actions.targets.kubernetes.objects import (
    Job,
    Owner,
    Pod,
    Recorded,
    controller_of,
    uid_of,
)
from tocsin.actions.targets.kubernetes.workloads import WORKLOADS

TRIES: Final = 3
"""How often a job is asked that changes while it is asked."""

LONGEST_S: Final = 60.0
"""For all requests of one call."""

_TOO_LONG: Final = f"the API server took longer than {LONGEST_S:g} s"

_REMEMBERED: Final = 10_000
"""Jobs of which the owner is kept."""

_ANNOTATION: Final = "tocsin/stop"
"""What a suspended job carries: which stop it was, and why."""


class KubernetesBackend:
    """One API server, and the kind of jobs that may be ended there."""

    def __init__(self, config: KubernetesTarget, api: KubernetesApi) -> None:
        self._config = config
        self._api = api
        self._workload = WORKLOADS[config.kind]
        self._owners: dict[str, Owner] = {}

    async def inspect(self, job: TargetJob) -> JobSeen:
        """Show whether a pod of this incarnation still runs. Takes at most a minute."""
        recorded = self._recorded(job)
        if isinstance(recorded, str):
            return JobSeen("unknown", recorded)
        try:
            async with asyncio.timeout(LONGEST_S):
                seen = await self._find(job, recorded)
        except TimeoutError:
            return JobSeen("unknown", _TOO_LONG)
        return (
            JobSeen("unknown", seen.why) if isinstance(seen, Answer) else evaluate(recorded, seen)
        )

    async def stop(self, job: TargetJob) -> StopAsked:
        """Suspend or delete the job of this incarnation, unless it is gone already. Takes at most a
        minute.

        The job is read first, then its pods; it is asked only if it has not changed since, and a
        job changes when its pods do. So a pod that is started in between is not ended.
        """
        recorded = self._recorded(job)
        if isinstance(recorded, str):
            return StopAsked("refused", recorded)
        try:
            async with asyncio.timeout(LONGEST_S):
                return await self._stop(job, recorded)
        except TimeoutError:
            return StopAsked("failed", _TOO_LONG)

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()

    async def _stop(self, job: TargetJob, recorded: Recorded) -> StopAsked:
        """What `stop` does, without its limit of time."""
        for _ in range(TRIES):
            found = await self._find(job, recorded)
            if isinstance(found, Answer):
                return _failed(found)
            state = evaluate(recorded, found)
            if state.state != "running":
                return instead(state)
            asked = await self._ask(job, recorded, found)
            if asked is not None:
                return asked
        kind = self._workload.resource.kind
        return StopAsked("failed", f"the {kind} changed {TRIES} times while it was asked")

    def _recorded(self, job: TargetJob) -> Recorded | str:
        """What the run recorded of itself, or why that is not enough."""
        recorded = Recorded.read(job.scheduler.names)
        if recorded is None:
            return "the run recorded no namespace: set TOCSIN_POD_NAMESPACE in its pods"
        if recorded.namespace not in self._config.namespaces:
            return f"namespace {recorded.namespace} is not one of this target's"
        return recorded

    async def _find(self, job: TargetJob, recorded: Recorded) -> Seen | Answer:
        """The job and its pods, as they are now; an answer that says why they cannot be seen."""
        resource = self._workload.resource
        owner = self._owners.get(job.incarnation)
        if owner is None:
            own = await self._own_pod(recorded)
            if isinstance(own, Answer):
                return own
            climbed = None if own is None else await self._climb(own, recorded.namespace)
            if isinstance(climbed, Answer):
                return climbed
            owner = climbed
            if owner is not None:
                self._remember(job.incarnation, owner)
            elif own is not None or recorded.job is None:
                pods = [] if own is None else [own]
                return Seen(
                    resource=resource, job_name=None, job_uid=None, job=None, pods=pods, met=True
                )
        name = recorded.job if owner is None else owner.name
        uid = recorded.job_uid if owner is None else owner.uid
        assert name is not None
        answer = await self._api.get(resource, recorded.namespace, name)
        if answer.why and not answer.missing:
            return answer
        current = None if answer.missing else Job.read(answer.body, self._workload)
        if current is None and not answer.missing:
            return Answer(answer.status, {}, "broken answer")
        alive = await self._api.pods(
            recorded.namespace, labelSelector=f"{self._workload.pod_label}={name}"
        )
        if isinstance(alive, Answer):
            return alive
        return Seen(
            resource=resource,
            job_name=name,
            job_uid=uid,
            job=current,
            pods=alive,
            met=owner is not None,
        )

    async def _own_pod(self, recorded: Recorded) -> Pod | Answer | None:
        """The pod of the run, if it still runs."""
        name = recorded.pod or recorded.host
        if recorded.pod_uid is None or name is None:
            return None
        attempts = [{"fieldSelector": f"metadata.name={name}"}]
        if recorded.pod is None:
            # A host name may lack a part of the pod's name.
            label = f"{self._workload.pod_label}={recorded.job}"
            attempts.append({} if recorded.job is None else {"labelSelector": label})
        for selectors in attempts:
            pods = await self._api.pods(recorded.namespace, **selectors)
            if isinstance(pods, Answer):
                return pods
            for pod in pods:
                if pod.uid == recorded.pod_uid:
                    return pod
        return None

    async def _climb(self, pod: Pod, namespace: str) -> Owner | Answer | None:
        """The job that a pod belongs to; None if it belongs to none of this kind."""
        owner = pod.owner
        for resource in self._workload.owners:
            if owner is None or not owner.is_a(resource):
                return None
            if resource == self._workload.resource:
                return owner
            answer = await self._api.get(resource, namespace, owner.name)
            if answer.why and not answer.missing:
                return answer
            if answer.missing or uid_of(answer.body) != owner.uid:
                return None
            owner = controller_of(answer.body)
        return None

    async def _ask(self, job: TargetJob, recorded: Recorded, seen: Seen) -> StopAsked | None:
        """Suspend or delete a job that runs; None if it has changed in between."""
        current, name = seen.job, seen.job_name
        if current is None or name is None or not seen.same_job:
            kind = self._workload.resource.kind
            return StopAsked("refused", f"the run's pod belongs to no {kind} that is there")
        if current.finished is not None or current.leaving:
            how = current.finished or "being deleted already"
            return StopAsked("accepted", f"{seen.called} is {how}")
        why = why_not(current, seen, self._config.op)
        if why is not None:
            return StopAsked("refused", why)
        suspends = self._config.op == "suspend"
        if suspends and current.asked:
            return StopAsked("accepted", f"{seen.called} is being suspended already")
        if suspends:
            patch: dict[str, JsonValue] = {
                "metadata": {
                    "uid": current.uid,
                    "resourceVersion": current.version,
                    "annotations": {
                        _ANNOTATION: job.delivery_id,
                        f"{_ANNOTATION}-reason": job.reason,
                    },
                },
                **self._workload.suspended(),
            }
            answer = await self._api.patch(seen.resource, recorded.namespace, name, patch)
        else:
            answer = await self._api.delete(
                seen.resource, recorded.namespace, name, uid=current.uid, version=current.version
            )
        if answer.status == 409:
            return None
        if answer.missing:
            return StopAsked("accepted", f"{seen.called} is gone")
        if answer.why:
            return _failed(answer)
        if suspends and not self._workload.asks_to_suspend(answer.body):
            return StopAsked("refused", f"{seen.called} was patched, and is still not suspended")
        return StopAsked("accepted", f"{seen.called} is to {'suspend' if suspends else 'go'}")

    def _remember(self, incarnation: str, owner: Owner) -> None:
        """Keep the job of an incarnation: its pod, which tells, is gone after the stop."""
        while len(self._owners) >= _REMEMBERED:
            self._owners.pop(next(iter(self._owners)))
        self._owners[incarnation] = owner


def _failed(answer: Answer) -> StopAsked:
    """An answer that is an error. A right that is missing stays missing, a server comes back."""
    final = answer.status in (400, 403, 404, 405, 415, 422)
    return StopAsked("refused" if final else "failed", answer.why, answer.retry_after_ms)
