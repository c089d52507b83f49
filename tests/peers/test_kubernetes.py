"""Stops of jobs in a real Kubernetes: API server, controllers and etcd, with pods as processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from support.kubernetes import derived
from support.kubernetes.cluster import Cluster
from support.kubernetes.descriptions import misfits
from support.kubernetes.trainings import NAMESPACE, ROOT, Peers, shown, target_job
from support.servers import chart
from support.waiting import SOON_S, until
from tocsin.actions.targets.kind import JobSeen, StopAsked
from tocsin.actions.targets.kubernetes.api import Answer, KubernetesApi
from tocsin.actions.targets.kubernetes.backend import KubernetesBackend
from tocsin.actions.targets.kubernetes.config import KindName, KubernetesTarget, Operation
from tocsin.actions.targets.kubernetes.credentials import Cluster as Server
from tocsin.actions.targets.kubernetes.credentials import from_kubeconfig, in_cluster
from tocsin.actions.targets.kubernetes.workloads import JOB

pytestmark = pytest.mark.peers

JOBS = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs"


def conditions(found: dict[str, object]) -> set[str]:
    status = found.get("status")
    listed = status.get("conditions", []) if isinstance(status, dict) else []
    return {each["type"] for each in listed if each["status"] == "True"}


async def test_a_job_is_suspended_and_has_ended_when_its_process_has(peers: Peers) -> None:
    training = peers.training()
    job = target_job(await peers.recorded(training))
    backend = peers.target()
    pod = job.scheduler.names["pod"]
    assert await backend.inspect(job) == JobSeen("running", f"pod {pod} is Running")

    assert (await backend.stop(job)).result == "accepted"

    # The controller has confirmed it, and the process still saves.
    path = peers.path(training)
    await peers.until(lambda: "Suspended" in conditions(peers.cluster.get(path)), "suspended")
    await peers.until(lambda: training.told(job.scheduler), "it got SIGTERM")
    seen = await backend.inspect(job)
    assert seen == JobSeen("running", f"pod {pod} is Running, being ended")
    assert (await backend.stop(job)).result == "accepted"

    training.save()
    seen = await peers.looked(backend, job, "ended", "replaced", "unknown")
    assert seen == JobSeen("ended", f"Job {training.name} is suspended")
    annotations = peers.cluster.get(path)["metadata"]["annotations"]
    assert annotations["tocsin/stop"] == job.delivery_id
    assert annotations["tocsin/stop-reason"] == job.reason


async def test_a_job_that_was_resumed_is_another_incarnation(peers: Peers) -> None:
    training = peers.training()
    first = target_job(await peers.recorded(training))
    backend = peers.target()
    training.save()
    await backend.stop(first)
    await peers.looked(backend, first, "ended")

    path = peers.path(training)
    assert peers.cluster.call("PATCH", path, {"spec": {"suspend": False}})[0] == 200
    second = target_job(await peers.recorded(training))

    assert (await backend.inspect(first)).state == "replaced"
    assert (await backend.stop(first)).result == "refused"
    assert peers.cluster.get(path)["spec"]["suspend"] is False
    assert (await backend.inspect(second)).state == "running"
    # A service that was started since has only the run's record.
    assert (await peers.target().stop(first)).result == "refused"


async def test_a_job_is_deleted_with_its_pods(peers: Peers) -> None:
    training = peers.training()
    job = target_job(await peers.recorded(training))
    backend = peers.target(op="delete")

    assert (await backend.stop(job)).result == "accepted"

    await peers.until(lambda: training.told(job.scheduler), "it got SIGTERM")
    assert (await backend.inspect(job)).state == "running"
    assert (await backend.stop(job)).result == "accepted"
    training.save()
    seen = await peers.looked(backend, job, "ended", "replaced", "unknown")
    assert seen == JobSeen("ended", f"Job {training.name} is gone")
    assert peers.cluster.call("GET", peers.path(training))[0] == 404
    pods = peers.cluster.get(f"/api/v1/namespaces/{NAMESPACE}/pods")["items"]
    assert pods == []
    # One that never saw it cannot tell it from a job of another cluster.
    assert (await peers.target(op="delete").inspect(job)).state == "unknown"


@pytest.mark.parametrize("op", ["suspend", "delete"])
async def test_a_new_job_of_the_same_name_goes_on(peers: Peers, op: Operation) -> None:
    training = peers.training()
    old = target_job(await peers.recorded(training))
    backend = peers.target(op=op)
    assert (await backend.inspect(old)).state == "running"
    training.save()
    path = peers.path(training)
    peers.cluster.call("DELETE", f"{path}?propagationPolicy=Foreground")
    await peers.until(lambda: peers.cluster.call("GET", path)[0] == 404, "it is gone")

    again = peers.training(name=training.name)
    new = target_job(await peers.recorded(again))

    for target in (backend, peers.target(op=op)):
        assert (await target.inspect(old)).state == "replaced"
        assert (await target.stop(old)).result == "refused"
    assert (await peers.target().inspect(new)).state == "running"
    assert peers.cluster.get(path)["spec"]["suspend"] is False
    assert not again.told(new.scheduler)


async def test_the_api_server_refuses_another_uid(peers: Peers) -> None:
    """What stands between a stop and a job that was made anew in the last moment."""
    training = peers.training()
    await peers.recorded(training)
    api = KubernetesApi(from_kubeconfig(peers.cluster.kubeconfig("fence", peers.cluster.token)))
    other = "5f0c2a9e-0000-4000-8000-000000000002"

    patched = await api.patch(
        JOB, NAMESPACE, training.name, {"metadata": {"uid": other}, "spec": {"suspend": True}}
    )
    version = peers.cluster.get(peers.path(training))["metadata"]["resourceVersion"]
    deleted = await api.delete(JOB, NAMESPACE, training.name, uid=other, version=version)
    unknown = await api.patch(JOB, NAMESPACE, training.name, {"spec": {"suspended": True}})

    assert (patched.status, patched.why) == (422, "422 Invalid")
    assert (deleted.status, deleted.why) == (409, "409 Conflict")
    assert (unknown.status, unknown.why) == (422, "422 Invalid")
    found = peers.cluster.get(peers.path(training))
    assert found["spec"]["suspend"] is False
    assert "deletionTimestamp" not in found["metadata"]
    await api.close()


class Meddling(KubernetesApi):
    """Lets something happen between the reading of a job and the request to end it."""

    def __init__(self, server: Server, happen: list[object]) -> None:
        super().__init__(server)
        self.happen = happen

    async def patch(self, *arguments: object) -> Answer:
        if self.happen:
            await self.happen.pop()()  # type: ignore[operator]
        return await super().patch(*arguments)  # type: ignore[arg-type]


async def test_a_pod_that_fails_in_the_last_moment_is_not_mistaken(peers: Peers) -> None:
    training = peers.training()
    first = target_job(await peers.recorded(training))
    path = peers.path(training)

    async def fail() -> None:
        (training.folder / "fails").touch()
        await peers.until(lambda: peers.cluster.get(path)["status"].get("failed"), "it failed")
        (training.folder / "fails").unlink()
        await peers.recorded(training)

    config = KubernetesTarget(type="kubernetes", kind="job", namespaces=(NAMESPACE,))
    server = from_kubeconfig(peers.cluster.kubeconfig("meddling", peers.cluster.token))
    backend = KubernetesBackend(config, Meddling(server, [fail]))

    asked = await backend.stop(first)

    assert asked.result == "refused"
    assert "in place of the run's own" in asked.reason
    assert peers.cluster.get(path)["spec"]["suspend"] is False
    await backend.close()


async def test_a_change_of_the_job_does_not_keep_a_stop_from_it(peers: Peers) -> None:
    training = peers.training()
    job = target_job(await peers.recorded(training))
    path = peers.path(training)

    async def label() -> None:
        peers.cluster.call("PATCH", path, {"metadata": {"labels": {"seen": "yes"}}})

    config = KubernetesTarget(type="kubernetes", kind="job", namespaces=(NAMESPACE,))
    server = from_kubeconfig(peers.cluster.kubeconfig("meddling", peers.cluster.token))
    backend = KubernetesBackend(config, Meddling(server, [label]))

    assert (await backend.stop(job)).result == "accepted"
    assert peers.cluster.get(path)["spec"]["suspend"] is True
    await backend.close()


async def test_a_job_in_another_namespace_is_refused_without_a_request(peers: Peers) -> None:
    training = peers.training()
    job = target_job(await peers.recorded(training))
    backend = peers.target(namespaces=("other",))

    assert (await backend.stop(job)).result == "refused"
    assert (await backend.inspect(job)).state == "unknown"
    assert peers.cluster.get(peers.path(training))["spec"]["suspend"] is False


def granted(cluster: Cluster, kind: str, verb: str = "patch") -> str:
    """A token of the service account of deploy/kubernetes, in an empty namespace of its own."""
    text = (ROOT / "deploy/kubernetes" / f"{kind}.yaml").read_text().replace('"patch"', f'"{verb}"')
    for each in yaml.safe_load_all(text):
        meta, name = each["metadata"], each["kind"]
        group = "/api/v1" if name == "ServiceAccount" else f"/apis/{each['apiVersion']}"
        path = f"{group}/namespaces/{meta['namespace']}/{name.lower()}s"
        cluster.call("DELETE", f"{path}/{meta['name']}")
        cluster.create(path, each)
    return cluster.account_token("tocsin", "tocsin-stopper")


async def works(peers: Peers, path: str, token: str) -> None:
    """A right holds a moment after it was given."""
    await until(lambda: peers.cluster.call("GET", path, token=token)[0] == 200, SOON_S, "it may")


async def test_the_rights_that_we_document_stop_one_kind_in_one_namespace(peers: Peers) -> None:
    training = peers.training()
    job = target_job(await peers.recorded(training))
    token = granted(peers.cluster, "job")
    await works(peers, peers.path(training), token)
    elsewhere = JOBS.replace(NAMESPACE, "other")
    peers.cluster.create(
        elsewhere, {"metadata": {"name": "theirs"}, "spec": {"template": training.template}}
    )
    names = {**job.scheduler.names, "namespace": "other", "job": "theirs"}
    theirs = target_job(job.scheduler.model_copy(update={"names": names}))

    # Neither another namespace nor a deletion, even if the configuration allows it.
    both = peers.target(token=token, namespaces=(NAMESPACE, "other"))
    assert await both.inspect(theirs) == JobSeen("unknown", "403 Forbidden")
    assert await both.stop(theirs) == StopAsked("refused", "403 Forbidden")
    deleting = peers.target(op="delete", token=token)
    assert await deleting.stop(job) == StopAsked("refused", "403 Forbidden")

    backend = peers.target(token=token)
    assert (await backend.stop(job)).result == "accepted"
    training.save()
    assert (await peers.looked(backend, job, "ended", "unknown")).state == "ended"
    peers.cluster.call("DELETE", f"{elsewhere}/theirs?propagationPolicy=Background")


async def test_an_api_server_that_is_away_for_a_while(peers: Peers) -> None:
    training = peers.training()
    job = target_job(await peers.recorded(training))
    backend = peers.target()
    assert (await backend.inspect(job)).state == "running"
    peers.cluster.stop("apiserver")
    try:
        assert await backend.inspect(job) == JobSeen("unknown", "connection refused")
        assert await backend.stop(job) == StopAsked("failed", "connection refused")
    finally:
        peers.cluster.start_apiserver()

    assert (await backend.stop(job)).result == "accepted"
    training.save()
    assert (await peers.looked(backend, job, "ended")).state == "ended"


async def test_a_service_account_whose_token_is_replaced(peers: Peers, tmp_path: Path) -> None:
    """In a pod: the kubelet writes another token into the file before the old one ends."""
    training = peers.training()
    job = target_job(await peers.recorded(training))
    folder = tmp_path / "serviceaccount"
    folder.mkdir()
    (folder / "ca.crt").write_bytes(peers.cluster.authority.read_bytes())
    (folder / "token").write_text("an-old-one")
    host, _, port = peers.cluster.url.removeprefix("https://").partition(":")
    environ = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
    config = KubernetesTarget(type="kubernetes", kind="job", namespaces=(NAMESPACE,))
    backend = KubernetesBackend(config, KubernetesApi(in_cluster(environ, folder)))

    assert await backend.stop(job) == StopAsked("failed", "401 Unauthorized")

    token = granted(peers.cluster, "job")
    await works(peers, peers.path(training), token)
    (folder / "token").write_text(f"{token}\n")
    assert (await backend.stop(job)).result == "accepted"
    await backend.close()


async def test_each_pod_of_an_indexed_job_names_the_same_job(peers: Peers) -> None:
    training = peers.training(completionMode="Indexed", completions=2, parallelism=2)
    jobs = [target_job(await peers.recorded(training)) for _ in range(2)]
    backend = peers.target()

    # One rank has left; the other hangs, and is what the stop is for.
    peers.kubelet.process(jobs[0].scheduler.names["pod_uid"]).kill()
    await peers.until(
        lambda: peers.cluster.get(peers.path(training))["status"].get("failed"), "one has failed"
    )
    assert (await backend.inspect(jobs[0])).state == "running"
    assert (await backend.stop(jobs[0])).result == "accepted"
    training.save()
    for job in jobs:
        assert (await peers.looked(backend, job, "ended", "replaced")).state == "ended"


KINDS: list[KindName] = ["jobset", "trainjob", "pytorchjob"]


@pytest.mark.parametrize("op", ["suspend", "delete"])
@pytest.mark.parametrize("kind", KINDS)
async def test_kinds_of_operators(
    operators: Cluster, peers: Peers, kind: KindName, op: Operation
) -> None:
    """Their real controllers, of the versions in support/kubernetes/build.py."""
    training = peers.training(kind)
    jobs = [target_job(await peers.recorded(training)) for _ in range(2)]
    token = granted(operators, kind, "patch" if op == "suspend" else "delete")
    await works(peers, peers.path(training), token)
    backend = peers.target(kind, op, token=token)
    assert (await backend.inspect(jobs[0])).state == "running"
    if kind != "pytorchjob":
        # The Job below it is not what to suspend: its JobSet would resume it.
        below = await peers.target("job").stop(jobs[0])
        assert below.result == "refused"
        assert "is managed by JobSet" in below.reason

    asked = await backend.stop(jobs[1])

    assert asked.result == "accepted", shown(operators.get(peers.path(training)))
    await peers.until(lambda: all(training.told(job.scheduler) for job in jobs), "all got SIGTERM")
    assert (await backend.inspect(jobs[0])).state == "running"
    training.save()
    for job in jobs:
        if op == "suspend" or job is not jobs[0]:
            seen = await peers.looked(backend, job, "ended", "replaced")
            assert seen.state == "ended", seen
    if op == "suspend":
        assert "Suspended" in conditions(operators.get(peers.path(training)))
        peers.cluster.call("DELETE", f"{peers.path(training)}?propagationPolicy=Background")
    else:
        assert operators.call("GET", peers.path(training))[0] == 404


@pytest.mark.parametrize("kind", KINDS)
def test_the_answers_of_the_unit_tests_fit_the_descriptions_of_the_kinds(
    operators: Cluster, kind: KindName
) -> None:
    """No field of theirs is unknown, and none that is needed is missing."""
    description = yaml.safe_load(operators.programs.crd(f"{kind}s").read_text())
    for state in ("running", "asked", "suspended"):
        found = derived.job(kind, state)  # type: ignore[arg-type]  # KINDS has no Jobs
        (version,) = [
            one for one in description["spec"]["versions"]
            if found["apiVersion"].endswith(f"/{one['name']}")
        ]  # fmt: skip
        assert misfits(found, version["schema"]["openAPIV3Schema"]) == []


def test_the_example_is_a_job_that_the_api_server_takes(cluster: Cluster) -> None:
    manifest = yaml.safe_load((ROOT / "examples/kubernetes/job.yaml").read_text())
    status, answer = cluster.call("POST", f"{JOBS}?dryRun=All&fieldValidation=Strict", manifest)
    assert status == 201, shown(answer)


@pytest.mark.parametrize("bucket", [False, True], ids=["volume", "bucket"])
def test_the_chart_makes_what_the_api_server_takes(cluster: Cluster, bucket: bool) -> None:
    values = ("config.store=s3://b/p", "store.environment=aws", "store.serviceAccount=writer")
    made = chart.manifests(*chart.EVERYTHING, *(values if bucket else ()))
    assert len(made) == 9 - bucket
    for each in made:
        group = each["apiVersion"]
        root = f"/apis/{group}" if "/" in group else f"/api/{group}"
        path = f"{root}/namespaces/other/{each['kind'].lower()}s"
        status, answer = cluster.call("POST", f"{path}?dryRun=All&fieldValidation=Strict", each)
        assert status == 201, (each["kind"], each["metadata"]["name"], shown(answer))
