"""Who may write telemetry, and nothing else: what can be forged with it, and what cannot.

Each test is a line of the table in `docs/explanation/rogue-producer.md`. On Kafka only ACLs
tell a trainer's records from another's: what works here works for all who may write the topic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tocsin.bus.port import Partition, Record
from tocsin.runtime.dead_letters import DeadLetterLimits, DeadLetters, TooManyDeadLetters
from tocsin.runtime.metrics import Metrics
from tocsin.runtime.service import Poison
from tocsin.schemas.errors import MalformedRecord, RecordError
from tocsin.schemas.records.events import Data, Event
from tocsin.schemas.records.frames import RecordOrigin, StepFrame
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.records.runs import Heartbeat, RunEnded, RunStarted
from tocsin.schemas.records.stops.commands import StopAcknowledged, StopExited, StopLeft
from tocsin.schemas.records.wire import Meta, meta_of
from tocsin.stream_rules.engine.configured_rules import rule_specs
from tocsin.stream_rules.engine.episodes import Reported
from tocsin.stream_rules.engine.partitions import PartitionEngine
from tocsin.stream_rules.engine.run_state import MAX_RANKS
from tocsin.stream_rules.engine.run_view import run_view
from tocsin.stream_rules.testing import RunBuilder

COMMAND = "5c0c6b62-6f8e-4b0e-8f2f-1f5f2a0c1d9e"


class Scene:
    """A healthy run of one rank and its launcher, and a rogue who writes the same partition."""

    def __init__(self) -> None:
        self.engine = PartitionEngine(rule_specs([]))
        self.victim = RunBuilder()
        self.told: list[Reported] = []
        self.refused: list[str] = []
        self._offset = 0
        self.victim.started(role="launcher")
        self.victim.started()
        self.goes_on(range(60))

    def goes_on(self, steps: range) -> None:
        self.victim.steps(steps, loss=2.0)
        for record in self.victim.records[:]:
            self._apply(record)
        self.victim.records.clear()

    def forge(
        self, value: StepFrame | Event[Data], *, boot: str = "rogue", seq: int = 0, rank: int = 0
    ) -> list[Reported]:
        before = len(self.told)
        meta = meta_of(value, rank=rank, boot=boot, seq=seq)
        self._apply(self._record(value.encode(), meta))
        return self.told[before:]

    def forge_data(self, data: Data, **headers: Any) -> list[Reported]:
        event = Event.wrap(data, id="x", source="/rogue", time_ms=self.victim.now_ms)
        return self.forge(event, **headers)

    def raw(self, value: bytes, meta: Meta) -> None:
        self._apply(self._record(value, meta))

    @property
    def ended(self) -> bool:
        return self.view.state == "ended"

    @property
    def view(self) -> RunView:
        run = self.engine.run("made")
        assert run is not None
        return run_view(run, next_offset=self._offset)

    def _record(self, value: bytes, meta: Meta) -> Record:
        here = Partition("tocsin.telemetry.v1", 0)
        return Record(here, 0, self.victim.now_ms, b"made", value, meta.headers())

    def _apply(self, record: Record) -> None:
        here = Partition("tocsin.telemetry.v1", 0)
        placed = Record(
            here, self._offset, record.append_ms, record.key, record.value, record.headers
        )
        self._offset += 1
        try:
            self.told += self.engine.apply(placed)
        except RecordError as error:
            self.refused.append(str(error))


@pytest.fixture
def scene() -> Scene:
    return Scene()


def steps(
    *,
    run: str = "made",
    incarnation: str = "made-1",
    step: int = 60,
    loss: float = 2.0,
    rank: int = 0,
) -> StepFrame:
    return StepFrame(
        origin=RecordOrigin(run_id=run, incarnation=incarnation, rank=rank),
        steps=np.array([step], np.uint64),
        at_us=np.array([1], np.uint64),
        columns=("loss",),
        values=np.array([[loss]], np.float32),
    )


def stop_worthy(told: list[Reported]) -> list[IssueFiring]:
    return [
        one.issue
        for one in told
        if isinstance(one.issue, IssueFiring) and one.issue.severity == "critical"
    ]


# -- what works: only an ACL is against it ------------------------------------------------------


def test_a_forged_nan_of_a_run_is_a_critical_issue_of_that_run(scene: Scene) -> None:
    told = scene.forge(steps(loss=float("nan")))
    (issue,) = stop_worthy(told)
    assert (issue.rule, issue.run_id, issue.incarnation) == ("nonfinite", "made", "made-1")


def test_a_forged_start_of_a_launcher_takes_its_place_and_can_end_the_run(scene: Scene) -> None:
    forged: Any = {"run_id": "made", "incarnation": "made-1", "role": "launcher"}
    scene.forge_data(RunEnded(**forged, outcome="completed"))
    assert not scene.ended
    scene.forge_data(RunStarted(**forged, job_id="j"), seq=1)
    scene.forge_data(RunEnded(**forged, outcome="completed"), seq=2)
    assert scene.ended
    # What the ranks report afterwards is judged all the same.
    scene.victim.steps([61], loss=float("nan"))
    scene.goes_on(range(62, 63))
    assert "nonfinite" in {issue.rule for issue in stop_worthy(scene.told)}


def test_a_forged_incarnation_hides_the_run_that_is_there(scene: Scene) -> None:
    scene.forge(steps(incarnation="made-2", step=0))
    assert scene.view.incarnation == "made-2"
    scene.goes_on(range(61, 70))
    assert (scene.view.incarnation, scene.view.last_step) == ("made-2", 0)


def test_a_forged_answer_makes_a_stop_look_obeyed(scene: Scene) -> None:
    who: Any = {"run_id": "made", "incarnation": "made-1", "command_id": COMMAND}
    scene.forge_data(StopAcknowledged(**who, leave_at=70), seq=0)
    scene.forge_data(StopLeft(**who, step=70, edge="optimizer_step"), seq=1)
    scene.forge_data(StopExited(**who, how="edge", exit_code=79), seq=2)
    assert scene.view.stop is not None
    assert (scene.view.stop.state, scene.view.stop.command_id) == ("exited", COMMAND)
    # The view is of one command: what is answered to another one after that is not shown.
    scene.forge_data(
        StopLeft(**{**who, "command_id": "other"}, step=71, edge="optimizer_step"), seq=3
    )
    assert scene.view.stop.command_id == COMMAND


def test_a_record_with_the_boot_and_a_high_number_of_a_rank_silences_that_rank(
    scene: Scene,
) -> None:
    scene.forge_data(Heartbeat(run_id="made", incarnation="made-1"), boot="boot-0", seq=2**62)
    scene.victim.steps([60], loss=float("nan"))
    scene.goes_on(range(61, 62))
    assert not stop_worthy(scene.told)
    assert scene.view.last_step == 59


# -- what does not work -------------------------------------------------------------------------


def test_a_record_of_another_run_than_its_key_is_refused(scene: Scene) -> None:
    assert not scene.forge(steps(run="theirs", loss=float("nan")))
    assert scene.refused == ["the key says run 'made', the value 'theirs'"]
    assert scene.engine.run("theirs") is None


def test_an_incarnation_that_is_over_is_not_raised_again(scene: Scene) -> None:
    scene.forge(steps(incarnation="made-2", step=0))
    scene.forge(steps(incarnation="made-1", loss=float("nan")), seq=1)
    scene.forge_data(RunStarted(run_id="made", incarnation="made-1", job_id="j"), seq=2)
    assert not stop_worthy(scene.told)
    assert scene.view.incarnation == "made-2"


def test_a_record_in_the_wrong_partition_is_judged_there_as_the_same_run(scene: Scene) -> None:
    value = steps(loss=float("nan"))
    headers = meta_of(value, boot="rogue").headers()
    wrong = Partition("tocsin.telemetry.v1", 5)
    told = scene.engine.apply(
        Record(wrong, 0, scene.victim.now_ms, b"made", value.encode(), headers)
    )
    (there,) = stop_worthy(told)
    (here,) = stop_worthy(scene.forge(value))
    assert there.issue_id == here.issue_id


def test_repeats_and_old_numbers_are_dropped(scene: Scene) -> None:
    scene.forge(steps(), seq=7)
    assert not scene.forge(steps(loss=float("nan")), seq=7)
    assert not scene.forge(steps(loss=float("nan")), seq=3)


def test_another_launcher_does_not_end_the_run(scene: Scene) -> None:
    scene.forge_data(Heartbeat(run_id="made", incarnation="made-1", role="launcher"))
    scene.victim.heartbeat(role="launcher")
    scene.goes_on(range(60, 61))
    assert scene.view.state == "running"


@pytest.mark.parametrize("step", [2**53, 2**63 - 1])
def test_absurd_steps_raise_nothing(scene: Scene, step: int) -> None:
    scene.forge(steps(step=step))
    scene.goes_on(range(61, 62))
    run = scene.engine.run("made")
    assert run is not None
    assert not [instance.spec.name for instance in run.instances if instance.failed]


def test_ranks_are_bounded(scene: Scene) -> None:
    scene.forge(steps(rank=MAX_RANKS), rank=MAX_RANKS)
    assert scene.refused == [f"rank {MAX_RANKS:,}: expected less than {MAX_RANKS:,}"]
    assert len(scene.view.ranks) == 1


def test_boots_collections_and_labels_are_bounded(scene: Scene) -> None:
    run = scene.engine.run("made")
    assert run is not None
    for number in range(30_000):
        run.state.admit(Meta("steps", boot=f"b{number}"))
    assert len(run.state.sequences) <= 20_000
    for part in range(3):
        scene.forge_data(
            RunStarted(
                run_id="made",
                incarnation="made-1",
                job_id="j",
                labels={f"{part}/{i}": "x" for i in range(1_000)},
                collections=tuple(f"{part}/{i}" for i in range(1_000)),
            ),
            seq=part,
        )
    assert len(run.state.labels) <= 1_024
    assert len(run.state.collections) <= 256


def test_incarnations_are_bounded(scene: Scene) -> None:
    for number in range(100):
        scene.forge(steps(incarnation=f"i{number}", step=0), boot=f"b{number}")
        run = scene.engine.run("made")
        assert run is not None
        run.urgent = False  # as after a checkpoint
    run = scene.engine.run("made")
    assert run is not None
    assert len(run.state.past) <= 64


@pytest.mark.parametrize(
    "meta",
    [
        lambda: Meta("tocsin.issue.firing"),
        lambda: Meta("tocsin.run.view"),
        lambda: Meta("tocsin.state"),
        lambda: Meta("steps", version=2),
        lambda: Meta("no.such.type"),
    ],
)
def test_records_of_other_topics_are_set_aside(scene: Scene, meta: Callable[[], Meta]) -> None:
    scene.raw(b'{"data": {}}', meta())
    assert len(scene.refused) == 1
    scene.goes_on(range(60, 61))
    assert scene.view.last_step == 60


def test_a_flood_of_dead_letters_ends_the_worker_with_its_place() -> None:
    letters = DeadLetters(
        topic="dlq",
        service="rules",
        software="",
        limits=DeadLetterLimits(),
        metrics=Metrics(),
    )
    bad = [Record(Partition("tocsin.telemetry.v1", 3), i, 1, b"made", b"?", ()) for i in range(100)]
    with pytest.raises(
        TooManyDeadLetters, match=r"telemetry\.v1 partition 3: 100 records in a row"
    ):
        letters.check(bad, [Poison(record, MalformedRecord("x")) for record in bad], 1)
