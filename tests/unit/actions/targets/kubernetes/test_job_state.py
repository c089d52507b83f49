"""Whether an incarnation still runs, from what the API server shows."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from tocsin.actions.targets.kind import JobSeen
from tocsin.actions.targets.kubernetes.job_state import Seen, evaluate, why_not
from tocsin.actions.targets.kubernetes.objects import Job, Owner, Pod, Recorded
from tocsin.actions.targets.kubernetes.workloads import JOB

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)
MS = int(NOON.timestamp() * 1000)
RECORDED = Recorded(
    namespace="train", pod="gpt-0-abcde", pod_uid="a0", container="trainer", noted_ms=MS + 5000
)
OWN = Pod(
    name="gpt-0-abcde",
    uid="a0",
    created=NOON,
    phase="Running",
    leaving=False,
    slot="gpt-0",
    owner=None,
    started={"trainer": NOON},
)
SIBLING = replace(OWN, name="gpt-1-fghij", uid="a1", slot="gpt-1")
SUCCESSOR = replace(OWN, name="gpt-0-vwxyz", uid="a2", created=NOON + timedelta(minutes=1))
RUNNING = Job(
    name="gpt",
    uid="j1",
    version="7",
    created=NOON,
    asked=False,
    suspended=False,
    finished=None,
    leaving=False,
    owner=None,
    queue=None,
)
ANOTHER = replace(RUNNING, uid="j2", created=NOON + timedelta(minutes=1))
SUSPENDED = replace(RUNNING, asked=True, suspended=True)
GONE = "pod gpt-1-fghij of Job gpt is Running"


def seen(job: Job | None, *pods: Pod, uid: str | None = "j1", met: bool = True) -> Seen:
    return Seen(resource=JOB, job_name="gpt", job_uid=uid, job=job, pods=pods, met=met)


@pytest.mark.parametrize(
    ("found", "state", "reason"),
    [
        (seen(RUNNING, OWN), "running", "pod gpt-0-abcde is Running"),
        # Suspended, its controller says; its process still saves.
        (seen(SUSPENDED, replace(OWN, leaving=True)), "running", "being ended"),
        (seen(None, OWN), "running", "pod gpt-0-abcde is Running"),
        (seen(RUNNING, SIBLING), "running", GONE),
        (seen(None, SIBLING), "running", GONE),
        (seen(RUNNING, SIBLING, SUCCESSOR), "replaced", "pod gpt-0-vwxyz runs in place"),
        (seen(RUNNING, replace(SUCCESSOR, leaving=True)), "running", "being ended"),
        (seen(RUNNING), "replaced", "Job gpt starts another"),
        (seen(SUSPENDED), "ended", "Job gpt is suspended"),
        (seen(replace(RUNNING, asked=True)), "running", "has not suspended it yet"),
        # Of an earlier time, and resumed since.
        (seen(replace(RUNNING, suspended=True)), "replaced", "starts another"),
        (seen(replace(RUNNING, finished="Complete", asked=True)), "ended", "Job gpt is Complete"),
        (seen(replace(RUNNING, leaving=True)), "running", "is being deleted"),
        (seen(None), "ended", "Job gpt is gone"),
        (seen(None, met=False), "unknown", "runs in another cluster"),
        (seen(ANOTHER), "replaced", "another one now, with the uid j2"),
        (seen(ANOTHER, SUCCESSOR), "replaced", "another one now"),
        # Its own pods may run on where it was deleted without them.
        (seen(ANOTHER, SIBLING, SUCCESSOR), "running", GONE),
        # The run recorded no uid, and its pod is gone.
        (seen(SUSPENDED, uid=None), "ended", "Job gpt is suspended"),
        (seen(None, uid=None), "unknown", "recorded no uid of Job gpt"),
        (seen(RUNNING, SIBLING, uid=None), "unknown", "recorded no uid of Job gpt"),
        (seen(RUNNING, SUCCESSOR, uid=None), "replaced", "in place of the run's own"),
    ],
)
def test_pods_decide(found: Seen, state: str, reason: str) -> None:
    result = evaluate(RECORDED, found)
    assert (result.state, reason in result.reason) == (state, True), result


@pytest.mark.parametrize(
    ("recorded", "state"),
    [
        (RECORDED, "running"),
        (replace(RECORDED, noted_ms=MS - 1), "replaced"),
        (replace(RECORDED, noted_ms=MS - 1, container=None), "replaced"),
        (replace(RECORDED, noted_ms=MS - 1, container="other"), "running"),
        (replace(RECORDED, noted_ms=0), "running"),
    ],
)
def test_a_container_that_was_started_again_in_its_pod(recorded: Recorded, state: str) -> None:
    assert evaluate(recorded, seen(RUNNING, OWN)).state == state


def test_of_several_containers_only_the_runs_own_counts() -> None:
    """A container beside it that was started again does not make a new incarnation."""
    pod = replace(OWN, started={"trainer": NOON, "proxy": NOON + timedelta(hours=1)})
    assert evaluate(RECORDED, seen(RUNNING, pod)).state == "running"
    unknown = replace(RECORDED, container=None)
    assert evaluate(unknown, seen(RUNNING, pod)).state == "running"


@pytest.mark.parametrize(
    ("recorded", "state"),
    [
        (replace(RECORDED, pod=None, host="gpt-0"), "replaced"),
        (replace(RECORDED, pod=None, host="gpt-0-abcde"), "replaced"),
        (replace(RECORDED, pod=None, host="gpt-1"), "running"),
        (replace(RECORDED, pod=None, host=None), "running"),
    ],
)
def test_a_host_name_tells_which_pod_it_was(recorded: Recorded, state: str) -> None:
    assert evaluate(recorded, seen(RUNNING, SUCCESSOR)).state == state


def test_without_a_job_only_the_pod_tells() -> None:
    found = Seen(resource=JOB, job_name=None, job_uid=None, job=None, pods=(OWN,), met=True)
    assert evaluate(RECORDED, found).state == "running"
    assert evaluate(RECORDED, replace(found, pods=())) == JobSeen(
        "unknown",
        "the run's pod is not in namespace train, and the run recorded neither TOCSIN_JOB_NAME nor "
        "TOCSIN_JOB_UID",
    )


def test_what_would_not_last_is_not_asked() -> None:
    found = seen(RUNNING)
    below = replace(RUNNING, owner=Owner("jobset.x-k8s.io", "JobSet", "gpt", "s1"))
    queued = replace(RUNNING, queue="vision")
    assert why_not(RUNNING, found, "suspend") is None
    assert (
        why_not(replace(RUNNING, owner=Owner("batch", "CronJob", "n", "c")), found, "suspend")
        is None
    )
    assert "is managed by JobSet gpt" in (why_not(below, found, "delete") or "")
    assert "Kueue" in (why_not(queued, found, "suspend") or "")
    assert why_not(queued, found, "delete") is None


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        ({"pod": "../secrets"}, "pod"),
        ({"pod_uid": "a b"}, "pod_uid"),
        ({"job": "x?y"}, "job"),
        ({"job_uid": "=,!"}, "job_uid"),
    ],
)
def test_what_cannot_be_a_name_counts_as_missing(names: dict[str, str], missing: str) -> None:
    """Records come from the trainings: their names become parts of paths and selectors."""
    whole = {"namespace": "train", "pod": "gpt", "pod_uid": "a0", "job": "gpt", "job_uid": "j1"}
    recorded = Recorded.read(whole | names | {"noted_ms": "soon"})
    assert recorded is not None
    assert getattr(recorded, missing) is None
    assert recorded.noted_ms == 0


@pytest.mark.parametrize("namespace", ["", "Train", "a/b", "..", "a b"])
def test_without_a_namespace_nothing_is_known(namespace: str) -> None:
    assert Recorded.read({"namespace": namespace, "pod": "gpt"}) is None
