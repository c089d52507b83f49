"""What is kept for the child, and who is blamed for its end: without a process."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tocsin.bus.port import Partition, Record
from tocsin.schemas.records.snapshots import Snapshot
from tocsin.stream_rules.custom.backlog import Backlog
from tocsin.stream_rules.custom.call_limits import Limits
from tocsin.stream_rules.custom.current_call import Mark, Marker, new_page
from tocsin.stream_rules.custom.exit_cause import ExitCauses, ProcessExit
from tocsin.stream_rules.custom.protocol import (
    Adopt,
    Answer,
    DisabledRule,
    Forget,
    Records,
    Save,
    Saved,
    SavedRun,
    Unpacker,
    Used,
    pack,
)

PLACE = Partition("tocsin.telemetry.v1", 3)
MARK = Mark(1, "mine", "run-1", 3, 40)


def record(offset: int, value: bytes | None = b"x", key: bytes = b"run-1") -> Record:
    return Record(PLACE, offset, 1000 + offset, key, value, (("tocsin-type", b"steps"),))


def backlog(records: int = 6, limits: Limits | None = None) -> Backlog:
    made = Backlog(limits or Limits(batch_records=2))
    for offset in range(records):
        made.feed(record(offset), 0.0)
    return made


def sent(made: Backlog) -> list[int]:
    """The offsets of what goes to the child now."""
    found: list[int] = []
    while (message := made.next_message()) is not None:
        if isinstance(message, Records):
            found += [one.offset for one in message.records]
    return found


def saved(covers: int, *, failed: Sequence[str] = ()) -> Answer:
    own = Snapshot(
        run_id="run-1",
        incarnation="i",
        rule="_custom",
        rule_version=1,
        next_offset=covers,
        payload=b"",
    )
    run = SavedRun(
        partition=3,
        run_id="run-1",
        incarnation="i",
        statuses={},
        found=0,
        over=False,
        failed=tuple(failed),
        snapshots=(own,),
    )
    return Answer(done=1, saved=Saved(covers={3: covers}, runs=(run,), urgent=False))


def test_no_more_is_under_way_than_a_child_can_lose() -> None:
    made = backlog()

    assert sent(made) == [0, 1, 2, 3]
    made.answered(Answer(done=1))
    assert sent(made) == [4, 5]


def test_another_child_goes_on_from_the_last_state_over_all_that_came_since() -> None:
    made = backlog()
    sent(made)
    made.answered(saved(2))
    sent(made)

    made.restart([], 5.0)

    first = made.next_message()
    assert first is not None
    assert isinstance(first, Adopt)
    assert first.next_offset == 2
    assert sent(made) == [2, 3]


def test_what_a_child_says_of_forgotten_partitions_is_old() -> None:
    made = backlog(2)
    assert sent(made) == [0, 1]
    made.release([3])
    made.feed(record(0), 0.0)

    made.answered(saved(2))

    assert made.runs == {}
    assert made.drain().covers == {}
    first = made.next_message()
    assert first is not None
    assert isinstance(first, Forget)
    made.answered(Answer(done=1))
    assert sent(made) == [0]
    made.answered(saved(1))
    assert list(made.runs) == [(3, "run-1")]


def test_a_rule_is_disabled_until_its_state_says_that_it_failed() -> None:
    made = backlog(2)
    made.restart([DisabledRule(rule="mine", run_id="run-1", why="slow")], 0.0)
    sent(made)
    made.answered(saved(1))
    assert list(made.disabled) == [("mine", "run-1")]

    made.restart([], 0.0)
    sent(made)
    made.answered(saved(2, failed=["mine"]))
    assert made.disabled == {}


def test_states_are_asked_for_once() -> None:
    made = Backlog(Limits())
    made.save()
    made.save()

    message = made.next_message()
    assert message is not None
    assert isinstance(message, Save)
    assert made.next_message() is None


def test_a_child_that_is_late_is_behind_only_if_its_rules_took_the_time() -> None:
    made = backlog(limits=Limits(batch_records=1))
    sent(made)

    assert made.behind(1000.0) is None
    used = Used(run_id="run-1", rule="mine", seconds=8.0)
    made.answered(Answer(done=0, used=(used,)))
    late = made.behind(1000.0)
    assert late is not None
    assert late.culprit == ("run-1", "mine")
    made.ready(995.0)
    assert made.behind(1000.0) is None


def test_there_is_room_for_so_much_and_no_more() -> None:
    limits = Limits(behind_bytes=100_000)
    made = Backlog(limits)
    for offset in range(12):
        made.feed(record(offset, b"x" * 10_000, key=b"run-1" if offset else b"run-2"), 0.0)

    no_room = made.behind(0.0)
    assert no_room is not None
    assert no_room.culprit == ("run-1", None)
    disabled = ExitCauses(limits, ["a", "b"]).rules_to_disable(no_room)
    assert [(v.rule, v.run_id, v.no_room) for v in disabled] == [
        ("a", "run-1", True),
        ("b", "run-1", True),
    ]
    made.restart(disabled, 0.0)
    made.feed(record(12, b"x" * 10_000), 0.0)
    assert made.behind(0.0) is None
    message = made.next_message()
    assert isinstance(message, Records)
    kept = [one.offset for one in message.records if one.value is not None]
    assert kept == [0]


@pytest.mark.parametrize("kind", ["wall", "cpu", "exit"])
def test_the_call_under_way_is_to_blame(kind: str) -> None:
    (each,) = ExitCauses(Limits(), ["mine"]).rules_to_disable(ProcessExit(kind, MARK, returncode=1))

    assert (each.rule, each.run_id, each.offset) == ("mine", "run-1", 40)


def test_a_kill_from_outside_is_blamed_on_nobody_the_first_time() -> None:
    causes = ExitCauses(Limits(), ["mine"])
    ended = ProcessExit("exit", MARK, returncode=-signal.SIGKILL)

    assert causes.rules_to_disable(ended) == ()
    assert [each.rule for each in causes.rules_to_disable(ended)] == ["mine"]


def test_unexplained_ends_of_the_process_end_the_loading() -> None:
    causes = ExitCauses(Limits(starts=2), ["mine"])
    for _ in range(2):
        assert causes.why_none_runs() == ""
        assert causes.rules_to_disable(ProcessExit("exit", None, returncode=1)) == ()

    assert "has ended 2 times, unexplained" in causes.why_none_runs()


def test_a_rule_that_ends_run_after_run_is_off_in_all() -> None:
    causes = ExitCauses(Limits(runs=2), ["mine"])
    assert [v.run_id for v in causes.rules_to_disable(ProcessExit("cpu", MARK))] == ["run-1"]

    assert [v.run_id for v in causes.rules_to_disable(ProcessExit("cpu", MARK))] == ["run-1", None]


@given(
    st.lists(
        st.tuples(st.binary(max_size=20), st.none() | st.binary(max_size=50), st.binary(max_size=9))
    ),
    st.integers(1, 64),
)
def test_records_come_as_they_were_sent(
    rows: list[tuple[bytes, bytes | None, bytes]], chunk: int
) -> None:
    records = [
        Record(PLACE, i, i, key, value, (("h", header),))
        for i, (key, value, header) in enumerate(rows)
    ]
    data = pack(Records(records=tuple(records))) * 2
    unpacker = Unpacker()
    messages = [m for i in range(0, len(data), chunk) for m in unpacker.feed(data[i : i + chunk])]

    assert messages == [Records(records=tuple(records))] * 2


def test_nonsense_is_refused() -> None:
    for data, why in (
        (b"\x05\x00\x00\x00\xff", "no message of the custom rules"),
        (b"\x02\x00\x00\x00\x00{]", "Invalid JSON"),
    ):
        with pytest.raises(ValueError, match=why):
            list(Unpacker().feed(data))


def test_the_marker_shows_the_call_under_way() -> None:
    page = new_page()
    writer, reader = Marker(page), Marker(page)
    os.close(page)

    assert reader.read() is None
    writer.start(b"mine", "läuft".encode(), 3, 40)
    mark = reader.read()
    assert mark is not None
    assert (mark.rule, mark.run_id, mark.partition, mark.offset) == ("mine", "läuft", 3, 40)
    writer.end()
    assert reader.read() is None
    writer.start(b"m" * 9000, b"", 0, -1)
    assert reader.read() is not None
    writer.close()
    reader.close()
