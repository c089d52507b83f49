"""One bus, and what each part of tocsin makes of it: they must all see the same run."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from support.records.issues import NOW_MS, TOPICS, incarnation, issue, issue_record, record, view
from support.records.issues import view_record as run_record
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import Outgoing
from tocsin.console.context import read_context
from tocsin.console.stop.answers import find_run
from tocsin.console.views.bus_view import read_all, read_view, view_partitions
from tocsin.console.views.issues import IssueFilter, issues_json
from tocsin.console.views.status import status_json
from tocsin.console.watch.follower import Follower
from tocsin.console.watch.frame import Situation, draw
from tocsin.emitter.launch.own_run import OwnRun
from tocsin.emitter.launch.summary import Summary
from tocsin.schemas.records.deliveries import Delivery, DeliveryState
from tocsin.schemas.records.events import Event
from tocsin.schemas.records.issues import Origin
from tocsin.schemas.records.run_view import RankView, StopView
from tocsin.schemas.topics import issue_partition

STOPPED = StopView(state="exited", command_id="c", step=11, how="edge", exit_code=79)
ENDED = view(ended=True, stop=STOPPED, next_offset=30).model_copy(
    update={
        "last_step": 11,
        "last_loss": 0.25,
        "outcome": "stopped",
        "rules": {"nonfinite": "issues_found", "overfit": "stopped"},
        "ranks": (RankView(rank=0, last_step=11, last_heard_ms=NOW_MS),),
    }
)
RUNNING = view(next_offset=20).model_copy(update={"last_step": 7, "last_loss": 0.5})
MILDER = issue(severity="warning").model_copy(
    update={
        "times": 2,
        "first_step": 9,
        "onset_ms": NOW_MS + 9,
        "peak_severity": "critical",
        "origin": Origin(step=3, rank=1, onset_ms=NOW_MS),
    }
)
SPIKE = issue(rule="loss_spike", severity="warning").model_copy(update={"onset_ms": NOW_MS - 5})
RECOVERED = SPIKE.model_copy(update={"at_ms": NOW_MS + 20})


def sent(state: DeliveryState) -> Outgoing:
    made = Delivery(
        delivery_id="d", issue_id=MILDER.issue_id, run_id="run-1", incarnation=incarnation(),
        rule="nonfinite", issue_state="firing", action="hook", kind="webhook", state=state,
        reason="r", created_ms=NOW_MS, updated_ms=NOW_MS, give_up_ms=NOW_MS,
    )  # fmt: skip
    event = Event.wrap(made, id=state, source="/actions", time_ms=NOW_MS)
    return record(event, TOPICS.actions, issue_partition("run-1"), made.key)


# A worker that was killed publishes an older view again, and an issue twice.
RUNS = [run_record(RUNNING), run_record(ENDED), run_record(RUNNING)]
ISSUES = [*map(issue_record, (issue(), MILDER, SPIKE, SPIKE, RECOVERED))]
DELIVERIES = [sent("pending"), sent("delivered")]


def mixed(*topics: Sequence[Outgoing], seed: int) -> list[Outgoing]:
    """The records of each topic in their order, the topics in any."""
    turns = [number for number, topic in enumerate(topics) for _ in topic]
    random.Random(seed).shuffle(turns)
    left = [iter(topic) for topic in topics]
    return [next(left[number]) for number in turns]


@pytest.mark.parametrize("seed", range(5))
async def test_status_watch_stop_and_the_summary_agree(tmp_path: Path, seed: int) -> None:
    context = read_context(None, f"embedded:{tmp_path}/bus.db", environ={})
    own = OwnRun("run-1")
    async with EmbeddedBus(tmp_path / "bus.db") as bus:
        await bus.init(TOPICS.specs())
        producer = await bus.producer()
        await producer.publish(mixed(RUNS, ISSUES, DELIVERIES, seed=seed))
        await producer.close()
        known = await read_view(bus, TOPICS)
        async for found in read_all(bus, view_partitions(TOPICS, "run-1")):
            own.apply(found, {incarnation()}, NOW_MS)
        to_stop, reader = await find_run(bus, TOPICS, "run-1")
        await reader.close()
    follower = Follower(context, None)
    await follower.read_once()
    watched = follower.state.run("run-1")
    status = json.loads(status_json(known))
    summary = json.loads(
        Summary(
            run_id="run-1", outcome="stopped", exit_code=79, steps=own.steps(), judged_steps=0,
            duration_s=1.0, issues=own.view.issues, rules=own.rules(),
            deliveries=own.view.deliveries,
        ).encode()
    )  # fmt: skip

    assert watched is not None
    (run,) = status["runs"]
    assert watched.seen.view == to_stop.view == ENDED
    assert (run["last_step"], run["last_loss"]) == (watched.step, watched.loss) == (11, 0.25)
    assert summary["steps"] == run["last_step"] + 1
    assert summary["rules"] == run["rules"]
    assert run["stop"]["state"] == STOPPED.state
    assert to_stop.stop == watched.seen.stop == STOPPED
    assert to_stop.ended == watched.seen.ended == ENDED

    expected = [
        (SPIKE.issue_id, "firing", "warning", 3),
        (MILDER.issue_id, "firing", "critical", 3),
    ]
    for issues in (status["issues"], json.loads(issues_json(known, IssueFilter()))["issues"]):
        assert [
            (one["issue_id"], one["state"], one["severity"], one["first_step"]) for one in issues
        ] == expected
    assert [
        (one["id"], one["state"], one["severity"], one["first_step"]) for one in summary["issues"]
    ] == expected
    assert [one.issue_id for one in follower.state.view.issues] == [one[0] for one in expected]
    for deliveries in (status["deliveries"], summary["deliveries"]):
        assert [one["state"] for one in deliveries] == ["delivered"]
    assert [one.state for one in follower.state.view.deliveries] == ["delivered"]

    out = io.StringIO()
    frame = draw(follower.state, Situation("b"), now_ms=NOW_MS, width=100, height=40)
    Console(file=out, width=100).print(frame)
    for shown in (
        "stopped",
        "11",
        "0.25",
        "critical",
        "delivered",
        "stop exited cleanly at step 11",
    ):
        assert shown in out.getvalue()
