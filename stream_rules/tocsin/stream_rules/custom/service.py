"""The custom rules as a part of the rules' service: what they get, what is published of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from tocsin.bus.port import Record
from tocsin.runtime.service import Tick
from tocsin.schemas.records.frames import StepFrame, SystemFrame, TensorFrame
from tocsin.schemas.records.run_view import RuleStatus, RunView
from tocsin.schemas.records.snapshots import Snapshot
from tocsin.schemas.records.wire import TYPE
from tocsin.stream_rules.custom.host import CustomHost
from tocsin.stream_rules.custom.protocol import CUSTOM_KEY
from tocsin.stream_rules.engine.configured_rules import RuleSpec
from tocsin.stream_rules.engine.detail_requests import detail_request
from tocsin.stream_rules.engine.episodes import Reported
from tocsin.stream_rules.engine.partitions import PartitionEngine

_LATE_S: Final = 5.0
"""After so long states that came late are written, if nothing else brings a checkpoint."""

_KINDS: Final = {
    TensorFrame.type.encode(): "tensors",
    SystemFrame.type.encode(): "system",
    StepFrame.type.encode(): "scalar",
}


class CustomRules:
    """Between the service and the host; in the service's thread."""

    def __init__(self, specs: Sequence[RuleSpec], host: CustomHost) -> None:
        self.host: Final = host
        self._urgent = False
        self._late_s: float | None = None
        self._specs: Final = [spec for spec in specs if spec.custom]
        self._names: Final = frozenset(spec.name for spec in self._specs) | {CUSTOM_KEY}
        self._reads: Final = {i.kind for spec in self._specs for i in spec.rule.meta.inputs}
        self._fed: list[Record] = []
        self._snapshots: list[tuple[int, Snapshot]] = []
        self._covers: dict[int, int] = {}
        # Partition -> the first record that no state on the bus covers, and the last that there is.
        self._open: dict[int, tuple[int, int]] = {}
        # Where others may take a run over: its newest states, by rule.
        self._keep = False
        self._newest: dict[tuple[int, str], dict[str, Snapshot]] = {}
        self._reported: list[Reported] = []

    def attached(self, nudge: Callable[[], None], *, keep: bool) -> None:
        """`keep`: runs may be lost to others, so what is saved of them is remembered."""
        self._keep = keep
        self.host.attached(nudge)

    def adopt(
        self,
        partition: int,
        run_id: str,
        snapshots: Mapping[str, Snapshot],
        *,
        next_offset: int,
        begin_now: bool,
    ) -> None:
        """Go on with a run; of its snapshots those that are for here."""
        mine = [snapshot for rule, snapshot in snapshots.items() if rule in self._names]
        if mine:
            self._remember((partition, one) for one in mine)
            self._flush()
            with self.host.orders() as backlog:
                backlog.adopt(partition, run_id, mine, next_offset=next_offset, begin_now=begin_now)

    def feed(self, record: Record) -> None:
        """A record of telemetry."""
        number = record.partition.number
        first, _ = self._open.get(number, (record.offset, 0))
        self._open[number] = (first, record.offset)
        self._fed.append(self._without_value(record))

    def _without_value(self, record: Record) -> Record:
        """Without its value if no custom rule reads such records: it shows but how late it is."""
        kind = _KINDS.get(record.header(TYPE) or b"")
        # Steps show how far a run is, and events what becomes of it: all rules may ask for that.
        if kind in ("tensors", "system") and kind not in self._reads:
            return replace(record, value=None)
        return record

    def _flush(self) -> None:
        queued, self._fed = self._fed, []
        self.host.feed(queued)

    def release(self, partitions: Collection[int]) -> None:
        """Drop the runs of partitions that another worker owns now."""
        gone = frozenset(partitions)
        self._fed = [record for record in self._fed if record.partition.number not in gone]
        self._snapshots = [one for one in self._snapshots if one[0] not in gone]
        self._newest = {key: rows for key, rows in self._newest.items() if key[0] not in gone}
        for number in gone:
            self._covers.pop(number, None)
            self._open.pop(number, None)
        with self.host.orders() as backlog:
            backlog.release(gone)

    def drop(self, partition: int, run_id: str) -> None:
        """The run was over long ago, or is another's."""
        self._newest.pop((partition, run_id), None)
        self._snapshots = [
            one for one in self._snapshots if (one[0], one[1].run_id) != (partition, run_id)
        ]
        with self.host.orders() as backlog:
            backlog.drop(partition, run_id)

    def lost(
        self, partition: int, run_id: str, timeout_s: float, engine: PartitionEngine
    ) -> list[Snapshot]:
        """Somebody else has the run now. Drop it; its newest states, which are not written."""
        self._reported += self.save(timeout_s, engine)
        newest = self._newest.get((partition, run_id), {})
        self.drop(partition, run_id)
        return list(newest.values())

    def _remember(self, snapshots: Iterable[tuple[int, Snapshot]]) -> None:
        for number, snapshot in snapshots if self._keep else ():
            of_run = self._newest.setdefault((number, snapshot.run_id), {})
            of_run[snapshot.rule] = snapshot

    def exchange(self, tick: Tick | None, engine: PartitionEngine) -> list[Reported]:
        """Hand over what came, let time pass, and take what was found."""
        self._flush()
        if tick is not None and tick.caught_up:
            with self.host.orders() as backlog:
                for number, caught_up in tick.caught_up.items():
                    if number in tick.owned:
                        backlog.advance(number, caught_up.as_of_ms, caught_up.since_ms)
        taken = self.host.drain()
        self._snapshots += taken.snapshots
        self._remember(taken.snapshots)
        self._covers |= taken.covers
        self._urgent |= taken.urgent
        if taken.covers and self._late_s is None:
            self._late_s = time.monotonic()
        for _, run_id in taken.changed:
            run = engine.run(run_id)
            if run is not None:
                run.dirty = True
                self._urgent = True
        earlier, self._reported = self._reported, []
        return [*earlier, *(_with_detail_request(one, engine) for one in taken.reported)]

    def save(self, timeout_s: float, engine: PartitionEngine) -> list[Reported]:
        """Have all saved that was handed over; what was found on the way."""
        self.host.save(timeout_s)
        return self.exchange(None, engine)

    def wants_checkpoint(self) -> bool:
        """Whether there are states that should not wait."""
        late = self._late_s is not None and time.monotonic() - self._late_s > _LATE_S
        return self._urgent or late

    def hand_out(self) -> Sequence[tuple[int, Snapshot]]:
        """The states to be written now, with their partitions."""
        written, self._snapshots = self._snapshots, []
        self._urgent, self._late_s = False, None
        for number, covers in self._covers.items():
            first, last = self._open.get(number, (0, -1))
            if covers > last:
                self._open.pop(number, None)
            else:
                self._open[number] = (max(first, covers), last)
        self._covers = {}
        return written

    def committable(self, partition: int, next_offset: int) -> int:
        """The offset that may be committed, as all below it is in a state that was written."""
        if self.host.broken:
            return next_offset
        first, _ = self._open.get(partition, (next_offset, 0))
        return min(first, next_offset)

    def on_view(self, partition: int, view: RunView) -> RunView:
        """The view of a run with these rules on it."""
        run = self.host.run(partition, view.run_id)
        statuses: dict[str, RuleStatus] = {
            spec.name: "waiting_for_input" for spec in self._specs if spec.fits(view.labels)
        }
        found, over = 0, self.host.broken
        if run is not None and run.incarnation == view.incarnation:
            statuses |= run.statuses
            found, over = run.found, over or run.over
        if view.state != "running" and not over:
            # Whoever waits for the end of the run waits for these rules, too.
            statuses = {
                name: status if status == "error" else "in_progress"
                for name, status in statuses.items()
            }
        return view.model_copy(
            update={"rules": {**view.rules, **statuses}, "issues": view.issues + found}
        )


def _with_detail_request(reported: Reported, engine: PartitionEngine) -> Reported:
    """With the request that it brings, as for the other rules of the run."""
    run = engine.run(reported.issue.run_id)
    if run is None or run.state.ended:
        return reported
    request = detail_request(reported.issue, run.state.looked_ms)
    if request is None:
        return reported
    run.state.looked_ms = reported.issue.at_ms
    return replace(reported, request=request)
