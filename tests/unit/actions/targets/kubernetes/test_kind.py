"""What may be configured of a target in Kubernetes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tocsin.actions.receivers.address_guard import AddressGuard
from tocsin.actions.targets.kind import TargetContext
from tocsin.actions.targets.kubernetes.config import KubernetesTarget
from tocsin.actions.targets.kubernetes.kind import Kubernetes
from tocsin.schemas.errors import ConfigurationError, MissingExtra
from tocsin.schemas.records.runs import SchedulerJob

READ: dict[str, Any] = {"type": "kubernetes", "kind": "job", "namespaces": ["train"]}


def context(folder: Path) -> TargetContext:
    return TargetContext(secrets={}, guard=AddressGuard(private=False), folder=folder, environ={})


def test_a_target_suspends_unless_it_says_otherwise() -> None:
    config = KubernetesTarget.model_validate(READ)
    assert (config.op, config.namespaces) == ("suspend", ("train",))
    assert Kubernetes().can_end(config, SchedulerJob(kind="kubernetes"))
    assert not Kubernetes().can_end(config, SchedulerJob(kind="slurm"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "deployment"},
        {"op": "kill"},
        {"namespaces": []},
        {"namespaces": ["Train"]},
        {"namespaces": ["a/../b"]},
        {"namespaces": ["x" * 64]},
        {"token": "x"},
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        KubernetesTarget.model_validate(READ | wrong)


def test_a_context_needs_a_kubeconfig() -> None:
    config = KubernetesTarget.model_validate(READ | {"context": "training"})
    [problem] = Kubernetes().check(config, ("targets", "k8s"))
    assert problem.loc == ("targets", "k8s", "context")
    whole = KubernetesTarget.model_validate(READ | {"context": "t", "kubeconfig": "k"})
    assert list(Kubernetes().check(whole, ("targets", "k8s"))) == []


async def test_a_target_that_cannot_log_in_is_named(tmp_path: Path) -> None:
    config = KubernetesTarget.model_validate(READ)
    with pytest.raises(ConfigurationError, match="target 'k8s': not in a pod of Kubernetes"):
        Kubernetes().target("k8s", config, context(tmp_path))
    relative = KubernetesTarget.model_validate(READ | {"kubeconfig": "kube/config"})
    with pytest.raises(ConfigurationError, match=f"target 'k8s': {tmp_path}/kube/config: "):
        Kubernetes().target("k8s", relative, context(tmp_path))


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kubernetes, "libraries", ("no_such_library",))
    with pytest.raises(MissingExtra, match="a target of the type kubernetes needs the extra"):
        Kubernetes().check_installed()
