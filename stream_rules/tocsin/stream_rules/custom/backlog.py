"""What the child was given, has answered, and has saved: all that another one needs to go on.

Pure: no I/O, no clock. Seconds are those that the host has watched the child for.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tocsin.bus.port import Record
from tocsin.schemas.records.snapshots import Snapshot
from tocsin.stream_rules.custom.call_limits import Limits
from tocsin.stream_rules.custom.exit_cause import ProcessExit
from tocsin.stream_rules.custom.protocol import (
    Adopt,
    Advance,
    Answer,
    DisabledRule,
    Drop,
    Forget,
    Message,
    Records,
    Save,
    Saved,
    SavedRun,
)
from tocsin.stream_rules.engine.episodes import Reported

_WINDOW: Final = 2
"""Messages that are under way at once: the child has the next at hand, and hardly more is lost."""

_SMALL: Final = 8192
"""Bytes up to which a record may stay where there is no room: steps and events are smaller."""

_REMEMBERED: Final = 20_000
_OVERHEAD: Final = 200


@dataclass(frozen=True, slots=True)
class Queued:
    """A record for the child, and when it came."""

    record: Record
    size: int
    since_s: float


@dataclass(frozen=True, slots=True)
class RunSaved:
    """The last that was saved of a run; `by_child`: by a child of ours."""

    next_offset: int
    snapshots: Sequence[Snapshot]
    begin_now: bool = False
    by_child: SavedRun | None = None


@dataclass(slots=True)
class _UnderWay:
    since_s: float
    size: int
    message: Message | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """What there is to be published: the issues before the states that have them behind them.

    `changed`: the runs, with their partitions, that a reader has to hear of.
    """

    reported: Sequence[Reported]
    snapshots: Sequence[tuple[int, Snapshot]]
    covers: Mapping[int, int]
    changed: Sequence[tuple[int, str]]
    urgent: bool


class Backlog:
    """Orders for the child in their order, and what came of them."""

    def __init__(self, limits: Limits) -> None:
        self.runs: dict[tuple[int, str], RunSaved] = {}
        self.disabled: dict[tuple[str, str | None], DisabledRule] = {}
        self.due_ms: int | None = None
        self._limits = limits
        self._queue: deque[Queued | Message] = deque()
        self._under_way: deque[_UnderWay] = deque()
        self._given: deque[Queued] = deque()
        self._waiting_bytes = self._given_bytes = 0
        self._spent: dict[tuple[str, str], float] = {}
        self._remembered: dict[str, None] = {}
        self._advancing = 0
        self._saving = False
        self._ready_s = 0.0
        self._without_large: set[bytes] = set()
        # Partitions that the child was not heard to have dropped: what it sends of them is old.
        self._forgotten: Counter[int] = Counter()
        self._clear_findings()

    def _clear_findings(self) -> None:
        self._reported: list[Reported] = []
        self._snapshots: list[tuple[int, Snapshot]] = []
        self._covers: dict[int, int] = {}
        self._changed: dict[tuple[int, str], None] = {}
        self._urgent = False

    # -- orders ----------------------------------------------------------------------------

    def feed(self, record: Record, now_s: float) -> None:
        """A record, after those before it."""
        size = len(record.value or b"") + len(record.key) + _OVERHEAD
        queued = Queued(record, size, now_s)
        if record.key in self._without_large and size > _SMALL:
            queued = _without_value(queued)
        self._queue.append(queued)
        self._waiting_bytes += queued.size

    def advance(self, partition: int, as_of_ms: int, since_ms: int) -> None:
        """Time passes. The timers that are due were asked for."""
        if self.due_ms is None or self.due_ms > as_of_ms:
            return
        self.due_ms = None
        self._advancing += 1
        order = Advance(partition=partition, as_of_ms=as_of_ms, since_ms=since_ms)
        self._queue.append(order)

    def adopt(
        self,
        partition: int,
        run_id: str,
        snapshots: Collection[Snapshot],
        *,
        next_offset: int,
        begin_now: bool,
    ) -> None:
        """Go on with a run that another worker had."""
        saved = RunSaved(next_offset, list(snapshots), begin_now)
        self.runs[partition, run_id] = saved
        self._queue.append(_adopt(partition, run_id, saved))

    def release(self, partitions: Collection[int]) -> None:
        """Drop all of these partitions, what is queued of them too."""
        gone = frozenset(partitions)
        self.runs = {key: run for key, run in self.runs.items() if key[0] not in gone}
        # What is read again is found again, and must be reported again.
        self._remembered.clear()
        self._reported.clear()
        self._snapshots = [one for one in self._snapshots if one[0] not in gone]
        self._changed = {key: None for key in self._changed if key[0] not in gone}
        for number in gone:
            self._covers.pop(number, None)
        self._given = deque(f for f in self._given if f.record.partition.number not in gone)
        self._queue = deque(order for order in self._queue if _number(order) not in gone)
        self._count_bytes()
        self._forgotten.update(gone)
        self._queue.append(Forget(partitions=tuple(sorted(gone))))

    def drop(self, partition: int, run_id: str) -> None:
        """Drop a run: it was over long ago."""
        if self.runs.pop((partition, run_id), None) is not None:
            self._queue.append(Drop(partition=partition, run_id=run_id))

    def save(self) -> None:
        """Ask for the states, unless that was done."""
        if not self._saving:
            self._saving = True
            self._queue.append(Save())

    # -- to and from the child -------------------------------------------------------------

    def next_message(self) -> Message | None:
        """What to send now; None: nothing, or enough is under way."""
        if not self._queue or len(self._under_way) >= _WINDOW:
            return None
        first = self._queue[0]
        if isinstance(first, Message):
            self._queue.popleft()
            self._under_way.append(_UnderWay(0.0, 0, first))
            return first
        batch: list[Queued] = []
        size = 0
        while self._queue and isinstance(queued := self._queue[0], Queued):
            full = len(batch) >= self._limits.batch_records or size >= self._limits.batch_bytes
            if full:
                break
            self._queue.popleft()
            batch.append(queued)
            size += queued.size
        self._given.extend(batch)
        self._given_bytes += size
        self._under_way.append(_UnderWay(first.since_s, size))
        return Records(records=tuple(queued.record for queued in batch))

    def answered(self, answer: Answer) -> None:
        """Take an answer in."""
        for _ in range(answer.done):
            sent = self._under_way.popleft()
            self._waiting_bytes -= sent.size
            self._advancing -= isinstance(sent.message, Advance)
            self._saving &= not isinstance(sent.message, Save)
            if isinstance(sent.message, Forget):
                self._forgotten.subtract(sent.message.partitions)
        for used in answer.used:
            key = (used.run_id, used.rule)
            self._spent[key] = self._spent.get(key, 0.0) + used.seconds
        for reported in answer.reported():
            known = f"{reported.issue.issue_id}/{reported.issue.state}/{reported.number}"
            if known not in self._remembered:
                self._remembered[known] = None
                self._reported.append(reported)
        while len(self._remembered) > _REMEMBERED:
            del self._remembered[next(iter(self._remembered))]
        if not self._advancing:
            self.due_ms = answer.due_ms
        if answer.saved is not None:
            self._saved(answer.saved)
        if not self.waiting:
            self._spent.clear()

    def _saved(self, saved: Saved) -> None:
        for run in saved.runs:
            key = (run.partition, run.run_id)
            if self._forgotten[run.partition]:
                continue
            before = self.runs.get(key)
            seen = before and before.by_child and before.by_child.seen_by_readers()
            if seen != run.seen_by_readers():
                self._changed[key] = None
            next_offset = saved.covers[run.partition]
            self.runs[key] = RunSaved(next_offset, run.snapshots, by_child=run)
            self._snapshots += [(run.partition, snapshot) for snapshot in run.snapshots]
            for rule in run.failed:
                # It is in the state from now on.
                self.disabled.pop((rule, run.run_id), None)
        covers = {n: o for n, o in saved.covers.items() if not self._forgotten[n]}
        left = deque(
            queued
            for queued in self._given
            if queued.record.offset >= covers.get(queued.record.partition.number, 0)
        )
        self._given, self._given_bytes = left, sum(queued.size for queued in left)
        self._covers |= covers
        self._urgent |= saved.urgent

    def drain(self) -> Output:
        """What came since the last time."""
        taken = Output(
            self._reported, self._snapshots, self._covers, list(self._changed), self._urgent
        )
        self._clear_findings()
        return taken

    def restart(self, disabled: Collection[DisabledRule], now_s: float) -> None:
        """The child has died, and another will be there: from the last states, over all that came
        since then, and with what is known of the rules."""
        for each in disabled:
            self.disabled[each.rule, each.run_id] = each
            if each.no_room and each.run_id is not None:
                self.drop_large_values(each.run_id)
        records = [
            *self._given,
            *(order for order in self._queue if isinstance(order, Queued)),
        ]
        # The end is not the fault of those who wait.
        records = [replace(queued, since_s=now_s) for queued in records]
        adopted = [_adopt(number, run_id, run) for (number, run_id), run in self.runs.items()]
        self._queue = deque([*adopted, *records])
        self._waiting_bytes = sum(queued.size for queued in records)
        self._under_way.clear()
        self._given.clear()
        self._given_bytes = 0
        self._spent.clear()
        self._forgotten.clear()
        self._advancing = 0
        self._saving = False
        self.due_ms = None

    # -- how it stands ---------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """Whether anything is not answered yet."""
        return bool(self._queue or self._under_way)

    @property
    def under_way(self) -> bool:
        """Whether the child has something to do."""
        return bool(self._under_way)

    @property
    def untaken(self) -> bool:
        """Whether `drain` has something that a reader waits for."""
        return bool(self._reported or self._urgent or self._changed)

    @property
    def unsaved(self) -> bool:
        """Whether the child has taken in what no state covers."""
        return bool(self._given)

    @property
    def full(self) -> bool:
        """Whether the states should be asked for because of what is kept for another child."""
        return self._given_bytes >= self._limits.save_bytes

    def ready(self, now_s: float) -> None:
        """The child has loaded its rules: what waits does so because of them from now on."""
        self._ready_s = now_s

    def behind(self, now_s: float) -> ProcessExit | None:
        """Why the child must end because it is too far behind; None: it is not.

        A child that is late and has not spent its time in the rules is one that the machine has no
        time for: it may be late, as long as there is room for what waits.
        """
        ages = [sent.since_s for sent in self._under_way if sent.size]
        age_s = now_s - max(min(ages, default=now_s), self._ready_s)
        (run_id, rule), spent = max(
            self._spent.items(), key=lambda item: item[1], default=(("", ""), 0.0)
        )
        limits = self._limits
        if age_s > limits.behind_s and 2 * spent > limits.behind_s:
            how = f"{age_s:.0f} s behind, {spent:.1f} s of it in its calls"
            return ProcessExit("behind", culprit=(run_id, rule), detail=how)
        if self._waiting_bytes <= limits.behind_bytes:
            return None
        size = f"{self._waiting_bytes / 1e6:,.0f} MB of telemetry were waiting"
        if 2 * spent > age_s:
            how = f"{size}, and {spent:.1f} s went by in its calls"
            return ProcessExit("behind", culprit=(run_id, rule), detail=how)
        return ProcessExit("behind", culprit=(self._largest(), None), detail=size)

    def _largest(self) -> str:
        """The run of which most waits."""
        waiting: Counter[bytes] = Counter()
        for order in self._queue:
            if isinstance(order, Queued):
                waiting[order.record.key] += order.size
        ((key, _),) = waiting.most_common(1) or [(b"", 0)]
        return key.decode(errors="replace")

    def drop_large_values(self, run_id: str) -> None:
        """Pass over what is large of a run: there is no room for it, and no rule for it any more.

        What is small stays, so that the rules of the run can still report that.
        """
        key = run_id.encode()
        self._without_large.add(key)
        for kept in (self._queue, self._given):
            for i, order in enumerate(kept):
                if isinstance(order, Queued) and order.record.key == key and order.size > _SMALL:
                    kept[i] = _without_value(order)
        self._count_bytes()

    def _count_bytes(self) -> None:
        self._given_bytes = sum(queued.size for queued in self._given)
        self._waiting_bytes = sum(order.size for order in self._queue if isinstance(order, Queued))
        self._waiting_bytes += sum(sent.size for sent in self._under_way)


def _without_value(queued: Queued) -> Queued:
    return Queued(
        replace(queued.record, value=None), len(queued.record.key) + _OVERHEAD, queued.since_s
    )


def _adopt(partition: int, run_id: str, run: RunSaved) -> Adopt:
    return Adopt(
        partition=partition,
        run_id=run_id,
        snapshots=tuple(run.snapshots),
        next_offset=run.next_offset,
        begin_now=run.begin_now,
    )


def _number(order: Queued | Message) -> int | None:
    if isinstance(order, Queued):
        return order.record.partition.number
    return order.partition if isinstance(order, Advance | Adopt | Drop) else None
