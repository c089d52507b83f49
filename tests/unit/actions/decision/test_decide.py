"""The way of an issue through all stages: who is told, who is not, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from support.records.issues import NOW_MS, issue
from tocsin.actions.config import decisions_of, routing_of
from tocsin.actions.decision.consequences import Noticed
from tocsin.actions.decision.decide import NOT_RESOLVED, START_NOT_SENT, Decisions, Known
from tocsin.actions.decision.inhibitions import WAIT_MS, OpenIssue
from tocsin.actions.decision.issue_labels import issue_labels
from tocsin.actions.decision.silences import Silence
from tocsin.actions.decision.stop_guards import Fleet
from tocsin.actions.receivers.registry import ReceiverKinds
from tocsin.schemas.configuration.file import SectionRegistry, check_config
from tocsin.schemas.records.issues import Issue, IssueOngoing

RECEIVERS = """
receivers:
  chat: {type: webhook, url: "https://hooks.example.com/chat"}
  pager: {type: webhook, url: "https://hooks.example.com/pager", mute: nights}
  log: {type: webhook, url: "https://hooks.example.com/log", send_resolved: false}
time_windows:
  nights: {weekly: ["22:00-06:00"]}
  days: {weekly: ["06:00-22:00"]}
"""
DAY_MS = NOW_MS  # 2026-11-21 10:46 UTC, a Saturday
NIGHT_MS = NOW_MS + 12 * 3_600_000
TOLD = Noticed("webhook", "then", severity="warning", notified=True, open=True)


@dataclass
class Here(Known):
    silenced: list[Silence] = field(default_factory=list)
    opened: list[OpenIssue] = field(default_factory=list)
    notices: dict[str, dict[str, Noticed]] = field(default_factory=dict)
    off: str = ""
    runs: Fleet = field(default_factory=Fleet)

    def silences(self) -> Iterable[Silence]:
        return self.silenced

    def open_issues(self, run_id: str, incarnation: str) -> Iterable[OpenIssue]:
        return self.opened

    def noticed(self, issue_id: str) -> Mapping[str, Noticed]:
        return self.notices.get(issue_id, {})

    def stops_off(self) -> str:
        return self.off

    def fleet(self, issue: Issue, now_ms: int) -> Fleet:
        return self.runs


def decisions(text: str) -> Decisions:
    registry = SectionRegistry(ReceiverKinds())
    config, problems = check_config(f"version: 1\n{RECEIVERS}{text}", "tocsin.yaml", registry)
    assert config is not None, problems
    return decisions_of(config, routing_of(config))


def decided(
    made: Decisions, found: Issue, known: Known | None = None, now_ms: int = DAY_MS
) -> dict[str, str]:
    """By receiver: `sent`, or why not."""
    planned = made.decide(found, known or Here(), now_ms)
    return {
        item.action: item.forbidden or (item.held.reason if item.held else "sent")
        for item in planned
    }


ROUTED = """
rules:
  - loss_spike: [chat]
  - disk_full: [by_route, pager]
routes:
  - {match: {severity: critical}, notify: [pager, chat]}
  - {notify: {warning: [chat, log]}}
"""


def test_routes_decide_for_rules_without_a_list_or_with_by_route_in_it() -> None:
    made = decisions(ROUTED)
    assert decided(made, issue()) == dict.fromkeys(["stop", "pager", "chat"], "sent")
    warning = {"severity": "warning"}
    assert list(decided(made, issue(**warning))) == ["chat", "log"]  # type: ignore[arg-type]
    assert list(decided(made, issue(severity="info"))) == []
    assert list(decided(made, issue(rule="loss_spike"))) == ["chat"]
    assert list(decided(made, issue(rule="disk_full", severity="warning"))) == [
        *("chat", "log", "pager")
    ]


def test_a_receiver_and_a_route_have_time_windows() -> None:
    made = decisions("routes:\n  - {notify: [pager, chat], active: days}\n")
    warning = issue(severity="warning")
    assert decided(made, warning) == {"pager": "sent", "chat": "sent"}
    assert decided(made, warning, now_ms=NIGHT_MS) == dict.fromkeys(
        ["pager", "chat"],
        "outside the time window days until 2026-11-22 06:00:00 UTC (config: routes.0)",
    )
    made = decisions("rules:\n  - nonfinite: [stop, pager]\n")
    night = decided(made, issue(), now_ms=NIGHT_MS)
    assert night["stop"] == "sent"
    assert night["pager"].startswith("in the time window nights until 2026-11-22 06:00:00 UTC")


def silence(*mutes: str) -> Silence:
    return Silence(
        match={"run": ("run-*",)},
        from_ms=0,
        until_ms=NIGHT_MS,
        mutes=mutes,  # type: ignore[arg-type]
        by="ana",
        why="known",
        decided_by="silence 1a2b3c4d",
    )


def test_a_silence_mutes_notices_or_stops_or_both() -> None:
    made = decisions("rules:\n  - nonfinite: [stop, chat]\n")
    why = "silenced by ana until 2026-11-21 22:46:52 UTC (silence 1a2b3c4d): known"
    assert decided(made, issue(), Here([silence("notify")])) == {"stop": "sent", "chat": why}
    assert decided(made, issue(), Here([silence("stop")])) == {"stop": why, "chat": "sent"}
    assert decided(made, issue(), Here([silence("notify", "stop")])) == {"stop": why, "chat": why}
    assert decided(made, issue(), Here([silence("notify")]), NIGHT_MS)["chat"] == "sent"


def opened(found: Issue) -> OpenIssue:
    return OpenIssue(found.issue_id, issue_labels(found))


def test_an_issue_that_could_be_muted_waits_for_its_cause() -> None:
    made = decisions("""
rules: [loss_spike: [chat], nonfinite: [chat]]
inhibit:
  - {when: {rule: nonfinite}, mute: {rule: loss_spike}}
""")
    spike = issue(rule="loss_spike", severity="warning")
    (waiting,) = made.decide(spike, Here(), DAY_MS)
    assert waiting.wait_ms == WAIT_MS
    (cause,) = made.decide(issue(), Here(), DAY_MS)
    assert cause.wait_ms == 0
    told = decided(made, spike, Here(opened=[opened(spike), opened(issue())]))
    assert told["chat"].startswith("explained by the open issue")


def test_a_consequence_is_told_where_its_cause_was_not() -> None:
    made = decisions("rules: [loss_spike: [chat, pager], nonfinite: [chat]]")
    effect = issue(rule="loss_spike", severity="warning").model_copy(
        update={"consequence_of": "cause"}
    )
    told = decided(made, effect, Here(notices={"cause": {"chat": TOLD}}))
    assert told["pager"] == "sent"
    assert told["chat"] == "a consequence of the issue cause, which was notified and is open"
    graver = effect.model_copy(update={"severity": "critical"})
    assert decided(made, graver, Here(notices={"cause": {"chat": TOLD}}))["chat"] == "sent"


def test_the_end_reaches_exactly_those_who_got_the_start() -> None:
    made = decisions("routes: [{notify: [chat, pager]}]")
    over = issue(resolved=True)
    notices = {over.issue_id: {"chat": TOLD, "log": TOLD, "another": TOLD}}
    everything = Here([silence("notify")], notices=notices)
    assert decided(made, over, everything, NIGHT_MS) == {
        "chat": "sent",
        "log": NOT_RESOLVED,
        "another": "sent",
        "pager": START_NOT_SENT,
    }
    (chat, *_) = made.decide(over, everything, NIGHT_MS)
    assert chat.decided_by == "then"
    muted = over.model_copy(update={"muted": True})
    assert decided(made, muted, everything) == {}


def test_one_that_turns_critical_is_told_to_those_who_know_it_and_to_the_new_route() -> None:
    made = decisions("routes: [{notify: {critical: [pager], default: [chat]}}]")
    graver = issue(raised_from="warning", stop_worthy=False)
    known = Here(notices={graver.issue_id: {"chat": TOLD}})
    assert decided(made, graver, known) == {"pager": "sent", "chat": "sent"}


def test_who_was_not_told_when_it_started_is_told_when_it_goes_on() -> None:
    made = decisions("routes: [{notify: [chat, pager]}]")
    again = IssueOngoing(**dict(issue(severity="warning")))
    held = replace(TOLD, notified=False, open=False, held=True)
    known = Here(notices={again.issue_id: {"chat": TOLD, "pager": held}})
    assert decided(made, again, known, NIGHT_MS) == {}
    (late,) = made.decide(again, known, DAY_MS)
    assert (late.action, late.occasion) == ("pager", "late")
    assert decided(made, again, Here()) == {}, "nobody was to be told of its start"
