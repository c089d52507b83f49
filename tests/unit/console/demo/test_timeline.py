"""The demo's table of moments, from records."""

from __future__ import annotations

import numpy as np

from support.records.issues import incarnation, issue
from tocsin.console.demo.timeline import TimelineEntry, timeline
from tocsin.console.demo.webhook_receiver import Received
from tocsin.schemas.records.events import Data, Event
from tocsin.schemas.records.frames import RecordOrigin, StepFrame
from tocsin.schemas.records.runs import Heartbeat
from tocsin.schemas.records.stops.commands import StopEscalated, StopExited, StopLeft

RUN = "run-1"
INCARNATION = incarnation()


def told(at_ms: int, data: Data) -> TimelineEntry:
    event = Event.wrap(data, id="x/0", source="/runs/run-1", time_ms=at_ms)
    return TimelineEntry(at_ms, event)


def steps(first: int, end_ms: int) -> TimelineEntry:
    frame = StepFrame(
        origin=RecordOrigin(run_id=RUN, incarnation=INCARNATION),
        steps=np.array([first], np.uint64),
        at_us=np.array([end_ms * 1000], np.uint64),
        columns=("loss",),
        values=np.ones((1, 1), np.float32),
    )
    return TimelineEntry(end_ms + 50, frame)


def test_moments_stand_in_order_of_time_from_the_last_good_step_on() -> None:
    left = StopLeft(
        run_id=RUN,
        incarnation=INCARNATION,
        command_id="c",
        step=4,
        edge="optimizer_step",
        left_us=5_500_000,
    )
    records = [
        told(
            6_000,
            StopExited(
                run_id=RUN, incarnation=INCARNATION, command_id="c", how="edge", exit_code=79
            ),
        ),
        told(5_600, left),
        told(5_100, issue()),
        told(5_050, Heartbeat(run_id=RUN, incarnation=INCARNATION)),
        steps(2, 5_000),
        steps(3, 5_020),
    ]
    received = [
        Received("w", True, issue(), 5_200),
        Received("other", True, issue("another-run"), 5_201),
        Received("forged", False, issue(), 5_300),
    ]
    moments = timeline(records, received, fault_step=3, fault="NaN")
    assert [(moment.at_ms, moment.what) for moment in moments] == [
        (5_000, "step 3 begins"),
        (5_100, "issue: nonfinite"),
        (5_200, "webhook arrives"),
        (5_300, "webhook arrives"),
        (5_500, "training loop left"),
        (6_000, "job gone"),
    ]
    assert "verified" in moments[2].detail
    assert "NOT VALID" in moments[3].detail


def test_a_job_that_hangs_shows_the_signal_that_ended_it() -> None:
    escalated = StopEscalated(
        run_id=RUN,
        incarnation=INCARNATION,
        role="launcher",
        command_id="c",
        how="SIGTERM",
        reason="rank 0 did not leave within 1 s",
    )
    moments = timeline([told(6_000, escalated)], [], fault_step=3, fault="hangs")
    assert [(moment.what, moment.detail) for moment in moments] == [
        ("SIGTERM to the job", "rank 0 did not leave within 1 s")
    ]
