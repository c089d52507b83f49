"""`explain`, `replay` and `diff`: what a configuration would do, with the lines that decide."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from support.records.issues import NOW_MS, issue, runs_view, view
from tocsin.actions.receivers.build import Receivers
from tocsin.actions.receivers.registry import ReceiverKinds
from tocsin.actions.receivers.webhook.kind import Webhook
from tocsin.console.__main__ import app
from tocsin.console.configuration.issue_rehearsal import count_issues, rehearse, starts_and_ends
from tocsin.schemas.configuration.file import SectionRegistry, check_config
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.events import Event
from tocsin.schemas.records.issues import IssueFiring

CONFIG = """\
version: 1
labels: {team: vision}
receivers:
  chat: {type: webhook, url: "https://chat.example.com/x"}
  pager: {type: webhook, url: "https://pager.example.com/x"}
rules:
  - nonfinite: [stop, chat]
  - overtraining: off
routes:
  - {name: speech, match: {team: speech}, notify: [pager]}
  - {name: vision, match: {team: vision}, notify: {critical: [pager], default: [chat]}, also: true}
  - {name: rest, notify: [chat]}
inhibit:
  - {name: nan, when: {rule: nonfinite}, mute: {rule: loss_spike}}
silences:
  - {match: {rule: overfit}, until: 2100-01-01T00:00:00Z, by: ana, why: known}
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tocsin.yaml").write_text(CONFIG)

    def made(*_: object, **__: object) -> None:
        raise AssertionError("a receiver was made")

    monkeypatch.setattr(Webhook, "target", made)
    monkeypatch.setattr(Webhook, "sender", made)
    monkeypatch.setattr(Receivers, "__init__", made)


def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def said(*words: str) -> list[str]:
    done = run(*words)
    assert done.exit_code == 0, done.exception
    return done.output.splitlines()


def dump(*issues: tuple[int, IssueFiring]) -> None:
    """Issues, each some seconds after the first, as lines of a file."""
    lines = []
    for after_s, one in issues:
        at_ms = NOW_MS + 1000 * after_s
        told = one.model_copy(update={"at_ms": at_ms, "labels": {"team": "vision"}})
        event = Event.wrap(told, id=f"{told.issue_id}/{after_s}", source="/x", time_ms=at_ms)
        lines.append(event.encode().decode())
    Path("issues.jsonl").write_text("\n".join(reversed(lines)) + "\n")


def test_each_decision_is_printed_with_the_line_that_made_it() -> None:
    at = ("--at", "2026-11-20T08:00Z")
    listed = said("explain", "--rule", "nonfinite", "--label", "run=gpt-1", *at)
    routed = said("explain", "--rule", "loss_spike", "--severity", "critical", *at)
    silenced = said("explain", "--rule", "overfit", *at)

    assert listed == [
        "an issue with team=vision, run=gpt-1, rule=nonfinite, severity=critical, "
        "at 2026-11-20 08:00:00 UTC",
        "  rule        the action list of nonfinite decides: stop, chat  (tocsin.yaml:7:5)",
        "  stop        the run is stopped  (tocsin.yaml:7:17)",
        "  notice      to chat  (tocsin.yaml:7:23)",
        "  inhibition  nan mutes others while it is open  (tocsin.yaml:14:5)",
    ]
    assert routed[1:] == [
        "  rule        loss_spike is not listed: its defaults apply",
        "  route       speech does not match  (tocsin.yaml:10:5)",
        "  route       vision matches: pager; the next ones are tried, too  (tocsin.yaml:11:5)",
        "  route       rest matches: chat; no other is tried  (tocsin.yaml:12:5)",
        "  notice      to pager after 2 s, for an issue that explains it  (tocsin.yaml:11:63)",
        "  notice      to chat after 2 s, for an issue that explains it  (tocsin.yaml:12:27)",
        "  inhibition  nan mutes it while an issue explains it  (tocsin.yaml:14:5)",
    ]
    assert "suppressed: silenced by ana until 2100-01-01 00:00:00 UTC" in silenced[5]


def test_a_rule_that_is_not_on_is_refused() -> None:
    off = run("explain", "--rule", "overtraining").exception
    unknown = run("explain", "--rule", "nonfinit").exception

    assert isinstance(off, ConfigurationError)
    assert "'overtraining' is switched off" in str(off)
    assert str(unknown).endswith("the nearest that is on: nonfinite")


def test_explain_in_json_names_stage_decision_and_line() -> None:
    facts = json.loads("\n".join(said("explain", "--rule", "nonfinite", "--json")))

    assert facts["decisions"][1] == {
        "stage": "stop",
        "decision": "the run is stopped",
        "decided_by": "tocsin.yaml:7:17",
    }


def test_past_issues_are_replayed_in_virtual_time_and_no_receiver_is_made() -> None:
    dump(
        (0, issue("gpt-1")),
        (1, issue("gpt-1", "loss_spike", severity="warning", stop_worthy=False)),
        (60, issue("gpt-1", resolved=True)),
    )

    text = said("replay", "--file", "issues.jsonl")
    facts = json.loads("\n".join(said("replay", "--file", "issues.jsonl", "--json")))

    assert text[0] == "run gpt-1"
    assert [" ".join(line.split()[3:8]) for line in text[1:-1]] == [
        "stopped nonfinite critical firing →",
        "sent nonfinite critical new →",
        "suppressed loss_spike warning new →",
        "sent nonfinite critical resolved →",
    ]
    assert "explained by the open issue" in text[3]
    assert text[-1] == "3 issue records: 2 notices, 1 stops, 1 suppressed"
    assert [one["result"] for one in facts["deliveries"]] == [
        "stopped", "sent", "suppressed", "sent",
    ]  # fmt: skip


def test_repeats_are_one_line_with_their_count() -> None:
    text = CONFIG.replace("receivers:", "defaults: {repeat_interval: 10m}\nreceivers:", 1)
    Path("tocsin.yaml").write_text(text)
    dump((0, issue("gpt-1")), (1, issue("gpt-1", "disk_full", severity="warning")))

    found = said("replay", "--file", "issues.jsonl")
    facts = json.loads("\n".join(said("replay", "--file", "issues.jsonl", "--json")))

    repeats = [line for line in found if " repeat " in line and " waits " not in line]
    assert [" ".join(line.split()[3:]).partition(" (")[0] for line in repeats] == [
        "sent nonfinite critical repeat 6 times until 2026-11-21 11:46:52 UTC → chat",
        "sent disk_full warning repeat 6 times until 2026-11-21 11:46:53 UTC → chat",
    ]
    assert sum(one["what"] == "repeat" for one in facts["deliveries"]) == 14


def test_two_configurations_are_compared_run_by_run() -> None:
    dump((0, issue("gpt-1")), (5, issue("gpt-2", "overfit", severity="warning")))
    Path("new.yaml").write_text(
        CONFIG.replace("[stop, chat]", "[chat, pager]").replace(
            "{rule: overfit}", "{rule: disk_full}"
        )
    )

    found = said("diff", "tocsin.yaml", "new.yaml", "--file", "issues.jsonl")
    same = said("diff", "tocsin.yaml", "tocsin.yaml", "--file", "issues.jsonl")
    facts = json.loads(
        "\n".join(said("diff", "tocsin.yaml", "new.yaml", "--file", "issues.jsonl", "--json"))
    )

    assert [(line[:4], line.split()[4]) for line in found if line.startswith("  ")] == [
        ("  - ", "stopped"),
        ("  + ", "sent"),
        ("  - ", "suppressed"),
        ("  + ", "sent"),
    ]
    assert found[-1] == "2 issue records: 3 differences"
    assert same == ["2 issue records: 0 differences"]
    assert [one["new"] and one["new"]["action"] for one in facts["differences"]] == [
        None, "pager", "chat",
    ]  # fmt: skip


def test_times_choose_the_issues() -> None:
    dump((0, issue("gpt-1")), (5, issue("gpt-2")))
    after = said("replay", "--file", "issues.jsonl", "--from", "2026-11-21T10:46:54Z")
    none = said("replay", "--file", "issues.jsonl", "--to", "2000-01-01")
    wrong = run("replay", "--file", "issues.jsonl", "--from", "yesterday").exception

    assert after[0] == "run gpt-2"
    assert none == ["0 issue records: nothing would be sent"]
    assert str(wrong).startswith("--from yesterday: expected a time like")


def test_a_line_that_is_no_event_is_named() -> None:
    Path("issues.jsonl").write_text('\n{"specversion": "1.0"}\n')

    assert str(run("replay", "--file", "issues.jsonl").exception).startswith(
        "issues.jsonl:2: event"
    )


async def test_nothing_is_repeated_after_the_end_of_a_run() -> None:
    text = CONFIG.replace("receivers:", "defaults: {repeat_interval: 60s}\nreceivers:", 1)
    config, problems = check_config(text, "tocsin.yaml", SectionRegistry(ReceiverKinds()))
    assert config is not None, problems
    ended = view("gpt-1", ended=True).model_copy(
        update={"started_ms": NOW_MS - 1_000, "ended_ms": NOW_MS + 150_000}
    )
    runs = runs_view(
        ended,
        # Nobody saw its end; the next one has started.
        view("gpt-2").model_copy(update={"started_ms": NOW_MS - 1_000}),
        view("gpt-2", training=1, next_offset=9).model_copy(update={"started_ms": NOW_MS + 90_000}),
    )
    events = [
        (at_ms, Event.wrap(one, id=f"{one.issue_id}/{at_ms}", source="/x", time_ms=at_ms))
        for at_ms, one in (
            (NOW_MS, issue("gpt-1")),
            (NOW_MS, issue("gpt-2")),
            (NOW_MS + 100_000, issue("gpt-2", training=1)),
        )
    ]
    told = sorted([*starts_and_ends(runs), *events], key=lambda one: one[0])

    found = await rehearse(config, told, path=None, until_ms=NOW_MS + 290_000)

    repeats = [
        (one.run, (one.at_ms - NOW_MS) // 1_000)
        for one in found
        if one.what == "repeat" and one.result == "sent"
    ]
    assert sorted(repeats) == [
        ("gpt-1", 60), ("gpt-1", 120), ("gpt-2", 60), ("gpt-2", 160), ("gpt-2", 220),
        ("gpt-2", 280),
    ]  # fmt: skip
    held = [
        (one.run, (one.at_ms - NOW_MS) // 1_000)
        for one in found
        if one.what == "repeat" and one.result == "suppressed"
    ]
    assert sorted(held) == [("gpt-1", 180), ("gpt-2", 120)]
    assert [one.result for one in found if one.action == "stop"] == ["stopped"] * 3
    assert count_issues(told) == 3
