"""A person's stop: which training is meant, and what the answers say. Without a bus, and on one."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.records.issues import NOW_MS, incarnation, record, view
from support.waiting import until
from tocsin.bus.port import Bus, BusUnavailable, Outgoing, Partition
from tocsin.bus.urls import open_bus
from tocsin.console.context import CommandContext, read_context
from tocsin.console.stop import send
from tocsin.console.stop.progress import Answers, check_running, stop_under_way
from tocsin.console.stop.send import StopOutcome, read_options, stop_run
from tocsin.console.views.bus_view import read_all, read_commands
from tocsin.emitter.stop.verification import Facts, Memory, SignedCommand, decide, read_keys
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.key_folder import keys_folder
from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.schemas.records.events import Event
from tocsin.schemas.records.run_view import RankView, RunView, StopView
from tocsin.schemas.records.runs import (
    Heartbeat,
    RunData,
    RunEnded,
    RunStarted,
)
from tocsin.schemas.records.runs_fold import CommandSeen, RunSeen
from tocsin.schemas.records.stops.commands import (
    StopAcknowledged,
    StopAnswer,
    StopEscalated,
    StopExited,
    StopExpired,
    StopLeft,
    StopRefused,
    StopRequested,
)
from tocsin.schemas.records.wire import event_data, read_signature
from tocsin.schemas.topics import Topics, issue_partition, telemetry_partition

RUN = "run-1"
NOW = incarnation()
NEXT = incarnation(training=1)
COMMAND = StopRequested(
    command_id="c", run_id=RUN, incarnation=NOW, reason="why", requested_by="ana@node-1",
    requested_ms=NOW_MS, not_after_ms=NOW_MS + 600_000, nonce="n",
)  # fmt: skip


def said(kind: type[RunData], made: str = NOW, **fields: object) -> RunData:
    return kind.model_validate({"run_id": RUN, "incarnation": made, "command_id": "c", **fields})


def answers() -> Answers:
    made = Answers(Heard(), "c", key="/keys/actions.pub")
    made.requested(CommandSeen(COMMAND, NOW_MS))
    return made


# Which training is meant


class Heard(RunSeen):
    """A run with a view, of which telemetry beyond the view is heard event by event."""

    def __init__(self, stop: StopView | None = None) -> None:
        super().__init__(RUN)
        self.add_view(
            view(stop=stop).model_copy(update={"ranks": (RankView(rank=0, last_heard_ms=1),)})
        )
        self._offset = 1

    def after(self, kind: type[RunData], made: str = NOW, **fields: object) -> Heard:
        self._offset += 1
        self.add_event(said(kind, made, **fields), offset=self._offset, append_ms=self._offset)
        return self


def test_telemetry_beyond_the_view_says_which_training_runs_now() -> None:
    assert Heard().after(RunStarted, NEXT, job_id="j").incarnation == NEXT
    assert Heard().after(RunStarted, NEXT, job_id="j").after(Heartbeat).incarnation == NEXT
    other = Heard().after(StopAcknowledged, NEXT)
    assert (other.incarnation, other.stop) == (NOW, None)
    assert Heard().after(Heartbeat, NEXT).incarnation == NEXT
    # A launcher that lives on may still speak of the training before.
    assert Heard().after(Heartbeat, NEXT, role="launcher").incarnation == NOW
    check_running(Heard().after(RunEnded, outcome="completed"))
    ended = Heard().after(RunEnded, role="launcher", outcome="failed", exit_code=3)
    with pytest.raises(ConfigurationError, match=r"has ended \(failed with exit code 3\)"):
        check_running(ended)
    check_running(ended.after(RunStarted, NEXT, job_id="j"))


def test_the_launchers_of_several_nodes_begin_one_training_together() -> None:
    run = Heard()
    for made in ("launcher-0", "launcher-1"):
        run.after(RunStarted, made, job_id="j", role="launcher")
    assert run.after(RunStarted, "launcher-0", job_id="j").incarnation == "launcher-0"
    # Once a rank has spoken, an earlier training is over.
    run.after(RunStarted, NEXT, job_id="j", role="launcher")
    assert run.after(Heartbeat, "launcher-0").incarnation == NEXT


def test_a_stop_under_way_is_seen_in_the_view_or_beyond_it() -> None:
    assert stop_under_way(Heard()) is None
    known = StopView(state="acknowledged", command_id="other")
    assert stop_under_way(Heard(known)) == known
    beyond = stop_under_way(Heard().after(StopAcknowledged))
    assert beyond is not None
    assert beyond.command_id == "c"
    assert stop_under_way(Heard().after(StopRefused, why="expired")) is None


# What the answers say


def test_each_state_is_said_with_the_time_since_the_one_before() -> None:
    heard = answers()
    told = [
        heard.apply(said(StopAcknowledged, role="launcher"), NOW_MS + 4),
        heard.apply(said(StopAcknowledged, step=7), NOW_MS + 5),
        heard.apply(said(StopLeft, step=1203, edge="optimizer_step"), NOW_MS + 9),
        heard.apply(said(StopAcknowledged, command_id="other"), NOW_MS + 9),
        heard.apply(said(Heartbeat), NOW_MS + 9),
    ]
    assert told == [
        "acknowledged by its launcher  (4 ms later)",
        None,
        "rank 0 left its loop at step 1,203  (5 ms later)",
        None,
        None,
    ]
    assert heard.ending is None
    line = heard.apply(said(StopExited, how="edge", exit_code=79), NOW_MS + 109)
    assert line == "the job exited cleanly with 79  (100 ms later)"
    assert heard.ending == "stopped"
    facts = json.loads(heard.as_json(sent=True, message=line or ""))
    assert (facts["version"], facts["sent"], facts["confirmed"]) == (1, True, True)
    assert list(facts["stop"]["states"]) == ["requested", "acknowledged", "left", "exited"]


def test_without_a_launcher_it_is_over_when_all_ranks_have_left() -> None:
    heard = answers()
    for rank in (0, 1):
        heard.apply(said(StopAcknowledged, rank=rank, world_size=2), NOW_MS)
    heard.apply(said(StopLeft, rank=1, world_size=2, edge="backward"), NOW_MS)
    assert heard.ending is None
    heard.apply(said(StopLeft, rank=0, world_size=2, edge="backward"), NOW_MS)
    assert heard.ending is None
    assert heard.perhaps_over
    heard.conclude()
    assert heard.ending == "stopped"


def test_a_launcher_that_answers_after_all_ranks_have_left_says_how_the_job_ended() -> None:
    heard = answers()
    heard.apply(said(StopAcknowledged), NOW_MS)
    heard.apply(said(StopLeft, edge="backward"), NOW_MS)
    assert heard.perhaps_over
    heard.apply(said(StopAcknowledged, role="launcher"), NOW_MS)
    assert not heard.perhaps_over
    heard.apply(said(StopExited, role="launcher", how="edge", exit_code=79), NOW_MS)
    assert heard.ending == "stopped"


def test_a_second_command_is_over_when_the_ranks_have_left_by_the_first() -> None:
    heard = answers()
    told = [
        heard.apply(said(StopAcknowledged, command_id="first", world_size=2), NOW_MS),
        heard.apply(said(StopLeft, command_id="first", edge="backward", world_size=2), NOW_MS),
        heard.apply(said(StopAcknowledged, world_size=2), NOW_MS),
        heard.apply(said(StopLeft, NEXT, command_id="x", edge="backward", rank=1), NOW_MS),
        heard.apply(said(StopRefused, command_id="x", why="stops_off"), NOW_MS),
    ]
    assert [line and line.split("  (")[0] for line in told] == [
        None, "rank 0 left its loop", "acknowledged by rank 0", None, None,
    ]  # fmt: skip
    assert heard.ending is None
    heard.apply(said(StopLeft, command_id="first", edge="backward", rank=1, world_size=2), NOW_MS)
    assert heard.perhaps_over
    assert json.loads(heard.as_json(sent=True, message=""))["stop"]["command_id"] == "c"


def test_with_a_launcher_that_has_not_answered_yet_the_end_of_the_job_is_awaited() -> None:
    heard = answers()
    heard.apply(said(Heartbeat, role="launcher"), NOW_MS)
    heard.apply(said(StopAcknowledged), NOW_MS)
    heard.apply(said(StopLeft, edge="backward"), NOW_MS)
    assert heard.ending is None
    heard.apply(said(StopExited, NEXT, role="launcher", how="edge", exit_code=79), NOW_MS)
    assert heard.ending == "stopped"


@pytest.mark.parametrize(
    ("answer", "words", "ending"),
    [
        (said(StopEscalated, how="SIGTERM", reason="late"), "SIGTERM to the job: late", None),
        (said(StopExited, how="SIGKILL", exit_code=137), "by SIGKILL, exit code 137", "stopped"),
        (said(StopExited, how="itself", exit_code=0), "had already exited with 0", "stopped"),
        (said(StopExpired, not_after_ms=1), "expired: no reply in time", "expired"),
        (said(StopRefused, why="untrusted_key"), "copy /keys/actions.pub into", "refused"),
        (said(StopRefused, why="stops_off", reason="--no-stop"), "where it runs", "refused"),
        (said(StopRefused, why="other_incarnation"), "try again", "refused"),
        (said(StopRefused, why="malformed"), "refused (malformed)", "refused"),
    ],
)
def test_other_answers_say_what_they_mean(answer: RunData, words: str, ending: str | None) -> None:
    heard = answers()
    line = heard.apply(answer, NOW_MS)
    assert line is not None
    assert words in line
    assert heard.ending == ending


def test_a_refusal_by_one_rank_does_not_end_an_acknowledged_stop() -> None:
    heard = answers()
    heard.apply(said(StopAcknowledged, role="launcher"), NOW_MS)
    line = heard.apply(said(StopRefused, rank=3, why="untrusted_key", reason="key k"), NOW_MS)
    assert line is not None
    assert line.startswith("rank 3 refused (untrusted_key): key k")
    assert heard.ending is None
    assert heard.unconfirmed(5) == (
        "not confirmed within 5 s, but acknowledged; see `tocsin status`"
    )


def test_silence_says_until_when_the_command_holds() -> None:
    line = answers().unconfirmed(30)
    assert line.startswith("no reply within 30 s")
    assert "UTC, in case the run reconnects" in line


def test_options_that_cannot_be_meant_are_sentences() -> None:
    assert read_options("r", " why ", grace="2m", wait_s=None).grace_s == 120
    for reason, grace, words in (
        (" ", "30s", "--reason"), ("why", "soon", "--grace soon"), ("why", "2d", "at most 1d"),
    ):  # fmt: skip
        with pytest.raises(ConfigurationError, match=words):
            read_options("r", reason, grace=grace, wait_s=None)


# On a bus


class Room:
    """A bus with one run on it, whose listener answers, and a person who stops it."""

    def __init__(self, context: CommandContext, folder: Path) -> None:
        self.lines: list[str] = []
        self.judged: list[str] = []
        self._context = context
        self._environ = {"XDG_CONFIG_HOME": str(folder / "config")}

    @property
    def has_a_key(self) -> bool:
        return keys_folder(self._environ).exists()

    async def stop(
        self,
        before: Sequence[RunData],
        answers: Sequence[StopAnswer] = (),
        *,
        run: str = RUN,
        wait_s: float = 5.0,
        by: str = "",
    ) -> StopOutcome:
        """Stop a run that has said `before`, and gives `answers` once the person was told.

        An answer to the command `c` is one to the command that was sent last. `by` is a person
        who has other keys.
        """
        environ = {"XDG_CONFIG_HOME": self._environ["XDG_CONFIG_HOME"] + by}
        self.lines.clear()
        async with open_bus(self._context.settings.bus.url) as bus:
            await bus.init(Topics().specs())
            await tell(bus, before)
            listening = asyncio.create_task(self._listen(bus, answers))
            try:
                options = read_options(run, "wrong data", grace="1s", wait_s=wait_s)
                return await stop_run(self._context, options, environ, self.lines.append)
            finally:
                self.judged = await self._judge(bus)
                listening.cancel()

    async def _listen(self, bus: Bus, answers: Sequence[StopAnswer]) -> None:
        await until(lambda: self.lines)
        for command in (await self._commands(bus))[-1:]:
            sent = {"command_id": command.command_id}
            answers = [a if a.command_id != "c" else a.model_copy(update=sent) for a in answers]
        await tell(bus, answers)

    async def _commands(self, bus: Bus) -> list[StopRequested]:
        return [seen.command for seen in (await read_commands(bus, Topics(), RUN)).values()]

    async def asked(self) -> list[CommandSeen]:
        """The commands as they stand on the bus."""
        async with open_bus(self._context.settings.bus.url) as bus:
            return [*(await read_commands(bus, Topics(), RUN)).values()]

    async def _judge(self, bus: Bus) -> list[str]:
        """What a listener that trusts the person's own keys says of what was sent."""
        keys = read_keys([keys_folder(self._environ)])
        found: list[str] = []
        async for sent in read_all(bus, [Partition(Topics().control, issue_partition(RUN))]):
            command = event_data(sent)
            assert isinstance(command, StopRequested)
            assert sent.value is not None
            signed = SignedCommand(sent.key, sent.value, read_signature(sent.headers))
            facts = Facts(RUN, command.incarnation, keys)
            found.append(decide(signed, facts, Memory(), command.requested_ms).reason)
        return found


async def tell(bus: Bus, said: Sequence[RunData]) -> None:
    producer = await bus.producer()
    for data in said:
        event = Event.wrap(data, id="x", source="/test", time_ms=NOW_MS)
        topic = Topics().runs if isinstance(data, RunView) else Topics().telemetry
        number = telemetry_partition(data.run_id)
        await producer.publish([record(event, topic, number, data.run_id)])
    await producer.close()


@pytest.fixture
def room(tmp_path: Path) -> Room:
    return Room(read_context(None, f"embedded:{tmp_path}/bus.db", environ={}), tmp_path)


ACKNOWLEDGED = StopAcknowledged(run_id=RUN, incarnation=NOW, role="launcher", command_id="c")
EXITED = StopExited(
    run_id=RUN, incarnation=NOW, role="launcher", command_id="c", how="edge", exit_code=79
)
HEARTBEAT = Heartbeat(run_id=RUN, incarnation=NOW, role="launcher")


async def test_a_run_without_a_view_is_found_and_its_answers_are_followed(room: Room) -> None:
    outcome = await room.stop([HEARTBEAT], [ACKNOWLEDGED, EXITED])
    assert room.has_a_key
    assert outcome.exit_code == 0
    assert room.judged == ["obey"]
    assert [line.split("  (")[0].strip() for line in room.lines[1:]] == [
        "acknowledged by its launcher",
        "the job exited cleanly with 79",
    ]
    stop = json.loads(outcome.document)["stop"]
    assert (stop["reason"], stop["state"]) == ("wrong data", "exited")
    assert "@" in stop["requested_by"]


async def test_a_stop_under_way_is_followed_and_nothing_is_sent(room: Room) -> None:
    other = StopView(state="acknowledged", command_id="other")
    exited = EXITED.model_copy(update={"command_id": "other"})
    outcome = await room.stop([view(stop=other, next_offset=0)], [exited])
    assert outcome.exit_code == 0
    assert "is already in progress (acknowledged); no other was sent" in room.lines[0]
    assert room.judged == []
    assert json.loads(outcome.document)["sent"] is False


async def test_a_refusal_is_said_with_what_to_try(room: Room) -> None:
    refused = StopRefused(run_id=RUN, incarnation=NOW, command_id="c", why="untrusted_key")
    outcome = await room.stop([view(next_offset=0)], [refused], run="run")
    assert outcome.exit_code == 1
    assert "config/tocsin/keys/actions.pub into a folder of keys" in room.lines[-1]


async def test_nobody_answers(room: Room) -> None:
    assert (await room.stop([view(next_offset=0)], wait_s=0.1)).exit_code == 1
    assert "no reply within 0.1 s" in room.lines[-1]
    assert room.judged == ["obey"]


async def test_a_command_that_nobody_has_answered_yet_is_followed(room: Room) -> None:
    await room.stop([view(next_offset=0)], wait_s=0)
    outcome = await room.stop([], [ACKNOWLEDGED, EXITED])
    assert outcome.exit_code == 0
    assert "already in progress (requested, requested by " in room.lines[0]
    assert "wrong data); no other was sent" in room.lines[0]
    assert json.loads(outcome.document)["sent"] is False
    assert room.judged == ["obey"]


async def test_a_refused_command_or_a_strangers_keeps_nobody_from_sending(room: Room) -> None:
    await room.stop([view(next_offset=0)], by="-stranger", wait_s=0)
    assert room.judged == ["untrusted_key"]
    refused = StopRefused(run_id=RUN, incarnation=NOW, command_id="c", why="stops_off")
    assert (await room.stop([], [refused])).exit_code == 1
    outcome = await room.stop([], wait_s=0)
    assert json.loads(outcome.document)["sent"] is True
    assert room.judged == ["untrusted_key", "obey", "obey"]


async def test_a_stop_whose_ranks_have_left_without_a_launcher_is_over(room: Room) -> None:
    """Where the view covers the answers already; nobody sees such a process end."""
    acknowledged = said(StopAcknowledged, command_id="other")
    left = said(StopLeft, command_id="other", step=7, edge="backward")
    now_ms = time.time_ns() // 1_000_000
    known = StopView(state="left", command_id="other", states={"acknowledged": now_ms})
    outcome = await room.stop([acknowledged, left, view(stop=known, next_offset=2)])
    assert outcome.exit_code == 0
    assert [line.split("  (")[0].strip() for line in room.lines[1:]] == [
        "acknowledged by rank 0",
        "rank 0 left its loop at step 7",
    ]
    assert room.judged == []


async def test_a_bus_that_goes_away_after_the_command_is_no_stop_that_was_not_sent(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object) -> None:
        raise BusUnavailable("no broker answers")

    monkeypatch.setattr(send, "read_commands", away)
    outcome = await room.stop([view(next_offset=0)])
    assert outcome.exit_code == 1
    assert room.lines[0].startswith("asked run run-1 to stop")
    assert "the stop was requested, but the bus is unreachable: no broker" in room.lines[1]
    assert json.loads(outcome.document)["sent"] is True
    assert room.judged == ["obey"]


async def test_a_bus_that_goes_away_under_the_command_may_have_it(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Away:
        async def publish(self, records: Sequence[Outgoing]) -> Sequence[int]:
            raise BusUnavailable("no broker answers")

        async def close(self) -> None:
            pass

    def open_away(context: CommandContext, *, create: bool) -> Bus:
        async def producer() -> Away:
            return Away()

        bus = open_bus(context.settings.bus.url)
        monkeypatch.setattr(bus, "producer", producer, raising=False)
        return bus

    monkeypatch.setattr(CommandContext, "open_bus", open_away)
    outcome = await room.stop([view(next_offset=0)])
    assert outcome.exit_code == 1
    assert "did not confirm the command: no broker answers; it may have" in room.lines[0]
    assert json.loads(outcome.document)["sent"] is False


async def test_times_are_told_by_the_clock_of_the_bus(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send, "unix_ms", lambda: unix_ms() + 3_600_000)
    outcome = await room.stop([view(next_offset=0)], [ACKNOWLEDGED, EXITED])
    states = json.loads(outcome.document)["stop"]["states"]
    assert [*states] == ["requested", "acknowledged", "exited"]
    assert states["requested"] == (await room.asked())[0].append_ms


async def test_there_is_nothing_to_stop(room: Room) -> None:
    ended = RunEnded(run_id=RUN, incarnation=NOW, role="launcher", outcome="completed", exit_code=0)
    with pytest.raises(ConfigurationError, match="there is nothing to stop"):
        await room.stop([view(next_offset=0), ended])
    with pytest.raises(ConfigurationError, match="running now: run-1"):
        await room.stop([], run="other")
    assert room.judged == []
    assert not room.has_a_key
