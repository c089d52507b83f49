"""deploy/kubernetes grants the rights that a target uses, and no more; the page shows them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tocsin.actions.targets.kubernetes.config import KindName
from tocsin.actions.targets.kubernetes.workloads import WORKLOADS
from tocsin.emitter.process import pod

ROOT = Path(__file__).resolve().parents[5]
PAGE = (ROOT / "docs/how-to/kubernetes.md").read_text()


def role(kind: str) -> dict[str, dict[str, list[str]]]:
    """The verbs by group and resource."""
    manifests = yaml.safe_load_all((ROOT / "deploy/kubernetes" / f"{kind}.yaml").read_text())
    [found] = [each for each in manifests if each["kind"] == "Role"]
    rights: dict[str, dict[str, list[str]]] = {}
    for rule in found["rules"]:
        [group], [resource] = rule["apiGroups"], rule["resources"]
        rights.setdefault(group, {})[resource] = rule["verbs"]
    return rights


@pytest.mark.parametrize("kind", WORKLOADS)
def test_a_role_holds_what_a_target_asks_for_and_no_more(kind: KindName) -> None:
    workload = WORKLOADS[kind]
    expected: dict[str, dict[str, list[str]]] = {"": {"pods": ["list"]}}
    for resource in workload.owners:
        expected.setdefault(resource.group, {})[resource.plural] = ["get"]
    expected[workload.resource.group][workload.resource.plural].append("patch")
    assert role(kind) == expected


def test_the_page_shows_the_role_of_jobs() -> None:
    text = (ROOT / "deploy/kubernetes/job.yaml").read_text()
    rules = text[text.index("rules:") :].partition("---")[0].splitlines()
    assert len(rules) == 3
    assert all(f"   {line}\n" in PAGE for line in rules)


def test_the_example_tells_what_the_emitter_reads() -> None:
    [example] = yaml.safe_load_all((ROOT / "examples/kubernetes/job.yaml").read_text())
    env = {
        one["name"]: one.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        for one in example["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    for variable in (pod.NAMESPACE, pod.POD, pod.POD_UID, pod.JOB, pod.JOB_UID):
        assert env[variable] in PAGE
        assert f"name: {variable}\n" in PAGE
