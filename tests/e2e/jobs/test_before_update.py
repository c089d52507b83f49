"""`stop.before_update` in real jobs: the weights are good, and the stop is confirmed on the bus."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from support.processes.launches import start
from support.processes.site import SCRIPTS, Site
from support.records.stops import StopSigner, outgoing
from support.records.telemetry import said, wait_for
from support.waiting import wait_until
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.schemas.records.runs import CaptureDegraded, RunStarted
from tocsin.schemas.records.stops.commands import StopCheckpoint, StopExited, StopLeft


@pytest.mark.torture  # in CI: unit/emitter/hooks/test_update_guard
def test_ranks_leave_before_an_update_together_or_not_at_all(tmp_path: Path) -> None:
    signer = StopSigner()
    job = start(
        tmp_path,
        *(sys.executable, "-m", "support.ranks.guarded", str(tmp_path)),
        signer=signer,
        before_update="yes",
    )

    async def publish(incarnation: str) -> None:
        command = signer.sign(signer.command("r1", incarnation, checkpoint="skip"))
        async with EmbeddedBus(tmp_path / "bus.db") as bus:
            producer = await bus.producer()
            await producer.publish([outgoing(command, "r1")])
            await producer.close()

    incarnations: list[str] = []
    for kind in ("ddp", "alone"):
        wait_until((tmp_path / f"left-{kind}-1").exists)
        started = wait_for(tmp_path, RunStarted, 3)
        incarnations.append([each for each in started if each.role == "trainer"][-1].incarnation)
        # As the rule's does once it has read the step that was not made.
        asyncio.run(publish(incarnations[-1]))
    assert job.wait() == 79
    assert (tmp_path / "restarts").read_text() == "0"
    by_kind = zip(
        *(json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)), strict=True
    )
    for first, second in by_kind:
        kind = first["kind"]
        if kind == "apart":
            # Rank 0 does not come to that update, so rank 1 makes it: it never leaves alone.
            assert (first["left"], second["left"]) == (None, None)
            assert (second["last"], second["finite"]) == (7, False)
            continue
        for rank in (first, second):
            assert (kind, rank["last"], rank["left"]) == (kind, 5, 4)
            assert rank["unchanged"], kind
            assert rank["finite"], kind
    left = {(each.incarnation, each.rank): each for each in said(tmp_path, StopLeft)}
    assert set(left) == {(each, rank) for each in incarnations for rank in (0, 1)}
    assert {(each.edge, each.step) for each in left.values()} == {("before_update", 4)}
    assert {each.decision for each in said(tmp_path, StopCheckpoint)} == {"skipped"}
    assert [each.how for each in said(tmp_path, StopExited)] == ["edge"] * 2
    reasons = {each.reason for each in said(tmp_path, CaptureDegraded)}
    assert any("the ranks do not make the same updates" in reason for reason in reasons)


def test_the_runs_own_rule_confirms_the_stop(embedded_site: Site) -> None:
    site = embedded_site
    site.config.write_text(site.config.read_text() + "stop: {before_update: true}\n")
    finished = site.run(sys.executable, str(SCRIPTS / "keeps_weights.py"), run_id="early")
    issue = finished.stopped_by("nonfinite")
    assert finished.stdout == "25 steps, weights finite: True\n"
    assert issue["first_step"] == 25
    stop = finished.summary["stop"]
    assert (stop["rule"], stop["issue"], stop["step"]) == ("nonfinite", issue["id"], 24)
    (left,) = site.said("early", StopLeft)
    assert (left.edge, left.step) == ("before_update", 24)
    assert "the job left its loop: a gradient was not finite; the update was" in finished.stderr
