"""Which backend may end the job of a run: the first entry that fits, and none without one."""

from __future__ import annotations

import pytest

from support.records.issues import view
from tocsin.actions.decision.stop_policy import Permit, StopPolicy
from tocsin.schemas.configuration.policy import PolicyEntry
from tocsin.schemas.records.runs import SchedulerJob

JOB = SchedulerJob(kind="slurm", names={"job": "7"})
RUN = view().model_copy(update={"labels": {"team": "vision", "run": "another"}})
TARGETS = {
    "pods": lambda job: job.kind == "kubernetes",
    "a100": lambda job: job.kind == "slurm",
    "any": lambda job: True,
}


def entry(index: int, match: dict[str, tuple[str, ...]], *names: str) -> PolicyEntry:
    raw = {"match": match, "may_stop_on": list(names)}
    made = PolicyEntry.model_validate(raw)
    made.placed(("policy", index), raw)
    return made


@pytest.mark.parametrize(
    ("match", "names", "target"),
    [
        ({}, ("a100",), "a100"),
        ({"team": ("v*",)}, ("a100",), "a100"),
        ({"run": ("run-1",)}, ("a100",), "a100"),
        ({"run": ("another",)}, ("a100",), None),
        ({"team": ("speech",)}, ("a100",), None),
        ({"team": ("vision",), "env": ("prod",)}, ("a100",), None),
        ({}, ("pods",), None),
        ({}, ("pods", "any", "a100"), "any"),
    ],
)
def test_an_entry_permits_what_it_matches_on_a_target_that_fits(
    match: dict[str, tuple[str, ...]], names: tuple[str, ...], target: str | None
) -> None:
    policy = StopPolicy([entry(0, match, *names)], TARGETS)
    assert policy.permit(RUN, JOB).target == target


def test_the_first_entry_that_fits_decides_and_is_named() -> None:
    entries = [
        entry(0, {"team": ("speech",)}, "a100"),
        entry(1, {}, "pods"),
        entry(2, {"team": ("vision",)}, "pods", "a100"),
        entry(3, {}, "any"),
    ]
    assert StopPolicy(entries, TARGETS).permit(RUN, JOB) == Permit(
        "a100", "policy (policy.2.may_stop_on.1)"
    )


def test_a_refusal_says_what_to_add() -> None:
    assert StopPolicy().permit(view(), JOB) == Permit(
        None,
        "the policy permits none for this run; to permit it: targets: {my-slurm: {type: slurm}} "
        "and policy: [{match: {run: run-1}, may_stop_on: [my-slurm]}]",
    )
    pods = {"pods": TARGETS["pods"]}
    refused = StopPolicy([entry(0, {}, "pods")], pods).permit(RUN, JOB)
    assert refused.target is None
    assert refused.why.startswith(
        "no target that the policy permits (policy.0) ends jobs of slurm; to permit it: "
    )
