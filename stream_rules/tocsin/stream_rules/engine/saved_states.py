"""The states of runs that were read from the bus and are not in use, by partition and run."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from tocsin.bus.port import Record
from tocsin.schemas.errors import RecordError
from tocsin.schemas.records.snapshots import Snapshot
from tocsin.schemas.topics import STATE_KEEP_MS

logger = logging.getLogger(__name__)


class SavedStates:
    """Of each rule of a run the newest state that was seen: that with the highest `next_offset`,
    which need not be the last one.

    They are kept encoded: a bus has many of each until it compacts them, and most runs are over.
    """

    def __init__(self) -> None:
        self._runs: Final[dict[int, dict[str, dict[str, tuple[int, bytes]]]]] = {}
        # When the last state of a run was written, by append time: of a partition, oldest first.
        self._heard: Final[dict[int, dict[str, int]]] = {}
        self._newest_ms = 0
        # Rules of which compaction keeps an older state than is here, or one that is none.
        self._outlived: Final[set[tuple[int, str, str]]] = set()

    def apply(self, partition: int, record: Record) -> None:
        """A record of the state topic. One that cannot be read is skipped, with a warning."""
        runs = self._runs.setdefault(partition, {})
        run_id, _, rule = record.key.decode(errors="replace").partition("/")
        self._newest_ms = max(self._newest_ms, record.append_ms)
        if record.value is None:
            runs.get(run_id, {}).pop(rule, None)
            self._outlived.discard((partition, run_id, rule))
            return
        known = runs.setdefault(run_id, {}).get(rule)
        self._note(partition, run_id, record.append_ms)
        try:
            offset = Snapshot.offset_of(record.value)
        except RecordError as error:
            _unreadable(run_id, rule, error)
            if known is not None:
                self._outlived.add((partition, run_id, rule))
            return
        if known is None or offset >= known[0]:
            runs[run_id][rule] = offset, record.value
            self._outlived.discard((partition, run_id, rule))
        else:
            self._outlived.add((partition, run_id, rule))

    def keep(self, partition: int, run_id: str, snapshots: Iterable[Snapshot]) -> None:
        """As if these had been read, and nothing else of the run."""
        states = {one.rule: (one.next_offset, one.encode()) for one in snapshots}
        self._runs.setdefault(partition, {})[run_id] = states
        self._note(partition, run_id, self._newest_ms)
        self._outlived.difference_update({(partition, run_id, rule) for rule in states})

    def has(self, partition: int, run_id: str) -> bool:
        """Whether there is something of the run."""
        return run_id in self._runs.get(partition, {})

    def runs(self, partition: int) -> list[str]:
        """The runs of which there is something."""
        return list(self._runs.get(partition, {}))

    def outlived(self, partition: int, run_id: str) -> bool:
        """Whether the bus has an older state of one of the run's rules as the last, or one that
        cannot be read: a process that had been taken for dead has written it, and compaction leaves
        nothing else."""
        return any((partition, run_id) == key[:2] for key in self._outlived)

    def pop(self, partition: int, run_id: str) -> dict[str, Snapshot]:
        """The states of a run by rule, which are forgotten here; those that can be read."""
        found: dict[str, Snapshot] = {}
        for rule, (_, value) in self._remove(partition, run_id).items():
            try:
                found[rule] = Snapshot.decode(value)
            except RecordError as error:
                _unreadable(run_id, rule, error)
        return found

    def drop_outdated(self) -> None:
        """Forget the runs whose states nobody has renewed for `STATE_KEEP_MS`."""
        for partition, heard in self._heard.items():
            while heard:
                run_id, heard_ms = next(iter(heard.items()))
                if heard_ms > self._newest_ms - STATE_KEEP_MS:
                    break
                self._remove(partition, run_id)

    def release(self, partitions: Collection[int]) -> None:
        """Forget these partitions."""
        for number in partitions:
            self._runs.pop(number, None)
            self._heard.pop(number, None)
        self._outlived.difference_update([key for key in self._outlived if key[0] in partitions])

    def _note(self, partition: int, run_id: str, heard_ms: int) -> None:
        heard = self._heard.setdefault(partition, {})
        heard.pop(run_id, None)
        heard[run_id] = heard_ms

    def _remove(self, partition: int, run_id: str) -> Mapping[str, tuple[int, bytes]]:
        self._heard.get(partition, {}).pop(run_id, None)
        states = self._runs.get(partition, {}).pop(run_id, {})
        self._outlived.difference_update({(partition, run_id, rule) for rule in states})
        return states


def _unreadable(run_id: str, rule: str, error: RecordError) -> None:
    logger.warning(
        "snapshot cannot be read",
        extra={"action": "rules", "run_id": run_id, "rule": rule, "reason": str(error)},
    )
