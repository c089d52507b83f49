"""The engine: records of many runs in, issues out. Pure: no I/O, no clock, no chance.

Time is append time: each partition's clock is the highest that was seen there. `apply` first fires
every timer that is due by the record's append time, live as in replay; `tick` is the same for a
live worker that can prove that it has read everything up to a time.

A run that is postponed has a clock and an offset of its own: `apply` passes its records over, and
`catch_up` applies them when they are read again, until it has reached the others.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tocsin.bus.port import Record
from tocsin.schemas.errors import MalformedRecord, RecordError
from tocsin.schemas.records.events import Event
from tocsin.schemas.records.frames import StepFrame, SystemFrame, TensorFrame
from tocsin.schemas.records.snapshots import Snapshot
from tocsin.schemas.records.wire import decode, read_meta
from tocsin.stream_rules.engine.episodes import Reported
from tocsin.stream_rules.engine.instance import Instance
from tocsin.stream_rules.engine.rule_spec import RuleSpec
from tocsin.stream_rules.engine.rule_times import RuleTimes
from tocsin.stream_rules.engine.run import RunEngine
from tocsin.stream_rules.engine.run_state import Value
from tocsin.stream_rules.outcomes import Moment
from tocsin.stream_rules.reading.other_runs import References

logger = logging.getLogger(__name__)

AWAY_MS: Final = 120_000
"""How long after the bus was away rules that conclude from silence wait for those who were cut off
from it, too; each for its own `grace_ms`, at most so long."""

_GAP_MS: Final = 30_000
"""A pause between two records of a partition, after an outage of the bus, that was the outage."""


@dataclass(slots=True)
class PartitionState:
    """One partition: its clock, the offset after the last record, its runs, their timers.

    `timers` may hold entries that are no longer true; `due` holds those that are. `back_ms`: the
    time of the first record after the bus was away from us. `was_away`: the records so far may all
    have been appended before it was.
    """

    clock_ms: int = 0
    next_offset: int = 0
    back_ms: int | None = None
    was_away: bool = False
    runs: dict[str, RunEngine] = field(default_factory=dict)
    due: dict[str, int] = field(default_factory=dict)
    timers: list[tuple[int, str]] = field(default_factory=list)


class PartitionEngine:
    """All runs of the partitions that it was given."""

    def __init__(self, specs: Sequence[RuleSpec], times: RuleTimes | None = None) -> None:
        self._specs = tuple(specs)
        self._times: Final = times
        named = (run for spec in self._specs for run in spec.build().other_runs())
        self.references = References(named)
        """What is known of the runs that rules compare others with."""
        self._partitions: dict[int, PartitionState] = {}
        # By partition and run id: runs that are read later, each as if it had a partition alone.
        self._postponed: dict[tuple[int, str], PartitionState] = {}
        self.postponements = 0
        """How often a run was postponed, or one was adopted that was."""

    def use(self, specs: Sequence[RuleSpec]) -> None:
        """Runs that come from now on, and the next incarnations of those here, get these rules."""
        self._specs = tuple(specs)
        for _, _, run in self.runs():
            run.use_next(self._specs)

    def apply(self, record: Record, *, was_away: bool = False) -> list[Reported]:
        """Take in one telemetry record; records of one partition in the order of their offsets.
        That of a run that is postponed is passed over.

        `was_away`: it is one of the first after the bus was away from a live worker, and so perhaps
        from those who write to it: silence before it proves nothing yet.

        Raises:
            UnusableRecord: it cannot be used; the engine has gone on and may be given the next one.
        """
        state = self._partition(record.partition.number)
        state.next_offset = max(state.next_offset, record.offset + 1)
        self.references.read(record)
        gap = 0 < state.clock_ms < record.append_ms - _GAP_MS
        if was_away and (state.back_ms is None or record.append_ms > state.back_ms + AWAY_MS):
            state.back_ms, state.was_away = record.append_ms, not gap
        elif state.was_away and gap:
            # Those before were appended before the outage, and had only not been read.
            state.back_ms, state.was_away = record.append_ms, False
        reported = self._advance(state, record.append_ms, _since(state, record.append_ms))
        if self._postponed and _key(record) in self._postponed:
            return reported
        return self._apply_or_report(state, record, reported)

    def _apply_or_report(
        self, state: PartitionState, record: Record, reported: list[Reported]
    ) -> list[Reported]:
        """As `_apply`; with an error go the issues that timers have found before."""
        try:
            self._apply(state, record, reported)
        except RecordError as error:
            raise UnusableRecord(error, reported) from error
        except Exception as error:
            # One record must not end the rules of all runs, each time that it is read again.
            logger.exception("record not understood", extra={"action": "rules"})
            bug = MalformedRecord(f"{type(error).__name__} (a bug)")
            raise UnusableRecord(bug, reported) from error
        return reported

    def tick(self, partition: int, as_of_ms: int, *, since_ms: int) -> list[Reported]:
        """Fire what is due, as all records appended before `as_of_ms` were applied.

        `since_ms`: since when that could be reported without a break.
        """
        state = self._partitions.get(partition)
        if state is None:
            return []
        reported = self._advance(state, as_of_ms, since_ms)
        for (number, _), apart in self._level_with_others():
            if number == partition:
                reported += self._advance(apart, as_of_ms, since_ms)
        return reported

    def next_due_ms(self) -> int | None:
        """When the next timer is due; of postponed runs only those as far as the others of their
        partition."""
        states = [*self._partitions.values(), *(apart for _, apart in self._level_with_others())]
        dues = [top for state in states if (top := _top(state)) is not None]
        return min(dues, default=None)

    # -- runs that are postponed -----------------------------------------------------------

    def postpone(self, partition: int, run_id: str, why: str) -> bool:
        """Read this run later than the others, from here on. False: not yet, as it has not begun,
        or its state was saved with more records than were read since, and cannot be saved again
        before they are."""
        state = self._partitions[partition]
        run = state.runs[run_id]
        if not run.state.incarnation or run.covers > state.next_offset:
            return False
        del state.runs[run_id]
        state.due.pop(run_id, None)
        run.postpone(why)
        self._set_apart(partition, run, state.next_offset, state.clock_ms)
        return True

    def _set_apart(self, partition: int, run: RunEngine, next_offset: int, clock_ms: int) -> None:
        run_id = run.state.run_id
        apart = PartitionState(clock_ms=clock_ms, next_offset=next_offset, runs={run_id: run})
        _schedule(apart, run_id)
        self._postponed[partition, run_id] = apart
        self.postponements += 1

    def postponed(self) -> Mapping[tuple[int, str], PartitionState]:
        """The runs that are postponed, by partition and run id, each with its offset and clock."""
        return self._postponed

    def catch_up(self, record: Record) -> list[Reported]:
        """Take in a record that is read again, for those that are postponed; one that `apply` has
        passed over. Raises UnusableRecord."""
        number, key = record.partition.number, _key(record)
        back_ms = self._partition(number).back_ms
        if back_ms is not None and record.append_ms < back_ms:
            # It was appended before the outage: what was silent until then was so.
            back_ms = None
        reported: list[Reported] = []
        mine: PartitionState | None = None
        for (partition, run_id), state in self._postponed.items():
            if partition != number or record.offset < state.next_offset:
                continue
            state.next_offset, state.back_ms = record.offset + 1, back_ms
            # Others' records show that time goes by, as they do for a run that is not postponed.
            reported += self._advance(state, record.append_ms, _since(state, record.append_ms))
            if key == (partition, run_id):
                mine = state
        return reported if mine is None else self._apply_or_report(mine, record, reported)

    def next_offset(self, partition: int) -> int:
        """How far the runs of a partition are that are not postponed."""
        return self._partition(partition).next_offset

    def skip_to(self, partition: int, offset: int) -> None:
        """Postponed runs of a partition go on at `offset`: the log has nothing else before it."""
        main = self._partition(partition)
        for (number, _), state in self._postponed.items():
            if number == partition:
                state.next_offset = max(state.next_offset, min(offset, main.next_offset))

    def rejoin(self, partitions: Collection[int]) -> list[RunEngine]:
        """End the postponement of the runs of these partitions that have caught up with the others;
        returns them."""
        runs = []
        for (number, run_id), apart in self._level_with_others():
            if number not in partitions:
                continue
            run = apart.runs[run_id]
            del self._postponed[number, run_id]
            self._partitions[number].runs[run_id] = run
            run.rejoin()
            _schedule(self._partitions[number], run_id)
            runs.append(run)
        return runs

    def _level_with_others(self) -> list[tuple[tuple[int, str], PartitionState]]:
        """Postponed runs that are as far as the others of their partition."""
        return [
            (key, state)
            for key, state in self._postponed.items()
            if state.next_offset >= self._partition(key[0]).next_offset
        ]

    # -- state comes and goes --------------------------------------------------------------

    def adopt(
        self, partition: int, run_id: str, snapshots: Mapping[str, Snapshot], *, next_offset: int
    ) -> RunEngine:
        """Go on with a run from its snapshots, by rule name.

        `next_offset` is that of the record that will come next. Snapshots of a checkpoint that was
        torn may be ahead of it; their time must not be, for what is still to be read.
        """
        state = self._partition(partition)
        run = RunEngine(run_id, self._specs, self.references, self._times)
        run.restore(snapshots)
        state.next_offset = max(state.next_offset, next_offset)

        def saved_ms(offset: int) -> int:
            times = (s.saved_at_ms for s in snapshots.values() if s.next_offset <= offset)
            return max(times, default=0)

        if run.state.postponed:
            self._set_apart(partition, run, run.covers, saved_ms(run.covers))
            return run
        state.runs[run_id] = run
        state.clock_ms = max(state.clock_ms, saved_ms(next_offset))
        _schedule(state, run_id)
        return run

    def release(self, partitions: Collection[int]) -> None:
        """Drop all state of these partitions."""
        for number in partitions:
            self._partitions.pop(number, None)
        for key in [key for key in self._postponed if key[0] in partitions]:
            del self._postponed[key]

    def drop(self, partition: int, run_id: str) -> None:
        """Drop a run."""
        self._postponed.pop((partition, run_id), None)
        state = self._partitions[partition]
        state.runs.pop(run_id, None)
        state.due.pop(run_id, None)

    def has(self, partition: int, key: bytes) -> bool:
        """Whether the run of that key is here."""
        state, run_id = self._partitions.get(partition), key.decode(errors="replace")
        if (partition, run_id) in self._postponed:
            return True
        return state is not None and run_id in state.runs

    def stale_run(self, run_id: str, record: Record) -> RunEngine | None:
        """The record's run, if its state was made of another log than the record is in."""
        number = record.partition.number
        state = self._postponed.get((number, run_id)) or self._partitions.get(number)
        run = None if state is None else state.runs.get(run_id)
        if run is None or not run.is_of_another_log(record.offset, record.append_ms):
            return None
        return run

    def reschedule(self, partition: int, run_id: str) -> None:
        """A run may have got another timer otherwise than by a record."""
        _schedule(self._postponed.get((partition, run_id), self._partitions[partition]), run_id)

    def runs(self) -> list[tuple[int, PartitionState, RunEngine]]:
        """All runs with their partitions; of one that is postponed, what is in its place."""
        states = [*self._partitions.items(), *((key[0], s) for key, s in self._postponed.items())]
        return [(number, state, run) for number, state in states for run in state.runs.values()]

    def run(self, run_id: str) -> RunEngine | None:
        """The run of that id, if it is here."""
        return next((run for _, _, run in self.runs() if run.state.run_id == run_id), None)

    def call_under_way(self) -> tuple[Instance, Moment] | None:
        """The call into a rule that has not returned, if there is one. Any thread."""
        return next((call for _, _, run in self.runs() if (call := run.call_under_way())), None)

    def abandon(self, call: tuple[Instance, Moment], software: str) -> tuple[int, Snapshot] | None:
        """Quarantine the rule of a call that does not return; its partition, and the state from
        which the next worker goes on without it. None: the call has returned.

        From any thread. The engine must not be used any more.
        """
        instance, at = call
        for number, state, run in self.runs():
            if instance in run.instances and instance.in_call is at:
                saved_at = {"next_offset": state.next_offset, "clock_ms": state.clock_ms}
                return number, run.abandon(instance, **saved_at, software=software)
        return None

    # -- inside ----------------------------------------------------------------------------

    def _partition(self, number: int) -> PartitionState:
        state = self._partitions.get(number)
        if state is None:
            state = self._partitions[number] = PartitionState()
        return state

    def _advance(
        self, state: PartitionState, now_ms: int, since_ms: int | None = None
    ) -> list[Reported]:
        state.clock_ms = max(state.clock_ms, now_ms)
        reported: list[Reported] = []
        while (due := _top(state)) is not None and due <= state.clock_ms:
            _, run_id = heapq.heappop(state.timers)
            del state.due[run_id]
            reported += state.runs[run_id].fire(state.clock_ms, since_ms=since_ms)
            _schedule(state, run_id)
        return reported

    def _apply(self, state: PartitionState, record: Record, reported: list[Reported]) -> None:
        if record.value is None:
            return
        meta = read_meta(record.headers)
        try:
            run_id = record.key.decode()
        except UnicodeDecodeError as error:
            raise MalformedRecord("the key is not UTF-8") from error
        value = _telemetry(decode(meta, record.value))
        if self._times is not None:
            self._times.read(*_rows(value))
        run = state.runs.get(run_id)
        if run is None:
            run = RunEngine(run_id, self._specs, self.references, self._times)
            # Only a record that can be used makes a run known.
            run.state.standing(value, meta)
            state.runs[run_id] = run
        elif run.held_back:
            reported += run.fire(state.clock_ms, since_ms=_since(state, state.clock_ms))
        reported += run.apply(value, meta, offset=record.offset, now_ms=state.clock_ms)
        _schedule(state, run_id)


class UnusableRecord(RecordError):
    """A record that cannot be used, and why. `reported` are the issues that timers found before:
    they must not be lost with it."""

    def __init__(self, error: RecordError, reported: list[Reported]) -> None:
        super().__init__(str(error))
        self.error = error
        self.reported = reported


def _key(record: Record) -> tuple[int, str]:
    return record.partition.number, record.key.decode(errors="replace")


def _telemetry(value: object) -> Value:
    if isinstance(value, TensorFrame | StepFrame | SystemFrame | Event):
        return value
    raise MalformedRecord(f"a {type(value).__name__} is not telemetry")


def _rows(value: Value) -> tuple[str, int]:
    """What a record is made of, and how many there are of it."""
    if isinstance(value, TensorFrame):
        return "tensors", len(value.rows)
    if isinstance(value, StepFrame):
        return "steps", len(value.steps)
    if isinstance(value, SystemFrame):
        return "samples", len(value.at_us)
    return "events", 1


def _since(state: PartitionState, now_ms: int) -> int | None:
    """Since when a record proves what did not come before it; None: always."""
    if state.back_ms is None or now_ms >= state.back_ms + AWAY_MS:
        return None
    return state.back_ms


def _schedule(state: PartitionState, run_id: str) -> None:
    due = state.runs[run_id].next_due_ms()
    if due is None:
        state.due.pop(run_id, None)
    elif state.due.get(run_id) != due:
        state.due[run_id] = due
        heapq.heappush(state.timers, (due, run_id))


def _top(state: PartitionState) -> int | None:
    """The next true timer; drops those before it that are not."""
    while state.timers:
        due, run_id = state.timers[0]
        if state.due.get(run_id) == due:
            return due
        heapq.heappop(state.timers)
    return None
