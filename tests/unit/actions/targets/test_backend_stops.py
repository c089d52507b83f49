"""A backend ends the job whose launcher has not: once, the right one, after any crash."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from support.actions.farm import FARM_JOB, Farm
from support.records.issues import (
    NOW_MS,
    TOPICS,
    incarnation,
    issue,
    issue_record,
    view,
    view_record,
)
from support.records.signed import switch_record
from tocsin.actions.config import decisions_of, routing_of
from tocsin.actions.decision.decide import Decisions
from tocsin.actions.decision.planned import STOP
from tocsin.actions.decision.retry import Outcome
from tocsin.actions.decision.stop_policy import StopPolicy
from tocsin.actions.delivery.receiver_queues import Notice, ReceiverQueue, target_queue
from tocsin.actions.delivery.service import ActionsService
from tocsin.actions.delivery.setup import Setup
from tocsin.actions.targets.backend_stops import SLACK_MS, BackendStops
from tocsin.actions.targets.build import attempt
from tocsin.bus.port import Outgoing, Record
from tocsin.runtime.prometheus_metrics import PrometheusMetrics
from tocsin.runtime.service import Attachment, Tick
from tocsin.schemas.configuration.file import Config
from tocsin.schemas.configuration.policy import PolicyEntry
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.events import EVENT_TYPES
from tocsin.schemas.records.run_view import RunState, RunView, StopView
from tocsin.schemas.signing import SigningKey, TrustedKeys
from tocsin.schemas.topics import ISSUE_PARTITIONS, issue_partition

GRACE_MS = 30_000
LADDER_MS = 3 * GRACE_MS + SLACK_MS
CONFIRM_MS = 60_000
KEY = SigningKey.generate()
CONFIG = Config()
DECISIONS: Decisions = decisions_of(CONFIG, routing_of(CONFIG))


class Killed(Exception):
    """The process of the service is gone."""


def entry(match: dict[str, tuple[str, ...]]) -> PolicyEntry:
    made = PolicyEntry.model_validate({"match": match, "may_stop_on": ["farm"]})
    made.placed(("policy", 0), {"may_stop_on": ["farm"]})
    return made


ALL = (entry({}),)


class Scene:
    """Services, one after another, over one bus and one backend; the time is moved by hand."""

    def __init__(
        self, farm: Farm, *, policy: tuple[PolicyEntry, ...] = ALL, kill_at: int = -1
    ) -> None:
        self.farm = farm
        self.policy = policy
        self.now_ms = NOW_MS
        self.states: list[Delivery] = []
        self.commands = 0
        self.metrics = PrometheusMetrics()
        self._kill_at = kill_at
        self._nudged = False
        self._bus: list[Record] = []
        self._views: list[Record] = []
        self.service = self._started()

    async def issue(self) -> None:
        await self.round(self._record(issue_record(issue())))

    async def view(self, made: RunView) -> None:
        self._views.append(self._record(view_record(made)))
        await self.round(self._views[-1])

    async def until(self, passed_ms: int) -> None:
        end_ms = NOW_MS + passed_ms
        while (due_ms := self.service.next_due_ms()) is not None and due_ms <= end_ms:
            self.now_ms = max(self.now_ms, due_ms)
            await self.round()
        self.now_ms = max(self.now_ms, end_ms)
        await self.round()

    async def restart(self) -> None:
        """Another service, which knows what is on the bus. It reads the issue once more."""
        self.service = self._started()
        number = issue_partition("run-1")
        self.service.restore(number, [one for one in self._bus if one.partition.number == number])
        await self.round(*self._views, self._record(issue_record(issue())))

    async def round(self, *records: Record) -> None:
        given = list(records)
        busy = True
        while busy:
            tick = Tick(self.now_ms, frozenset(range(ISSUE_PARTITIONS)))
            self.service.apply(given, tick)
            given, busy, self._nudged = [], False, False
            for made in self.service.outputs():
                busy = True
                if made.partition.topic != TOPICS.actions or made.value is None:
                    continue
                if len(self._bus) == self._kill_at:
                    self._kill_at = -1
                    raise Killed
                self._bus.append(self._record(made))
                data = EVENT_TYPES.decode(made.value).data
                assert isinstance(data, Delivery)
                self.states.append(data)
            await self.service.checkpointed(self.now_ms)
            # An attempt waits for nothing, so each ends in one turn of the event loop.
            await asyncio.sleep(0)
            busy = busy or self._nudged

    @property
    def last(self) -> Delivery:
        return self.states[-1]

    async def _publish(self, notice: Notice) -> Outcome:
        self.commands += 1
        return Outcome(sent=True)

    def _started(self) -> ActionsService:
        queues = {
            STOP: ReceiverQueue(self._publish),
            target_queue("farm"): ReceiverQueue(partial(attempt, self.farm)),
        }
        policy = StopPolicy(self.policy, {"farm": lambda job: job.kind == "farm"})
        backends = BackendStops(policy, {"farm": CONFIRM_MS})
        service = ActionsService(
            TOPICS,
            Setup(DECISIONS, queues, backends=backends),
            metrics=self.metrics,
            trusted=lambda: TrustedKeys([KEY.public]),
        )
        service.attached(Attachment(nudge=self._nudge))
        return service

    def _nudge(self) -> None:
        self._nudged = True

    def _record(self, made: Outgoing) -> Record:
        offset = len(self._bus) + len(self._views) + 1
        return Record(made.partition, offset, self.now_ms, made.key, made.value, made.headers)


def run_view(state: RunState = "running", **more: object) -> RunView:
    return view(**more).model_copy(  # type: ignore[arg-type]
        update={"scheduler": FARM_JOB, "state": state, "labels": {"team": "vision"}}
    )


async def test_a_run_whose_launcher_is_gone_is_ended_by_its_backend_once() -> None:
    scene = Scene(Farm())
    await scene.view(run_view())
    await scene.issue()
    assert (scene.commands, scene.farm.looks) == (1, 0)
    await scene.view(run_view("lost", next_offset=2))
    await scene.until(CONFIRM_MS)
    assert (scene.last.state, scene.last.reason) == (
        "delivered",
        "the backend ended the job: farm: CANCELLED",
    )
    (job,) = scene.farm.asked
    assert (job.scheduler, job.incarnation) == (FARM_JOB, incarnation("run-1"))
    assert job.reason == "NaN in the loss at step 1"
    reasons = list(dict.fromkeys(one.reason for one in scene.states))
    assert "the run is lost: farm is to end it (policy (policy.0.may_stop_on.0))" in reasons
    assert "the backend was asked to end the job; waits for its end: farm: cancelled" in reasons
    assert scene.commands == 1, "the command is not sent again"
    shown = "tocsin_backend_stop_attempts_total"
    assert scene.metrics.value(shown, target="farm", shows="asked") == 1
    assert scene.metrics.value(shown, target="farm", shows="ended") == 1


async def test_a_launcher_has_its_whole_ladder_first() -> None:
    scene = Scene(Farm())
    await scene.view(run_view())
    await scene.issue()
    await scene.until(LADDER_MS - 1)
    assert scene.farm.looks == 0
    await scene.until(LADDER_MS + CONFIRM_MS)
    assert scene.last.state == "delivered"
    assert len(scene.farm.asked) == 1


async def test_the_ladder_counts_from_when_the_launcher_obeyed() -> None:
    scene = Scene(Farm())
    await scene.view(run_view())
    await scene.issue()
    command = scene.states[0].delivery_id
    heard = {"requested": NOW_MS, "acknowledged": NOW_MS + 10_000}
    stop = StopView(state="acknowledged", command_id=command, states=heard)
    await scene.view(run_view(stop=stop, next_offset=2))
    await scene.until(LADDER_MS + 9_999)
    assert scene.farm.looks == 0
    await scene.until(LADDER_MS + 10_000)
    assert scene.farm.looks > 0


async def test_after_sigterm_it_counts_from_there() -> None:
    scene = Scene(Farm())
    await scene.view(run_view())
    await scene.issue()
    heard = {"acknowledged": NOW_MS, "escalated": NOW_MS + GRACE_MS}
    command = scene.states[0].delivery_id
    stop = StopView(state="escalated", command_id=command, how="SIGTERM", states=heard)
    await scene.view(run_view(stop=stop, next_offset=2))
    await scene.until(2 * GRACE_MS + SLACK_MS - 1)
    assert scene.farm.looks == 0
    await scene.until(2 * GRACE_MS + SLACK_MS)
    assert scene.farm.looks > 0


@pytest.mark.parametrize("state", ["exited", "refused"])
async def test_a_run_that_answered_needs_no_backend(state: str) -> None:
    scene = Scene(Farm())
    await scene.view(run_view())
    await scene.issue()
    stop = StopView(state=state, command_id=scene.states[0].delivery_id, reason="stops are off")  # type: ignore[arg-type]
    await scene.view(run_view("lost", stop=stop, next_offset=2))
    await scene.until(2 * LADDER_MS)
    assert scene.farm.looks == 0
    assert scene.last.state == ("delivered" if state == "exited" else "rejected")


async def test_another_incarnation_is_never_asked_to_end() -> None:
    scene = Scene(Farm(restarts=1))
    await scene.view(run_view())
    await scene.issue()
    await scene.view(run_view("lost", next_offset=2))
    await scene.until(CONFIRM_MS)
    assert scene.farm.asked == []
    assert (scene.last.state, scene.last.reason) == (
        "suppressed",
        "another incarnation of the job runs, which continues: farm: restart 1",
    )


async def test_a_run_that_began_again_is_left_alone() -> None:
    scene = Scene(Farm(state="away"))
    await scene.view(run_view())
    await scene.issue()
    await scene.view(run_view("lost", next_offset=2))
    looks = scene.farm.looks
    assert looks > 0
    scene.farm.state = "running"
    again = run_view(training=1, next_offset=3)
    await scene.view(again)
    await scene.until(CONFIRM_MS)
    assert scene.farm.asked == []
    assert scene.last.state == "suppressed"
    assert "another incarnation of the run has begun" in scene.last.reason


@pytest.mark.parametrize("policy", [(), (entry({"team": ("speech",)}),)])
async def test_without_an_entry_of_the_policy_no_backend_is_asked(
    policy: tuple[PolicyEntry, ...],
) -> None:
    scene = Scene(Farm(), policy=policy)
    await scene.view(run_view())
    await scene.issue()
    await scene.view(run_view("lost", next_offset=2))
    why = (
        "no answer from the run, and no backend is asked: the policy permits none for this run; "
        "to permit it: policy: [{match: {team: vision}, may_stop_on: [farm]}]"
    )
    assert (scene.last.state, scene.last.reason) == ("pending", why)
    written = len(scene.states)
    await scene.view(run_view("lost", next_offset=3))
    assert len(scene.states) == written, "it is written once"
    await scene.until(3_600_000)
    assert (scene.last.state, scene.last.reason) == ("expired", why)
    assert scene.farm.looks == 0


async def test_outside_of_a_scheduler_nothing_is_asked() -> None:
    scene = Scene(Farm())
    await scene.view(view())
    await scene.issue()
    await scene.until(3_600_000)
    assert (scene.last.state, scene.last.reason) == ("expired", "no answer from the run")
    assert scene.farm.looks == 0


async def test_while_stops_are_off_no_backend_is_asked() -> None:
    scene = Scene(Farm())
    await scene.view(run_view())
    await scene.issue()
    await scene.round(switch_record(KEY, off=True))
    await scene.view(run_view("lost", next_offset=2))
    await scene.until(CONFIRM_MS)
    assert scene.farm.looks == 0
    assert scene.last.state == "suppressed"
    assert "a wrong rule" in scene.last.reason


async def test_a_backend_that_refuses_is_not_asked_again() -> None:
    scene = Scene(Farm(refuses="permission denied"))
    await scene.view(run_view())
    await scene.issue()
    await scene.view(run_view("lost", next_offset=2))
    await scene.until(CONFIRM_MS)
    assert (scene.last.state, scene.last.reason) == (
        "rejected",
        "the backend refused to end the job: farm: permission denied",
    )
    assert scene.farm.looks == 1


async def test_a_backend_that_is_away_is_asked_again_until_the_stop_expires() -> None:
    scene = Scene(Farm(state="away"))
    await scene.view(run_view())
    await scene.issue()
    await scene.view(run_view("lost", next_offset=2))
    await scene.until(CONFIRM_MS - 1)
    assert scene.last.state == "pending"
    assert scene.farm.looks > 3
    await scene.until(CONFIRM_MS)
    assert (scene.last.state, scene.last.reason) == (
        "expired",
        "the backend could not be asked to end the job: farm: no connection",
    )


async def test_a_job_that_does_not_end_expires_with_what_was_seen() -> None:
    scene = Scene(Farm(takes=1_000))
    await scene.view(run_view())
    await scene.issue()
    await scene.view(run_view("lost", next_offset=2))
    await scene.until(CONFIRM_MS)
    assert scene.last.state == "expired"
    assert scene.last.reason == (
        "the backend was asked to end the job, and has not been seen to end it: farm: R"
    )
    assert len(scene.farm.asked) == 1


async def ended(scene: Scene) -> None:
    await scene.view(run_view())
    await scene.issue()
    await scene.view(run_view("lost", next_offset=2))
    await scene.until(CONFIRM_MS)


async def test_after_a_kill_at_any_line_of_the_ledger_the_stop_completes() -> None:
    whole = Scene(Farm(takes=3))
    await ended(whole)
    lines = len(whole.states)
    assert lines >= 6
    for line in range(lines):
        scene = Scene(Farm(takes=3), kill_at=line)
        try:
            await ended(scene)
        except Killed:
            await scene.restart()
            await scene.view(run_view("lost", next_offset=2))
            await scene.until(2 * CONFIRM_MS)
        else:
            pytest.fail(f"line {line} was not reached")
        assert scene.last.state == "delivered", line
        assert scene.last.reason.startswith("the backend"), line
        # Whoever comes next does not know of a request that was not written down, and looks first.
        assert 1 <= len(scene.farm.asked) <= 2, line
        assert {job.incarnation for job in scene.farm.asked} == {incarnation("run-1")}
        assert [one.state for one in scene.states if one.final] == ["delivered"], line


async def test_a_job_that_is_started_again_while_the_service_is_away_goes_on() -> None:
    scene = Scene(Farm(takes=1_000), kill_at=4)
    with pytest.raises(Killed):
        await ended(scene)
    asked = len(scene.farm.asked)
    scene.farm.restarts = 1
    await scene.restart()
    await scene.until(2 * CONFIRM_MS)
    assert len(scene.farm.asked) == asked
    assert scene.last.final
