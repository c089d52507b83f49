"""Which input partitions are ours, and how far each was applied and committed. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tocsin.bus.port import FencedMember, Partition, Record
from tocsin.runtime.service import CaughtUp

Offsets = dict[str, int | None]
"""Topic → offset of the next record; None where nothing is known yet."""


@dataclass(slots=True)
class Owned:
    """One partition number of the input topics. `since_ms`: first seen without lag."""

    next: Offsets
    committed: Offsets
    since_ms: int | None = None


class Positions:
    """The input partitions of one worker, by number.

    A partition that was given up after a checkpoint is parked: most often it comes back at the
    end of the rebalance, and its state need not be read again.
    """

    def __init__(self, topics: Sequence[str]) -> None:
        self._topics = tuple(topics)
        self._owned: dict[int, Owned] = {}
        self._parked: dict[int, Owned] = {}
        self._gaps: set[tuple[Partition, int]] = set()

    def numbers(self) -> frozenset[int]:
        """The partition numbers that are ours."""
        return frozenset(self._owned)

    def kept(self) -> frozenset[int]:
        """The partition numbers that are ours, or may be again at the end of the rebalance."""
        return frozenset(self._owned) | frozenset(self._parked)

    def partitions(self) -> list[Partition]:
        """All input partitions that are ours."""
        return [Partition(topic, number) for number in self._owned for topic in self._topics]

    def next(self, partition: Partition) -> int:
        """The offset of the next record to be applied; 0 where nothing is known yet."""
        owned = self._owned.get(partition.number)
        return 0 if owned is None else owned.next.get(partition.topic) or 0

    def behind(self, ends: Mapping[Partition, int]) -> dict[Partition, int]:
        """Our partitions that are not applied up to these ends, and by how many offsets.

        One that is another's by now does not count. In the middle of a rebalance, while there are
        none, those do that may come back.
        """
        ours = self._owned or self._parked
        found = {}
        for partition, end in ends.items():
            place = ours.get(partition.number)
            if place is not None and end > (at := place.next.get(partition.topic) or 0):
                found[partition] = end - at
        return found

    def start(self, number: int, committed: Offsets) -> None:
        """This partition is ours and restored."""
        self._drop_gaps(number)
        self._owned[number] = Owned(dict(committed), dict(committed))

    def unpark_if_unchanged(self, number: int, committed: Offsets, *, unwritten: bool) -> bool:
        """Take a parked partition back, if nobody went on with it meanwhile: with its records, or
        (`unwritten` is whether not) with what is restored of it."""
        parked = self._parked.pop(number, None)
        if parked is None or not unwritten or not parked.committed == committed == parked.next:
            return False
        parked.since_ms = None
        self._drop_gaps(number)
        self._owned[number] = parked
        return True

    def park(self, numbers: Iterable[int]) -> None:
        """Park partitions that were given up after a checkpoint."""
        for number in numbers:
            if number in self._owned:
                self._parked[number] = self._owned.pop(number)

    def unpark(self, keep: Collection[int]) -> frozenset[int]:
        """Forget the parked ones but `keep`; returns the numbers forgotten."""
        gone = frozenset(self._parked) - frozenset(keep)
        for number in gone:
            del self._parked[number]
        return gone

    def clear(self) -> frozenset[int]:
        """Drop all partitions; returns the numbers of those that may have state."""
        numbers = self.kept()
        self._owned.clear()
        self._parked.clear()
        self._gaps.clear()
        return numbers

    def admit(
        self, records: Iterable[Record], wanted: Callable[[Record], bool]
    ) -> tuple[list[Record], dict[Partition, int]]:
        """The records to be applied now, and from which offsets to fetch again.

        Drops those of partitions that are not ours, and those that `wanted` does not want; the
        positions move past these anyway.

        Raises:
            FencedMember: offsets went back, so this is not the log that was read before.
        """
        fresh: list[Record] = []
        refetch: dict[Partition, int] = {}
        for record in records:
            partition, offset = record.partition, record.offset
            owned = self._owned.get(partition.number)
            if owned is None or partition in refetch:
                continue
            expected = owned.next.get(partition.topic)
            if expected is not None and offset != expected:
                if offset < expected:
                    raise FencedMember(
                        f"offsets of {partition.topic} partition {partition.number} went back "
                        f"from {expected} to {offset}: another log is there now"
                    )
                if not self._is_hole(partition, expected):
                    refetch[partition] = expected
                    continue
            owned.next[partition.topic] = offset + 1
            if wanted(record):
                fresh.append(record)
        return fresh, refetch

    def pass_holes(self, reached: Mapping[Partition, int]) -> tuple[bool, dict[Partition, int]]:
        """Go on past what is not in the log any more, which no record shows if none follows.

        `reached` is where reading goes on once all that was read before is admitted. Returns
        whether that moved a position, and from which offsets to fetch again, as `admit`.
        """
        moved, refetch = False, {}
        for partition, offset in reached.items():
            owned, expected = self._owned.get(partition.number), self.next(partition)
            if owned is None or offset <= expected:
                continue
            # Where nothing is known yet, reading begins there: nobody is to read what is before.
            if owned.next.get(partition.topic) is None or self._is_hole(partition, expected):
                owned.next[partition.topic] = offset
                moved = True
            else:
                refetch[partition] = expected
        return moved, refetch

    def _is_hole(self, partition: Partition, expected: int) -> bool:
        """Whether it is known that the log has no record of this offset.

        Either the log has a hole, or records were fetched and then lost in a rebalance. Fetched
        once more, a hole shows itself by being there again.
        """
        gap = (partition, expected)
        if gap not in self._gaps:
            self._gaps.add(gap)
            return False
        self._gaps.discard(gap)
        return True

    def _drop_gaps(self, number: int) -> None:
        self._gaps = {gap for gap in self._gaps if gap[0].number != number}

    def caught_up(
        self, ends: Mapping[Partition, int], now_ms: int, *, ahead_ms: int = 0
    ) -> dict[int, CaughtUp]:
        """Which partitions had no lag at `now_ms`, before which `ends` was not asked for.

        What it says is in append time: `ahead_ms` is how far our clock is ahead of it.
        """
        result: dict[int, CaughtUp] = {}
        for number, owned in self._owned.items():
            mine = [Partition(topic, number) for topic in self._topics]
            if all(p in ends and self.next(p) >= ends[p] for p in mine):
                owned.since_ms = now_ms if owned.since_ms is None else owned.since_ms
                result[number] = CaughtUp(now_ms - ahead_ms, owned.since_ms - ahead_ms)
        return result

    def cut_off(self) -> None:
        """The bus does not answer: nobody can say that there is no lag."""
        for owned in self._owned.values():
            owned.since_ms = None

    def to_commit(self, limit: Callable[[Partition, int], int]) -> dict[Partition, int]:
        """What a commit should say, where that is not what the last one said."""
        offsets: dict[Partition, int] = {}
        for number, owned in self._owned.items():
            for topic, offset in owned.next.items():
                if offset is not None:
                    partition = Partition(topic, number)
                    offset = limit(partition, offset)
                    if offset != owned.committed.get(topic):
                        offsets[partition] = offset
        return offsets

    def committed(self) -> dict[Partition, int]:
        """What the last commits said."""
        return {
            Partition(topic, number): offset
            for number, owned in self._owned.items()
            for topic, offset in owned.committed.items()
            if offset is not None
        }

    def was_committed(self, offsets: Mapping[Partition, int]) -> None:
        """The commit was accepted."""
        for partition, offset in offsets.items():
            self._owned[partition.number].committed[partition.topic] = offset
