"""deploy/kubernetes grants the rights that a target uses, and no more; the page shows them."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from tocsin.actions.targets.kubernetes.config import KindName
from tocsin.actions.targets.kubernetes.workloads import WORKLOADS
from tocsin.emitter.process import pod
from tocsin.emitter.stop.verification import trusted_paths

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


def test_the_token_of_the_page_does_not_expire_and_is_of_the_account_with_the_role() -> None:
    [account, *_] = yaml.safe_load_all((ROOT / "deploy/kubernetes/job.yaml").read_text())
    [text] = re.findall(r"kubectl apply -f - <<END\n(.*?)\n +END\n", PAGE, re.DOTALL)
    secret = yaml.safe_load(textwrap.dedent(text))

    assert secret["type"] == "kubernetes.io/service-account-token"
    assert secret["metadata"]["namespace"] == account["metadata"]["namespace"]
    [named] = secret["metadata"]["annotations"].items()
    assert named == ("kubernetes.io/service-account.name", account["metadata"]["name"])


def example() -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod of the example, and its variables: the value, or the field that has it."""
    [made] = yaml.safe_load_all((ROOT / "examples/kubernetes/job.yaml").read_text())
    spec = made["spec"]["template"]["spec"]
    return spec, {
        one["name"]: one.get("value") or one["valueFrom"]["fieldRef"]["fieldPath"]
        for one in spec["containers"][0]["env"]
    }


def test_the_example_obeys_the_keys_of_a_config_map_that_the_page_makes() -> None:
    made, env = example()

    [mount] = made["containers"][0]["volumeMounts"]
    [volume] = made["volumes"]
    assert trusted_paths(env) == [Path(mount["mountPath"])]
    assert mount["readOnly"] is True
    assert mount["name"] == volume["name"]
    assert f"kubectl create configmap {volume['configMap']['name']} -n train --from-file=" in PAGE


def test_the_example_has_the_labels_that_the_policy_of_the_page_matches() -> None:
    _, env = example()
    [policy] = re.findall(r"- (\{match: .*may_stop_on.*\})", PAGE)
    labels = dict(part.split("=") for part in env["TOCSIN_LABELS"].split(","))
    assert yaml.safe_load(policy)["match"].items() <= labels.items()


def test_the_example_tells_what_the_emitter_reads() -> None:
    _, env = example()
    for variable in (pod.NAMESPACE, pod.POD, pod.POD_UID, pod.JOB, pod.JOB_UID):
        assert env[variable] in PAGE
        assert f"name: {variable}\n" in PAGE
