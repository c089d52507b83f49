"""`tocsin issues`, `why` and `stop` from another terminal, on both buses."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from support.processes.site import (
    KAFKA,
    LATER_EMBEDDED,
    SCRIPTS,
    Site,
    embedded_site_in,
    kafka_site_in,
    on_embedded,
)
from support.servers.receiver import Receiver
from support.waiting import wait_until
from tocsin.bus.port import Outgoing, Partition
from tocsin.bus.urls import open_bus
from tocsin.schemas.ids import incarnation_id, new_id
from tocsin.schemas.key_folder import keys_folder, own_key
from tocsin.schemas.records.events import Event
from tocsin.schemas.records.stops.commands import StopRefused, StopRequested
from tocsin.schemas.records.wire import meta_of, signature_headers
from tocsin.schemas.topics import Topics, issue_partition


@pytest.fixture
def bare_site(request: pytest.FixtureRequest, tmp_path: Path, receiver: Receiver) -> Site:
    """A site without workers: on Kafka nobody makes a view of a run there."""
    if request.param == "embedded":
        return embedded_site_in(tmp_path, receiver)
    return kafka_site_in(tmp_path, request.getfixturevalue("kafka_url"), receiver)


async def _command(site: Site, run_id: str, incarnation: str) -> None:
    """Send what an action worker would: signed by the trusted key, right in all but one."""
    now_ms = time.time_ns() // 1_000_000
    command = StopRequested(
        command_id=new_id(),
        run_id=run_id,
        incarnation=incarnation,
        reason="late",
        requested_ms=now_ms,
        not_after_ms=now_ms + 600_000,
        nonce=new_id(),
    )
    event = Event.wrap(command, id=command.command_id, source="/actions", time_ms=now_ms)
    key, value = command.key.encode(), event.encode()
    signing = own_key(keys_folder(site.environ))
    headers = (*meta_of(event).headers(), *signature_headers(signing.sign(key, value)))
    topic = Partition(Topics(site.prefix).control, issue_partition(run_id))
    async with open_bus(site.bus_url) as bus:
        producer = await bus.producer()
        await producer.publish([Outgoing(topic, key, value, headers)])
        await producer.close()


@pytest.mark.parametrize("bare_site", [LATER_EMBEDDED, KAFKA], indirect=True)
def test_a_person_stops_a_run_by_hand_and_neither_a_stranger_nor_an_old_command_does(
    bare_site: Site,
) -> None:
    site, reason = bare_site, "wrong data set"
    options = ["--config", str(site.config)]
    # A name that can be shortened where a view lists it; else it has to be given whole.
    run_id = f"by-hand-{site.kind}"
    named = "by-ha" if site.kind == "embedded" else run_id
    running = site.start(
        sys.executable, "-u", str(SCRIPTS / "long_loop.py"), run_id=run_id,
        options=["--drain", "3"], environ={"SLURM_JOB_ID": "2"},
    )  # fmt: skip
    wait_until(lambda: "step 20 " in running.stdout, timeout_s=60, what="the job trains")

    asyncio.run(_command(site, run_id, incarnation_id(run_id, "slurm-1", 0, 0)))
    wait_until(lambda: site.said(run_id, StopRefused), what="a refusal")
    assert [refusal.why for refusal in site.said(run_id, StopRefused)] == ["other_incarnation"]
    assert running.process.poll() is None

    stranger = replace(site, environ={**site.environ, "XDG_CONFIG_HOME": str(site.folder / "two")})
    refused = stranger.tocsin("stop", run_id, "--reason", "mine", *options)
    assert refused.returncode == 1, refused
    assert re.search(r"refused \(untrusted_key\): .*actions\.pub", refused.stdout), refused
    assert running.process.poll() is None

    stopped = site.tocsin("stop", named, "--reason", reason, *options)
    assert stopped.returncode == 0, stopped
    said = stopped.stdout.splitlines()
    assert said[0].startswith(f"asked run {run_id} to stop"), stopped
    assert "acknowledged by" in said[1]
    assert re.search(r"rank 0 left its loop at step \d", stopped.stdout), stopped
    assert "the job exited cleanly with 79" in said[-1]

    finished = running.finish()
    assert finished.exit_code == 79, finished
    stop = finished.summary["stop"]
    assert (stop["reason"], stop["how"], stop["issue"]) == (reason, "edge", None), finished
    assert "@" in stop["requested_by"]
    assert f"requested by {stop['requested_by']}: {reason}" in finished.stderr
    assert f"stopped by {stop['requested_by']}: {reason}" in finished.stderr.splitlines()[-1]
    if site.kind == "embedded":
        again = site.tocsin("stop", named, "--reason", reason, *options)
        assert again.returncode == 2
        assert "has ended (stopped with exit code 79)" in again.stderr
        told = json.loads(site.tocsin("why", run_id, "--json", *options).stdout)
        assert told["issue"] is None
        assert told["stop"]["reason"] == reason
        states = ["requested", "acknowledged", "checkpoint_decided", "left", "exited"]
        assert [*told["stop"]["states"]] == states


@pytest.mark.torture
@on_embedded
def test_what_was_found_is_listed_and_told(site: Site) -> None:
    options = ["--config", str(site.config)]
    run_id = f"told-{site.kind}"
    finished = site.run(sys.executable, str(SCRIPTS / "same_nan.py"), run_id=run_id)
    assert finished.exit_code == 79, finished
    issue_id = finished.issues[0]["id"]
    short = issue_id[:8]
    pointed = f"; tocsin why {short} --config {site.config}"
    assert finished.stderr.splitlines()[-1].endswith(pointed), finished

    (line,) = site.tocsin("issues", run_id, "--rule", "nonfinite", *options).stdout.splitlines()[1:]
    assert re.match(rf" {short} +{run_id} +critical +nonfinite +firing +step 20 ", line), line
    assert "stop: delivered" in line
    assert "hook: delivered" in line
    listed = json.loads(site.tocsin("issues", "--severity", "critical", "--json", *options).stdout)
    (facts,) = [issue for issue in listed["issues"] if issue["run_id"] == run_id]
    assert facts["issue_id"] == issue_id
    assert {d["action"]: d["state"] for d in facts["deliveries"]} == {
        "stop": "delivered", "hook": "delivered",
    }  # fmt: skip

    told = site.tocsin("why", short, *options)
    assert told.returncode == 0, told
    for said in (
        f"critical: nonfinite in run {run_id}",
        "gradients of 0.weight, rank 0, step 20",
        "nans 1",
        "firing  at step 20",
        "decided by tocsin.yaml:8:",
        "acknowledged",
        "left at step",
        "exited cleanly with 79",
        issue_id,
    ):
        assert said in told.stdout, told.stdout
    assert "▁" in told.stdout
    assert "\x1b" not in told.stdout
    facts = json.loads(site.tocsin("why", run_id, "--json", *options).stdout)
    assert facts["issue"]["issue_id"] == issue_id
    assert facts["stop"]["requested_by"].startswith("actions@")
