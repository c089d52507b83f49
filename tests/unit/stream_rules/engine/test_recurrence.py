"""Conditions that come and go: one issue, few notices, the same ids in replay and restarts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import pytest

from tocsin.bus.port import Record
from tocsin.schemas.ids import delivery_id
from tocsin.schemas.records.frames import StepFrame
from tocsin.schemas.records.issues import IssueFiring, Subject
from tocsin.stream_rules.engine.episodes import MAX_NOTICES, Episodes
from tocsin.stream_rules.engine.partitions import PartitionEngine
from tocsin.stream_rules.engine.recurrence import AGAIN_STEPS, Past
from tocsin.stream_rules.engine.run_state import RunState
from tocsin.stream_rules.outcomes import Clear, Finding, Holds, Moment, Outcome
from tocsin.stream_rules.reading.state_codec import dump_state, load_state
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, scalar
from tocsin.stream_rules.testing import RunBuilder, issues_of, only


class HighParams(Params):
    """How it finds: `critical` from which value on."""

    critical: float = 100.0
    each_its_own: bool = False


@dataclass
class HighState:
    """Where the condition at hand began."""

    since: int | None = None


class High(Rule[HighParams, HighState]):
    """The loss is above 1."""

    meta = RuleMeta(
        name="high",
        version=1,
        family="progress",
        meaning="The loss is above 1.",
        severity="warning",
        stop_worthy=True,
        inputs=(scalar("loss"),),
        remedy="Lower it.",
        params=HighParams,
    )
    state_type = HighState

    def on_steps(self, frame: StepFrame, at: Moment) -> Iterable[Outcome]:
        losses = frame.column("loss")
        assert losses is not None
        for step, loss in zip(frame.steps.tolist(), losses.tolist(), strict=True):
            severity: Literal["warning", "critical"]
            severity = "critical" if loss >= self.params.critical else "warning"
            if loss <= 1:
                self.state.since = None
                yield Clear(step)
            elif self.state.since is not None and severity == "warning":
                yield Holds(step)
            else:
                self.state.since = step if self.state.since is None else self.state.since
                yield Finding(
                    subject=Subject(kind="loss", name="loss"),
                    reason=f"the loss is {loss:g}",
                    first_step=self.state.since,
                    severity=severity,
                    about=str(step) if self.params.each_its_own else "",
                )


def flapping(
    every: int, length: int, steps: int, *, high: float = 2.0, step_ms: int = 100
) -> RunBuilder:
    run = RunBuilder(step_ms=step_ms)
    run.started()
    for begin in range(0, steps, every):
        run.steps(range(begin, begin + every - length), per_frame=20, loss=0.5)
        run.steps(range(begin + every - length, begin + every), per_frame=20, loss=high)
    return run


def told(records: list[Record], *, each_its_own: bool = False) -> list[IssueFiring]:
    return issues_of(records, specs=only(High, each_its_own=each_its_own))


def states(issues: list[IssueFiring]) -> Counter[str]:
    return Counter(issue.state for issue in issues)


def test_a_loss_that_jumps_each_sixty_steps_is_one_issue() -> None:
    issues = told(flapping(60, 12, 5_520).records)
    assert len({issue.issue_id for issue in issues}) == 1
    assert states(issues)["resolved"] == 1
    fired = [(i.times, i.muted, i.first_step) for i in issues if i.state == "firing"]
    assert fired[0] == (1, False, 48)
    assert fired[1] == (2, True, 108)
    assert len(fired) == 2
    assert not any(i.state != "resolved" and i.times > 2 for i in issues)


def test_a_return_is_notified_once_the_repeat_is_over() -> None:
    issues = told(flapping(60, 12, 9_000).records)
    late = [i for i in issues if i.state == "firing" and i.times > 1]
    assert [i.muted for i in late] == [True, False]
    assert late[1].at_ms - issues[0].at_ms >= High.meta.repeat_ms
    assert late[1].times > 2
    assert late[1].reason.endswith(f"(time {late[1].times} in this run)")


def test_a_return_that_is_critical_is_notified_at_once() -> None:
    run = flapping(200, 12, 800, high=200.0)
    issues = told(run.records)
    fired = [i for i in issues if i.state == "firing"]
    assert [(i.times, i.muted, i.severity) for i in fired] == [
        (1, False, "critical"),
        (2, False, "critical"),
        (3, False, "critical"),
        (4, False, "critical"),
    ]
    assert [i.first_step for i in fired] == [188, 388, 588, 788]
    assert len({i.issue_id for i in fired}) == 1


def at_steps(*pieces: tuple[int, int, float], step_ms: int = 10_000) -> RunBuilder:
    """The loss is 0.5 but for pieces: from which step, how many steps, which loss."""
    run = RunBuilder(step_ms=step_ms)
    run.started()
    now = 0
    for begin, length, loss in pieces:
        run.steps(range(now, begin), per_frame=20, loss=0.5)
        now = begin + length
        run.steps(range(begin, now), per_frame=20, loss=loss)
    run.steps(range(now, now + 1_200), per_frame=20, loss=0.5)
    return run


def test_a_critical_return_in_the_hold_is_notified_and_a_short_gap_is_no_return() -> None:
    run = at_steps(*((s, 5, 200.0) for s in (1_000, 1_500, 2_400, 2_410, 3_300, 4_200)))
    fired = [i for i in told(run.records) if i.state == "firing"]
    assert [(i.first_step, i.times, i.muted) for i in fired] == [
        (1_000, 1, False),
        (1_500, 1, False),
        (2_400, 2, False),
        (3_300, 3, False),
        (4_200, 4, False),
    ]
    assert states(told(run.records))["resolved"] == 3


def test_a_warning_that_comes_back_in_the_hold_fires_once_the_repeat_is_over() -> None:
    quick = at_steps((100, 20, 2.0), (200, 20, 2.0), (300, 1_000, 2.0), step_ms=1_000)
    fired = [i for i in told(quick.records) if i.state == "firing"]
    assert [(i.times, i.muted) for i in fired] == [(1, False), (2, True), (3, False)]
    assert fired[2].at_ms - fired[1].at_ms >= High.meta.repeat_ms


def test_a_return_that_turns_critical_again_is_notified_again() -> None:
    run = at_steps((100, 20, 200.0), (200, 20, 200.0), (300, 5, 2.0), (305, 5, 200.0), step_ms=100)
    spoken = [
        (i.state, i.times, i.severity, i.muted, i.first_step)
        for i in told(run.records)
        if i.state == "firing" or i.turned_critical
    ]
    assert spoken == [
        ("firing", 1, "critical", False, 100),
        ("firing", 2, "critical", False, 200),
        ("ongoing", 3, "critical", False, 300),
    ]


def test_an_issue_that_comes_back_milder_says_how_grave_it_was_and_where_it_began() -> None:
    issues = told(at_steps((100, 20, 200.0), (200, 20, 2.0), (300, 20, 2.0), step_ms=100).records)
    assert len({i.issue_id for i in issues}) == 1
    last = issues[-1]
    assert (last.state, last.severity, last.first_step, last.times) == (
        "resolved", "warning", 300, 3,
    )  # fmt: skip
    assert last.peak_severity == "critical"
    whole = last.overall()
    assert (whole.severity, whole.first_step, whole.onset_ms) == (
        "critical", 100, issues[0].onset_ms,
    )  # fmt: skip
    assert issues[0].overall() is issues[0]


class AtStep(RunState):
    """A run without ranks that is at a step all the same."""

    step = 0

    @property
    def last_step(self) -> int | None:
        return self.step


def test_a_condition_that_comes_back_as_another_branch_is_one_more_time_of_it() -> None:
    episodes, run = Episodes(), AtStep(run_id="r", incarnation="i")
    issues: list[IssueFiring] = []

    def take(step: int, outcome: Outcome) -> None:
        run.step = step
        at = Moment(now_ms=100 * step, run=run)
        one = episodes.apply(outcome, at, name="high", meta=High.meta, severity=None)
        settled = episodes.settle(at, name="high", meta=High.meta)
        issues.extend(each.issue for each in [*([one] if one else []), *settled])

    for step, first, branch in ((100, 100, "risen"), (150, 100, "lost"), (200, 200, "risen")):
        severity: Literal["warning", "critical"] = "critical" if branch == "lost" else "warning"
        take(
            step,
            Finding(
                subject=Subject(kind="loss", name="loss"),
                reason="high",
                first_step=first,
                branch=branch,
                severity=severity,
            ),
        )
        for clear in range(step + 1, step + 40):
            take(clear, Clear(clear))
    fired = [i for i in issues if i.state == "firing"]
    assert len({i.issue_id for i in fired}) == 1
    assert [(i.branch, i.times, i.muted) for i in fired] == [
        ("risen", 1, False),
        ("lost", 2, False),
        ("risen", 3, True),
    ]
    ids = {delivery_id(i.issue_id, "chat", i.state, i.times) for i in fired}
    assert len(ids) == len(fired)


def test_one_that_turns_critical_counts_as_a_notice_too() -> None:
    run = RunBuilder()
    run.started()
    for step in range(MAX_NOTICES):
        run.steps([step], loss=200.0)
    late = MAX_NOTICES
    run.steps([late], loss=2.0)
    run.steps([late + 1], loss=200.0)
    found = told(run.records, each_its_own=True)
    critical = [i for i in found if i.severity == "critical"]
    assert [i.muted for i in critical] == [i >= MAX_NOTICES for i in range(len(critical))]
    capped = Episodes(notices={"critical": MAX_NOTICES})
    state = AtStep(run_id="r", incarnation="i")
    rises: list[IssueFiring] = []
    for severity in ("warning", "critical"):
        finding = Finding(
            subject=Subject(kind="loss", name="loss"), reason="x", first_step=1, severity=severity
        )
        one = capped.apply(
            finding, Moment(now_ms=1, run=state), name="high", meta=High.meta, severity=None
        )
        assert one is not None
        rises.append(one.issue)
    assert [i.muted for i in rises] == [False, True]
    assert rises[1].turned_critical
    state.step = 100
    at = Moment(now_ms=2, run=state)
    over = capped.apply(Clear(100, since=2), at, name="high", meta=High.meta, severity=None)
    assert over is not None
    assert not over.issue.muted, "its receivers know that it fired"


def test_what_an_older_release_remembers_of_an_issue_is_read() -> None:
    past = Past(
        id="x", branch="", times=2, told=3, began=5, over=9, length=4, before=None, in_ms=False,
        pause=10, noticed_ms=7,
    )  # fmt: skip
    plain = json.loads(dump_state(Episodes(past={"": past})))
    for name in ("peak", "origin"):
        del plain["past"][""][name]
    read = load_state(Episodes, json.dumps(plain).encode())
    assert read == Episodes(past={"": past})


def test_what_comes_again_much_later_is_another_issue() -> None:
    run = RunBuilder()
    run.started()
    gap = AGAIN_STEPS + 100
    run.steps([0], loss=2.0)
    run.steps(range(1, gap), per_frame=50, loss=0.5)
    run.steps([gap], loss=2.0)
    fired = [i for i in told(run.records) if i.state == "firing"]
    assert [(i.times, i.first_step) for i in fired] == [(1, 0), (1, gap)]
    assert fired[0].issue_id != fired[1].issue_id


def test_a_third_short_one_within_the_window_is_the_second_one_again() -> None:
    run = RunBuilder()
    run.started()
    for begin in (0, 700, 1_400):
        run.steps([begin], loss=2.0)
        run.steps(range(begin + 1, begin + 700), per_frame=50, loss=0.5)
    fired = [i for i in told(run.records) if i.state == "firing"]
    assert [i.times for i in fired] == [1, 1, 2]
    assert fired[1].issue_id == fired[2].issue_id


def test_the_end_is_told_with_what_it_began_as() -> None:
    run = RunBuilder()
    run.started()
    run.steps([0], loss=2.0)
    run.steps([1], loss=500.0)
    run.steps(range(2, 40), loss=0.5)
    issues = told(run.records)
    assert [i.reason for i in issues] == ["the loss is 2", "the loss is 500", "the loss is 2"]
    assert issues[-1].state == "resolved"


def test_a_rule_sends_so_many_notices_of_a_run_and_stops_are_not_counted() -> None:
    run = RunBuilder()
    run.started()
    for begin in range(0, 1_500, 50):
        run.steps([begin], loss=2.0)
        run.steps(range(begin + 1, begin + 50), per_frame=50, loss=0.5)
    run.steps([1_500], loss=200.0)
    issues = [i for i in told(run.records, each_its_own=True) if i.state == "firing"]
    warnings = [i for i in issues if i.severity == "warning"]
    assert [i.muted for i in warnings] == [i >= MAX_NOTICES for i in range(len(warnings))]
    assert [i.times for i in warnings if i.last_notice] == [1]
    assert warnings[MAX_NOTICES - 1].last_notice
    assert warnings[MAX_NOTICES - 1].remedy == High.meta.remedy
    assert not issues[-1].muted
    assert issues[-1].severity == "critical"


@pytest.mark.parametrize("high", [2.0, 200.0])
@pytest.mark.parametrize("cut", [7, 12, 13, 40])
def test_a_restart_between_the_times_changes_nothing(cut: int, high: float) -> None:
    records = flapping(60, 12, 900, high=high).records
    specs = only(High)
    once = PartitionEngine(specs)
    whole = [one for record in records for one in once.apply(record)]
    first, second = PartitionEngine(specs), PartitionEngine(specs)
    before = [one for record in records[:cut] for one in first.apply(record)]
    run = first.run("made")
    assert run is not None
    snapshots = run.snapshots(next_offset=cut, clock_ms=records[cut].append_ms, software="test")
    second.adopt(
        records[0].partition.number,
        "made",
        {snapshot.rule: snapshot for snapshot in snapshots},
        next_offset=cut,
    )
    after = [one for record in records[cut:] for one in second.apply(record)]
    assert [*before, *after] == whole
    assert len({one.event_id for one in whole}) == len(whole)
