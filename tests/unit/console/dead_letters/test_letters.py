"""`tocsin bus dlq` and `redrive`: what they print of dead letters, and what they refuse.

That they are sent once more: `tests/contract/test_action_workers.py`.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from support.records.issues import NOW_MS, TOPICS
from tocsin.actions.delivery.records import failed_letter
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import Outgoing, Partition, Record
from tocsin.console.__main__ import app
from tocsin.console.dead_letters.letters import (
    choose_letter,
    letters_json,
    letters_of,
    letters_table,
    state_of,
    written_back,
)
from tocsin.runtime.dead_letters import dead_letter
from tocsin.schemas.errors import ConfigurationError, MalformedRecord
from tocsin.schemas.records.deliveries import Attempt, Delivery
from tocsin.schemas.text import time_text
from tocsin.stream_rules.testing import RunBuilder, issues_of

FAILED = Delivery(
    delivery_id="7f8a4a1c-9f3b-5a2b-8a55-5b0c0c2b7d11",
    issue_id="b1c5a1de-3b0f-5d0e-8a35-6a4c1c1f9d27",
    run_id="run-1",
    incarnation="i",
    rule="nonfinite",
    issue_state="firing",
    action="ml",
    kind="webhook",
    state="rejected",
    reason="404 Not Found",
    created_ms=NOW_MS,
    updated_ms=NOW_MS,
    give_up_ms=NOW_MS + 60_000,
    attempts=1,
    last_attempts=(Attempt(at_ms=NOW_MS, result="404 Not Found", retry=False),),
)
SICK = Record(Partition(TOPICS.telemetry, 7), 42, NOW_MS, b"run", b"\xff", (("tocsin-type", b"x"),))
POISON = dead_letter(
    SICK, MalformedRecord("not JSON"), topic=TOPICS.dlq, service="rules", software="", now_ms=NOW_MS
)
LETTER = failed_letter(
    TOPICS, FAILED, FAILED.model_copy(update={"event": {"token": "planted-SECRET"}}), NOW_MS
)


def read(*made: Outgoing) -> list[Record]:
    return [
        Record(one.partition, offset, NOW_MS + offset, one.key, one.value, one.headers)
        for offset, one in enumerate(made)
    ]


def test_deliveries_and_records_are_told_apart_and_the_newest_counts() -> None:
    later = FAILED.model_copy(update={"reason": "410 Gone", "event": {"b": 2}})
    letters = letters_of(read(LETTER, POISON, failed_letter(TOPICS, later, later, NOW_MS + 9)))
    assert [(one.shown_id, one.about, one.why.message) for one in letters] == [
        ("tocsin.telemetry.v1/7/42", "a record that rules could not use", "not JSON"),
        ("7f8a4a1c", "nonfinite (firing) of run-1 to ml", "410 Gone"),
    ]
    assert [state_of(one, {}) for one in letters] == ["waiting", "rejected"]
    redriven = later.model_copy(update={"state": "pending", "redrives": 1})
    assert state_of(letters[1], {FAILED.delivery_id: redriven}) == "redriven: pending"
    text = letters_json(letters, {}) + str(letters_table(letters, {}).rows)
    assert "SECRET" not in text


def test_a_record_is_written_back_to_the_byte() -> None:
    (letter,) = letters_of(read(POISON))
    back, marker = written_back(letter, TOPICS, by="ana", now_ms=NOW_MS)
    assert (back.partition, back.key, back.value, back.headers) == (
        SICK.partition,
        SICK.key,
        SICK.value,
        SICK.headers,
    )
    (letter,) = letters_of(read(POISON, marker))
    assert state_of(letter, {}) == "redriven"


def test_telemetry_that_is_written_back_is_no_repeat_of_its_sender() -> None:
    run = RunBuilder("run-1")
    run.started()
    run.steps(range(5), loss=1.0)
    run.steps([5], loss=float("nan"))
    sick = run.records.pop()
    run.steps(range(6, 20), loss=1.0)
    poison = dead_letter(
        sick, MalformedRecord("?"), topic=TOPICS.dlq, service="rules", software="", now_ms=NOW_MS
    )
    (letter,) = letters_of(read(poison))

    back, _ = written_back(letter, TOPICS, by="ana", now_ms=NOW_MS)

    late = replace(sick, offset=len(run.records) + 1, append_ms=run.now_ms, headers=back.headers)
    assert [one.rule for one in issues_of(run.records)] == []
    assert {one.rule for one in issues_of([*run.records, late])} == {"nonfinite"}


def test_an_id_may_be_begun_but_not_ambiguous() -> None:
    letters = letters_of(read(LETTER, POISON))
    assert choose_letter(letters, "7f8a").letter_id == FAILED.delivery_id
    for text, words in [("7f8", "at least its first 4"), ("abcd", "no dead letter 'abcd'")]:
        with pytest.raises(ConfigurationError, match=words):
            choose_letter(letters, text)
    others = [*letters, *letters_of(read(POISON))]
    with pytest.raises(ConfigurationError, match="2 dead letters begin with 'tocsin'"):
        choose_letter(others, "tocsin")


def test_the_commands(tmp_path: Path) -> None:
    url = f"embedded:{tmp_path / 'bus.db'}"

    def tocsin(*words: str) -> Result:
        return CliRunner().invoke(app, ["bus", *words, "--bus", url], env={"COLUMNS": "200"})

    async def fill(*records: Outgoing) -> None:
        async with EmbeddedBus(tmp_path / "bus.db") as bus:
            await bus.init(TOPICS.specs())
            producer = await bus.producer()
            await producer.publish(records)
            await producer.close()

    asyncio.run(fill())
    assert tocsin("dlq").output == "no dead letters\n"
    assert tocsin("redrive", "--all").output == "no dead letters to send\n"
    asyncio.run(fill(LETTER, POISON))
    listed = tocsin("dlq").output
    assert "nonfinite (firing) of run-1 to ml" in listed
    assert "Rejected: 404 Not Found" in listed
    facts = json.loads(tocsin("dlq", "list", "--json").output)["dead_letters"]
    assert [one["id"] for one in facts] == [FAILED.delivery_id, "tocsin.telemetry.v1/7/42"]
    shown = tocsin("dlq", "show", "7f8a4a1c").output
    assert f"attempt: {time_text(NOW_MS)}, 404 Not Found" in shown
    assert "SECRET" not in listed + shown
    for words in ([], ["7f8a", "--all"], ["7f8a", "--receiver", "ml"]):
        assert isinstance(tocsin("redrive", *words).exception, ConfigurationError)
    sent = json.loads(tocsin("redrive", "--all", "--receiver", "ml", "--json").output)
    assert sent == {"version": 1, "sent": [FAILED.delivery_id], "skipped": {}}
    assert "redriven: pending" in tocsin("dlq").output
    assert "it is pending already" in tocsin("redrive", "7f8a").output


@pytest.mark.parametrize(
    "options", [("--bus", "embedded:x.db"), ("--config", "x"), ("--since", "1h"), ("--json",)]
)
@pytest.mark.parametrize("command", [("list",), ("show", "7f8a4a1c")])
def test_options_before_a_command_are_refused(
    options: tuple[str, ...], command: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigurationError, match=f"put options after `{command[0]}`"):
        CliRunner().invoke(app, ["bus", "dlq", *options, *command], catch_exceptions=False)
