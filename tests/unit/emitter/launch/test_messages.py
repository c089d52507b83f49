from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from support.records.launch_news import delivery, issue, view
from tocsin.bus.port import Partition, Record
from tocsin.emitter.launch import messages
from tocsin.emitter.launch.own_run import UNANSWERED_MS, OwnRun
from tocsin.emitter.launch.summary import StopFigures, Summary
from tocsin.schemas.records.configurations import ConfigurationRefused, run_worker
from tocsin.schemas.records.deliveries import REPEAT
from tocsin.schemas.records.events import Data, Event
from tocsin.schemas.records.issues import IssueFiring, IssueOngoing, IssueResolved, Origin
from tocsin.schemas.records.runs import CaptureFigures
from tocsin.schemas.records.stops.commands import (
    StopAcknowledged,
    StopExited,
    StopRefused,
    StopRequested,
)
from tocsin.schemas.records.wire import meta_of

MINE = frozenset({"i1", "i2"})


def record(data: Data) -> Record:
    event = Event.wrap(data, id="x", source="/runs/r1/rules", time_ms=1)
    return Record(Partition("t", 0), 0, 1, b"r1", event.encode(), meta_of(event).headers())


def test_only_news_of_this_job_counts() -> None:
    own = OwnRun("r1")
    assert own.apply(record(issue()), MINE, 0) is not None
    assert own.apply(record(issue()), MINE, 0) is None
    assert own.apply(record(issue(IssueOngoing, severity="warning")), MINE, 0) is not None
    worse = issue(IssueOngoing, severity="critical", raised_from="warning")
    assert own.apply(record(worse), MINE, 0) == worse
    assert own.apply(record(worse), MINE, 0) is None
    assert own.apply(record(issue(run_id="r2", issue_id="y")), MINE, 0) is None
    assert own.apply(record(issue(incarnation="i0", issue_id="z")), MINE, 0) is None
    bad = Record(Partition("t", 0), 0, 1, b"r1", b"rubbish", ())
    assert own.apply(bad, MINE, 0) is None
    assert [found.issue_id for found in own.view.issues] == ["x"]


def test_a_run_is_settled_when_it_ended_and_its_deliveries_are_final() -> None:
    own = OwnRun("r1")
    assert not own.settled("i1", 0)
    own.apply(record(issue()), MINE, 0)
    own.apply(record(view("ended")), MINE, 0)
    assert not own.settled("i1", 100)
    own.apply(record(delivery()), MINE, 100)
    assert not own.settled("i1", 10 * UNANSWERED_MS)
    own.apply(record(delivery("delivered")), MINE, 200)
    assert own.settled("i1", 200)
    assert not own.settled("i2", 200)


def test_a_reminder_that_waits_does_not_hold_up_the_end() -> None:
    own = OwnRun("r1")
    own.apply(record(issue()), MINE, 0)
    own.apply(record(view("ended")), MINE, 0)
    own.apply(record(delivery("delivered")), MINE, 100)
    own.apply(record(delivery(delivery_id="again", occasion=REPEAT, repeat=1)), MINE, 100)
    assert own.settled("i1", 200)
    assert own.open_deliveries() == []


def test_an_issue_that_nobody_is_told_about_does_not_hold_up_the_end() -> None:
    own = OwnRun("r1")
    own.apply(record(issue()), MINE, 0)
    own.apply(record(view("ended")), MINE, 0)
    assert not own.settled("i1", UNANSWERED_MS)
    assert own.settled("i1", UNANSWERED_MS + 1)


def test_a_state_is_answered_by_its_own_delivery_alone() -> None:
    own = OwnRun("r1")
    own.apply(record(issue()), MINE, 0)
    own.apply(record(delivery("delivered")), MINE, 0)
    own.apply(record(issue(IssueResolved)), MINE, 100)
    own.apply(record(delivery("delivered", delivery_id="e", issue_state="resolved")), MINE, 100)
    own.apply(record(issue(times=2)), MINE, 200)
    own.apply(record(view("ended")), MINE, 300)
    assert not own.settled("i1", 300)
    own.apply(record(delivery("delivered", delivery_id="f", issue_times=2)), MINE, 400)
    assert own.settled("i1", 400)
    own.apply(record(issue(IssueOngoing, times=2)), MINE, 400)
    own.apply(record(issue(IssueResolved, times=3, muted=True)), MINE, 400)
    assert own.settled("i1", 400), "nobody is notified of these"


def test_an_issue_that_comes_back_is_news_and_as_grave_as_it_was() -> None:
    own = OwnRun("r1")
    own.apply(record(issue(times=2)), MINE, 0)
    milder = issue(
        times=3, severity="warning", peak_severity="critical", first_step=2400,
        origin=Origin(step=1200, rank=1, onset_ms=5),
    )  # fmt: skip
    assert own.apply(record(milder), MINE, 0) == milder
    (kept,) = own.view.issues
    assert (kept.severity, kept.first_step, kept.times) == ("critical", 1200, 3)
    again = issue(IssueOngoing, times=3, raised_from="warning", first_step=2400)
    assert own.apply(record(again), MINE, 0) == again
    assert own.apply(record(again), MINE, 0) is None
    assert own.apply(record(issue(times=4)), MINE, 0) is not None


def test_an_older_view_does_not_replace_a_newer_one() -> None:
    own = OwnRun("r1")
    own.apply(record(view("ended", next_offset=9, last_step=4)), MINE, 0)
    own.apply(record(view("running", next_offset=5, last_step=2)), MINE, 0)
    assert own.ended("i1")
    own.apply(record(view("ended", incarnation="i2", last_step=9)), MINE, 0)
    assert own.steps() == 5 + 10


def test_only_steps_that_the_rules_have_seen_are_judged() -> None:
    own = OwnRun("r1")
    assert own.judged_steps("i1", 50) == 0
    own.apply(record(view(last_step=29)), MINE, 0)
    assert own.judged_steps("i1", 50) == 30
    assert own.judged_steps("i1", 20) == 20
    own.apply(record(view("ended", last_step=29, next_offset=9)), MINE, 0)
    assert own.judged_steps("i1", 50) == 50, "the rest was lost on the way, and is counted so"


def test_figures_of_all_incarnations_are_joined() -> None:
    own = OwnRun("r1")
    for name, share, every in (("i1", 0.2, {"weights": 50}), ("i2", 0.5, {"weights": 10, "x": 1})):
        figures = CaptureFigures(
            overhead_percent=share, budget_percent=0.5, intervals=every,
            records=5, dropped=1, degraded=("a",),
        )  # fmt: skip
        own.apply(record(view(incarnation=name, capture=figures)), MINE, 0)
    joined = own.capture()
    assert joined is not None
    assert (joined.overhead_percent, joined.records, joined.degraded) == (0.5, 10, ("a",))
    assert (joined.budget_percent, joined.intervals) == (0.5, {"weights": 50, "x": 1})


def test_what_is_off_is_told_once_when_it_happens() -> None:
    figures = CaptureFigures(
        overhead_percent=0.1, records=5, dropped=0,
        degraded=("gradients: OSError: planted", "phases: back: again"), not_watched=("gradients",),
    )  # fmt: skip
    told: set[str] = set()
    assert messages.switched_off_lines(figures, told) == [
        "capture of gradients was switched off (OSError: planted); training is not affected"
    ]
    assert messages.switched_off_lines(figures, told) == []


def test_the_lines_for_people() -> None:
    line = "critical: nonfinite at step 1,200, rank 1, layer.weight: NaN in it"
    assert messages.issue_line(issue()) == line
    cause = issue(issue_id="c", rule="gradients_not_cleared", first_step=1)
    effect = issue(consequence_of="c")
    told = f"{line} (a consequence of gradients_not_cleared at step 1)"
    assert messages.issue_line(effect, cause) == told
    assert messages.issue_line(issue(IssueResolved)) == (
        "resolved: nonfinite (layer.weight) no longer fires"
    )
    assert messages.delivery_line(delivery()) is None
    done = "  nonfinite -> chat: delivered (accepted)"
    assert messages.delivery_line(delivery("delivered")) == done
    assert messages.delivery_line(delivery("delivered", kind="stop")) is None
    approval = {"why": "mode: ask", "until_ms": 1_800_000_000_000}
    asked = delivery(kind="stop", delivery_id="7f8a4a1c-9f3b", approval=approval)
    assert messages.delivery_line(asked) == (
        "  stop the job? `tocsin approve 7f8a4a1c` stops it; without an answer until "
        "2027-01-15 08:00:00 UTC it is not stopped"
    )
    shadow = delivery("suppressed", kind="stop", held="shadow", reason="mode: shadow: not sent")
    assert messages.delivery_line(shadow) == "  not stopped: mode: shadow: not sent"
    figures = CaptureFigures(overhead_percent=0.31, records=5, dropped=0)
    end = "1,200 steps watched, 0 issues, overhead 0.3 %"
    assert end_line(1200, [], figures) == end
    off = figures.model_copy(update={"not_watched": ("gradients", "phases")})
    assert end_line(1200, [], off) == f"{end}; not watched: gradients, phases"
    more = "1 step watched, 1 issue; tocsin why 0a1b2c3d"
    found = issue(issue_id="0a1b2c3d-4e5f")
    assert end_line(1, [found]) == more
    blind = "1,200 steps recorded, none checked: no rules worker has read them, overhead 0.3 %"
    assert end_line(1200, [], figures, judged=0) == blind
    half = "1,200 steps recorded, only 1,100 checked by rules, 0 issues"
    assert end_line(1200, judged=1100) == half
    lost = "1 step watched, 0 issues, 2 launcher records not sent"
    assert end_line(1, unsent=2) == lost
    assert end_line(0, [], figures) == "no training seen, 0 issues"
    seen = "no training seen, 0 issues, not watched: trainings in 2 child processes"
    assert end_line(0, unwatched={"child": {7, 8}}) == seen


def end_line(
    steps: int,
    issues: Sequence[IssueFiring] = (),
    capture: CaptureFigures | None = None,
    *,
    judged: int | None = None,
    stop: StopRequested | None = None,
    unsent: int = 0,
    again: Sequence[str] = (),
    unwatched: Mapping[str, Collection[int]] | None = None,
) -> str:
    summary = Summary(
        run_id="r1", outcome="completed", exit_code=0, steps=steps, duration_s=1.0, issues=issues,
        judged_steps=steps if judged is None else judged,
        rules={}, stop=None if stop is None else StopFigures(command=stop), capture=capture,
    )  # fmt: skip
    return messages.end_line(summary, unsent=unsent, again=again, unwatched=unwatched)


def command(**changes: object) -> StopRequested:
    fields: dict[str, object] = {
        "command_id": "c", "run_id": "r1", "incarnation": "i1", "reason": "wrong\ndata",
        "requested_by": "ana@node-1", "requested_ms": 1, "not_after_ms": 2, "nonce": "n",
    }  # fmt: skip
    return StopRequested.model_validate(fields | changes)


def test_the_end_says_who_stopped_the_run_and_which_issue_to_read() -> None:
    by_ana = "9 steps watched, 0 issues, stopped by ana@node-1: wrong data"
    assert end_line(9, stop=command()) == by_ana
    first, second = issue(issue_id="11111111-1"), issue(issue_id="22222222-2")
    minor = issue(issue_id="33333333-3", severity="warning")
    assert end_line(9, [minor, first]) == "9 steps watched, 2 issues; tocsin why 11111111"
    stopping = command(issue_id=second.issue_id)
    line = "9 steps watched, 2 issues; tocsin why 22222222 --config 'my file.yaml'"
    assert end_line(9, [first, second], stop=stopping, again=["--config", "my file.yaml"]) == line


def test_a_refused_configuration_is_news_of_the_run_whose_helper_refused_it() -> None:
    own = OwnRun("r1")
    refused = ConfigurationRefused(
        worker=f"{run_worker('r1')}@node-1",
        at_ms=1,
        problems=("tocsin.yaml:5:5: unknown rule 'nonfinit'", "tocsin.yaml:6:5: other"),
        more=1,
    )
    assert own.apply(record(refused), frozenset(), 0) == refused
    for worker in (f"{run_worker('r10')}@node-1", "rules@node-1"):
        other = refused.model_copy(update={"worker": worker})
        assert own.apply(record(other), MINE, 0) is None
    assert messages.refused_line(refused) == (
        "new configuration refused, the old one stays in effect: tocsin.yaml:5:5: unknown rule "
        "'nonfinit' (2 more: tocsin check)"
    )


def test_the_lines_about_a_stop() -> None:
    heard = StopAcknowledged(run_id="r1", incarnation="i1", role="launcher", command_id="c")
    by_ana = "  stopping the job, requested by ana@node-1: wrong data"
    assert messages.stop_line(heard, command=command()) == by_ana
    by_rule = "  stopping the job: wrong data"
    assert messages.stop_line(heard, command=command(issue_id="x")) == by_rule
    who = {"run_id": "r1", "incarnation": "i1", "command_id": "c"}
    exited = StopExited.model_validate({**who, "how": "SIGTERM", "exit_code": 143})
    assert messages.stop_line(exited) == "  job stopped by SIGTERM"
    cleanly = StopExited.model_validate({**who, "how": "edge", "exit_code": 79})
    assert messages.stop_line(cleanly) == "  job stopped cleanly"
    assert messages.stop_line(cleanly, step=1041) == "  job stopped cleanly after step 1,041"
    refused = StopRefused.model_validate({**who, "why": "expired", "reason": "too late"})
    assert messages.stop_line(refused) == "stop refused (expired): too late"


def test_the_lines_that_say_what_to_do() -> None:
    unheard = messages.unheard_line(["/opt/python"])
    assert "from the job: /opt/python runs without tocsin's hook (`-I`, `-E`, `-S`" in unheard
    assert "other than Python" not in unheard
    unknown = messages.unheard_line(["no-such-program"])
    assert "from the job: its Python, if it has one, runs without tocsin's hook" in unknown
    assert unknown.endswith("monitored from outside only (CPU, memory, GPU)")
    left = messages.left_over_line([delivery()], True, 15, "embedded:/b")
    assert left == (
        "1 delivery pending (chat) after 15 s; to finish, run `tocsin actions --bus embedded:/b`"
    )
    again = ["--config", "my file.yaml", "--bus", "embedded:b"]
    left = messages.left_over_line([], True, 15, "embedded:/b", again)
    assert "to finish, run `tocsin actions --config 'my file.yaml' --bus embedded:b`" in left
    assert messages.interpreter_of(["python3", "x.py"]) == "python3"
    assert messages.interpreter_of(["/bin/true"]) is None
