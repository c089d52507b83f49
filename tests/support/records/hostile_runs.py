"""A run whose labels, rules, tensors, nodes and texts want to be more than text on a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

import numpy as np

from support.records.issues import TOPICS, delivery, issue, issue_record, record, view, view_record
from support.records.poison import poisoned
from tocsin.bus.port import Outgoing, Partition
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.events import Event
from tocsin.schemas.records.frames import Frame, RecordOrigin, StepFrame, SystemFrame, TensorFrame
from tocsin.schemas.records.issues import Evidence, Fact, Series
from tocsin.schemas.records.run_view import StopView
from tocsin.schemas.records.wire import meta_of
from tocsin.schemas.topics import issue_partition, telemetry_partition

TEXT: Final = '"\'><img src=x onerror="harmed=1"></script><script>harmed=2;alert(1)</script>{{7*7}}'
RUN: Final = "hostile"
STEPS: Final = 40


@dataclass(frozen=True)
class Hostile:
    """Where its pages are."""

    issue_id: str

    def path(self, template: str) -> str:
        """A path with `{run}`, `{issue}`, `{name}` and `{text}` in it."""
        name, text = quote(f"log.{TEXT}"), quote(TEXT)
        return template.format(run=RUN, issue=self.issue_id, name=name, text=text)


_ISSUE: Final = poisoned(
    issue(RUN).model_copy(
        update={
            "remedy": "Lower it.",
            "evidence": Evidence(
                facts=(Fact(name="a", value="b", unit="c"),),
                series=Series(name="loss", unit="f", steps=(1, 2), values=(2.0, 3.0), limit=3.0),
                also=(f"{TEXT}g",),
                followed=2,
                explanation="h",
            ),
        }
    ),
    TEXT[:60],
)
HOSTILE: Final = Hostile(_ISSUE.issue_id)


def hostile_records(now_ms: int) -> Sequence[Outgoing]:
    """All that there is of it."""
    caused = issue(RUN, "loss_spike", severity="warning").model_copy(
        update={"consequence_of": _ISSUE.issue_id, "rule": TEXT[:90], "reason": TEXT}
    )
    stop = StopView(state="exited", command_id="c", reason="i", how="j", states={TEXT: now_ms})
    seen = view(RUN).model_copy(
        update={
            "state": "ended",
            "outcome": "stopped",
            "ended_ms": now_ms,
            "labels": {f"team{n}": TEXT for n in range(8)},
            "node": "q",
            "command": "r",
            "rules": {TEXT: "issues_found", f"{TEXT}2": "error"},
            "stop": stop,
            "devices": {TEXT: 8},
        }
    )
    told = poisoned(delivery(_ISSUE, "hook", state="rejected", decided_by="x"), TEXT[:60])
    origin = RecordOrigin(run_id=RUN, incarnation=seen.incarnation)
    steps = np.arange(STEPS, dtype=np.uint64)
    at_us = (now_ms * 1000 + steps * 1000).astype(np.uint64)
    rows = (f"{TEXT}.weight", f"{TEXT}.bias")
    frames: list[Frame] = [
        StepFrame(
            origin=origin, steps=steps, at_us=at_us, columns=("loss", f"log.{TEXT}"),
            values=np.ones((STEPS, 2), np.float32),
        ),
        SystemFrame(
            origin=origin, node=TEXT[:200], at_us=at_us,
            columns=("cpu.percent", "cpu.0.percent"), values=np.ones((STEPS, 2)),
        ),
        *(
            TensorFrame(
                origin=origin, step=step, collection=f"alert{TEXT}"[:64], rows=rows,
                columns=("l2", f"alert{TEXT}"), values=np.ones((2, 2), np.float32),
                count_columns=(), counts=np.ones((2, 0), np.uint64),
            )
            for step in range(2)
        ),
    ]  # fmt: skip
    place = Partition(TOPICS.telemetry, telemetry_partition(RUN))
    return [
        *(
            Outgoing(place, RUN.encode(), frame.encode(), meta_of(frame).headers())
            for frame in frames
        ),
        view_record(poisoned(type(seen).model_validate(seen.model_dump()), TEXT[:60])),
        issue_record(_ISSUE),
        issue_record(type(caused).model_validate(caused.model_dump())),
        delivery_record(told),
    ]


def delivery_record(value: Delivery) -> Outgoing:
    """A delivery for the actions topic."""
    event = Event.wrap(value, id=value.delivery_id, source="/actions", time_ms=value.updated_ms)
    return record(event, TOPICS.actions, issue_partition(value.run_id), value.key)
