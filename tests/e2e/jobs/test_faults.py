"""A real training goes bad: found where it began, told, stopped. On both buses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache

import pytest
from cloudevents.core.formats.json import JSONFormat
from standardwebhooks import Webhook

from support.processes.site import (
    GPT,
    HOOK_SECRET,
    RESNET,
    Site,
    on_both_buses,
    on_kafka,
)
from support.servers.receiver import Receiver
from support.waiting import wait_until

K = 25
"""The step of each fault."""

HEALTHY_STEPS = {GPT: 40, RESNET: 40}


def healthy(module: str) -> tuple[str, ...]:
    """The arguments of a training with which nothing is wrong."""
    return ("--steps", str(HEALTHY_STEPS[module]), "--weights-hash")


def _verified_hooks(receiver: Receiver, run_id: str) -> list[dict[str, object]]:
    """The webhooks about a run; each signature is checked by the standardwebhooks library."""
    webhook = Webhook(HOOK_SECRET)
    bodies = []
    for request in receiver.about(run_id):
        webhook.verify(request.body.decode(), request.headers)
        bodies.append(json.loads(request.body))
    return bodies


@on_kafka
def test_a_nan_in_one_gradient_of_the_gpt_is_named_and_the_job_stopped(
    site: Site, receiver: Receiver
) -> None:
    run_id = f"gpt-nan-{site.kind}"
    tensor = "blocks.1.attention.qkv.weight"
    finished = site.train(
        GPT, "--fault", "nan_gradient", "--fault-at", str(K), "--fault-tensor", tensor,
        run_id=run_id,
    )  # fmt: skip
    issue = finished.stopped_by("nonfinite")
    assert issue["first_step"] in (K, K + 1), finished
    assert issue["first_rank"] == 0
    assert issue["subject"]["name"] == tensor, finished
    assert "done after" not in finished.stdout

    wait_until(lambda: receiver.about(run_id), what="webhook")
    (request, *_) = receiver.about(run_id)
    event = JSONFormat().read(None, request.body)
    assert event.get_type() == "tocsin.issue.firing"
    assert event.get_datacontenttype() == "application/json"
    assert request.headers["content-type"].startswith("application/cloudevents+json")
    bodies = _verified_hooks(receiver, run_id)
    assert {body["type"] for body in bodies} == {"tocsin.issue.firing"}
    assert bodies[0]["data"]["issue_id"] == issue["id"]  # type: ignore[index]


@pytest.mark.torture  # in CI: a smaller network, in test_must_hold
@on_both_buses
def test_a_corrupt_batch_of_the_resnet_is_seen_in_the_loss(site: Site, receiver: Receiver) -> None:
    run_id = f"resnet-nan-{site.kind}"
    finished = site.train(RESNET, "--fault", "nan_batch", "--fault-at", str(K), run_id=run_id)
    issue = finished.stopped_by("nonfinite")
    assert issue["first_step"] in (K, K + 1), finished
    # The batch itself is named, not what followed from it.
    assert (issue["subject"]["kind"], issue["subject"]["collection"]) == ("tensor", "inputs"), (
        finished
    )
    wait_until(lambda: receiver.about(run_id), what="webhook")
    assert _verified_hooks(receiver, run_id)


@pytest.mark.torture  # in CI: a smaller network, in test_must_hold
@on_both_buses
def test_a_learning_rate_that_is_a_thousand_times_too_high_is_stopped(site: Site) -> None:
    finished = site.train(
        RESNET, "--fault", "diverge", "--fault-at", str(K), "--steps", "400",
        run_id=f"resnet-diverge-{site.kind}",
    )  # fmt: skip
    finished.stopped_by("nonfinite", "loss_diverged")


@cache
def plain_output(module: str) -> str:
    """What a training prints without tocsin; the last line is the SHA-256 of the weights."""
    plain = subprocess.run(
        [sys.executable, "-m", module, "--threads", "1", *healthy(module)],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert plain.returncode == 0, plain.stderr
    assert "weights sha256" in plain.stdout
    return plain.stdout


@pytest.mark.torture  # in CI: the GPT and a smaller network, in test_must_hold
@pytest.mark.parametrize(
    ("site", "module"),
    [
        ("embedded", GPT),
        ("embedded", RESNET),
        pytest.param("kafka", GPT, marks=pytest.mark.kafka),
        pytest.param("kafka", RESNET, marks=pytest.mark.kafka),
    ],
    indirect=["site"],
)
def test_a_healthy_training_is_left_alone_bit_for_bit(site: Site, module: str) -> None:
    watched = site.train(
        module, *healthy(module), run_id=f"healthy-{module.split('.')[-1]}-{site.kind}"
    )
    assert watched.exit_code == 0, watched
    assert watched.stdout == plain_output(module)
    assert watched.issues == [], watched
    assert watched.summary["outcome"] == "completed"
    assert watched.summary["steps"] == HEALTHY_STEPS[module]
    assert watched.summary["stop"] is None
    assert watched.summary["capture"]["dropped"] == 0, watched
    assert f"{HEALTHY_STEPS[module]} steps watched, 0 issues" in watched.stderr


@pytest.mark.torture  # in CI: smaller ranks, in test_must_hold
@on_both_buses
@pytest.mark.parametrize("fault", ["nan_gradient", "nan_batch"])
def test_under_torchrun_the_rank_is_named_and_no_rank_is_restarted(site: Site, fault: str) -> None:
    finished = site.run(
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
        "--max-restarts", "2", "-m", "tocsin.console.demo.trainings.ddp",
        "--steps", "2000", "--fault", fault, "--fault-rank", "1", "--fault-at", str(K),
        run_id=f"ddp-{fault}-{site.kind}",
        timeout_s=120,
    )  # fmt: skip
    issue = finished.stopped_by("nonfinite")
    assert issue["first_rank"] == 1, finished
    assert issue["first_step"] in (K, K + 1), finished
    assert finished.stdout.count("fault nan") == 1, finished  # no second start
    assert "done after" not in finished.stdout
