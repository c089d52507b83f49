"""The engine of one run: identity and order of its records, its rule instances, their timers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tocsin.schemas.errors import MalformedRecord
from tocsin.schemas.records.collections import Tier, tier_of
from tocsin.schemas.records.events import Event
from tocsin.schemas.records.frames import StepFrame, SystemFrame, TensorFrame
from tocsin.schemas.records.quarantines import RuleReleased
from tocsin.schemas.records.runs import RunData, RunEnded
from tocsin.schemas.records.snapshots import Snapshot
from tocsin.schemas.records.stops.commands import StopAnswer
from tocsin.schemas.records.wire import Meta
from tocsin.stream_rules.engine.cold_start import ColdInstances
from tocsin.stream_rules.engine.detail_requests import detail_request
from tocsin.stream_rules.engine.episodes import Reported
from tocsin.stream_rules.engine.instance import Instance
from tocsin.stream_rules.engine.listeners import Kind, Listeners
from tocsin.stream_rules.engine.packing import pack, unpack
from tocsin.stream_rules.engine.rule_spec import RuleSpec
from tocsin.stream_rules.engine.rule_times import RuleTimes
from tocsin.stream_rules.engine.run_state import RunState, Value
from tocsin.stream_rules.outcomes import Moment, Outcome
from tocsin.stream_rules.reading.other_runs import References
from tocsin.stream_rules.reading.restarts import fault_of
from tocsin.stream_rules.reading.state_codec import dump_state, load_state
from tocsin.stream_rules.rule import AnyRule
from tocsin.stream_rules.rules.progress.restart_loop import RestartLoop

logger = logging.getLogger(__name__)

RUN_KEY: Final = "_run"
"""The rule part of the key under which a run's own state is saved."""

RUN_STATE_VERSION: Final = 1

KEEP_MS: Final = 24 * 3_600_000
"""How long after its end, or after it was last heard, the state of a run is kept."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """An incarnation as the next one found it, for a last view of it; `offset` is the next's."""

    state: RunState
    instances: Sequence[Instance]
    offset: int


class RunEngine:
    """One run. `urgent` asks for a checkpoint; `expired`: its state may go.

    `earlier` are the incarnations that were over before anybody knew how they went.
    """

    def __init__(
        self,
        run_id: str,
        specs: Sequence[RuleSpec],
        references: References | None = None,
        times: RuleTimes | None = None,
    ) -> None:
        self.state = RunState(run_id=run_id)
        self.instances: list[Instance] = []
        self._timed: list[Instance] = []
        self.earlier: list[Earlier] = []
        self.dirty = self.urgent = self.expired = False
        self._specs = specs
        self._references: Final = references or References()
        self._times: Final = times
        self.covers = 0
        """The offset of the first record that was not applied when the run's state was saved."""
        self.saved_rules: frozenset[str] = frozenset()
        """Of whom a state was read, whether they are still rules of this worker or not."""
        self._restored: dict[str, Snapshot] = {}
        self._newest: Snapshot | None = None
        self._listeners = Listeners()
        self._not_before: dict[str, int] = {}
        self._names: dict[Hashable, tuple[str, ...]] = {}
        self._cold = ColdInstances()
        self._failing = _failing(specs)
        # What the next incarnation gets, if not the same.
        self._next: Sequence[RuleSpec] | None = None

    def use_next(self, specs: Sequence[RuleSpec]) -> None:
        """From its next incarnation on, the run gets instances of these rules."""
        self._next = specs

    # -- records ---------------------------------------------------------------------------

    def apply(self, value: Value, meta: Meta, *, offset: int, now_ms: int) -> list[Reported]:
        """Take in one record; `now_ms` is the partition's clock. Raises MalformedRecord."""
        if isinstance(value, Event) and isinstance(value.data, RuleReleased):
            self._release(value.data, offset)
            return []
        known = offset < self.covers
        standing = self.state.standing(value, meta)
        if not known:
            under_way = meta.seq > 0 and meta.boot not in self.state.sequences
            if not self.state.admit(meta):
                return []
            if standing == "late":
                self.state.late += 1
                return []
            if standing == "new":
                if self.urgent and self.state.incarnation:
                    self.earlier.append(Earlier(replace(self.state), self.instances, offset))
                self.state.start(value, meta, now_ms)
                if self._next is not None:
                    self._specs, self._next = self._next, None
                    self._failing = _failing(self._specs)
                self._equip(offset, "the run was under way already" if under_way else None)
            before = (self.state.ended, self.state.stop, self.state.lost)
            self.state.learn(value, meta, now_ms)
            self.dirty, self.expired = True, False
            self.urgent |= standing == "new"
            self.urgent |= before != (self.state.ended, self.state.stop, self.state.lost)
        elif standing != "current":
            return []
        shed = isinstance(value, TensorFrame) and self._leaves_out(value, known=known)
        at = Moment(now_ms=now_ms, run=self.state, rank=meta.rank, boot=meta.boot, seq=meta.seq)
        reported = self._cold.report(self.instances, at, fails_as=self._failing)
        reported += self._dispatch(value, at, offset, shed=shed)
        # What was read before the fault was saved says nothing new about it.
        return reported if known else [*reported, *self._restart_loop(at)]

    def _leaves_out(self, frame: TensorFrame, *, known: bool) -> bool:
        shedding = self.state.shedding
        if not shedding.leaves_out(frame):
            return False
        if not known:
            shedding.count(frame)
            if self._times is not None:
                self._times.left_out(tier_of(frame.collection))
        return True

    def shed(self, tier: Tier, why: str) -> None:
        """Leave summaries of this tier out. Only what was not read yet: a checkpoint comes first,
        so that all of it is left out by whoever reads it."""
        self.state.shedding.start(tier, why)
        self.dirty = self.urgent = True

    def evaluate_again(self, tier: Tier) -> None:
        """Leave them out no more, likewise."""
        self.state.shedding.end(tier)
        self.dirty = self.urgent = True

    def postpone(self, why: str) -> None:
        """From now on the run is read later than the others. A checkpoint comes first, so that
        whoever has it next begins with what was not read yet."""
        self.state.postponed = why
        self.dirty = self.urgent = True

    def rejoin(self) -> None:
        """End the postponement: the run has caught up with the others."""
        self.state.postponed = ""
        self.dirty = self.urgent = True

    def _release(self, data: RuleReleased, offset: int) -> None:
        """A person has the rule tried again; it begins without a memory, and reports that."""
        if data.incarnation != self.state.incarnation or self.state.ended:
            return
        for instance in self.instances:
            if instance.spec.name != data.rule or offset < instance.covers:
                continue
            if instance.release():
                if instance.rule.other_runs():
                    instance.rule.on_references(self._references)
                self._cold.add(instance, f"released from quarantine by {data.by}", lost=False)
                self.dirty = self.urgent = True

    def _restart_loop(self, at: Moment) -> list[Reported]:
        """The issue that the incarnation fails as earlier ones did, at its first fault."""
        restarts = self.state.restarts
        if restarts.compared or restarts.fault is None:
            return []
        restarts.compared = True

        def call(rule: AnyRule) -> Iterable[Outcome]:
            assert isinstance(rule, RestartLoop)
            return rule.failed_again(restarts, at)

        return [
            one
            for instance in self.instances
            if instance.spec.rule is RestartLoop and instance.spec.fits(self.state.labels)
            for one in instance.call(call, at, fails_as=self._failing, input_seen=True)
        ]

    def _dispatch(
        self, value: Value, at: Moment, offset: int, *, shed: bool = False
    ) -> list[Reported]:
        method: Callable[[AnyRule], Iterable[Outcome]]
        everyone = False
        part: int | None = None
        scalars_of: int | None = None
        read = True
        kind: Kind
        tensors: TensorFrame | None = None
        if isinstance(value, StepFrame):
            frame = value
            if not self.state.parts.leads_with(value):
                scalars_of = value.origin.rank
            kind = ("scalar", value.mode, value.columns)

            def method(rule: AnyRule) -> Iterable[Outcome]:
                return rule.on_steps(frame, at)
        elif isinstance(value, TensorFrame):
            known = tensors = self._with_known_names(value)
            part = value.origin.rank
            read = self.state.parts.reads(known)
            kind = ("tensors", value.mode, (value.collection,))

            def method(rule: AnyRule) -> Iterable[Outcome]:
                return rule.on_tensors(known, at)
        elif isinstance(value, SystemFrame):
            samples = value
            kind = ("system", None, value.columns)

            def method(rule: AnyRule) -> Iterable[Outcome]:
                return rule.on_system(samples, at)
        else:
            data = value.data
            if not isinstance(data, RunData) or isinstance(data, StopAnswer):
                return []
            event = data
            everyone = isinstance(data, RunEnded)
            kind = ("event", None, (value.type,))

            def method(rule: AnyRule) -> Iterable[Outcome]:
                return rule.on_event(event, at)

        listeners, fed = self._listeners.find(kind)
        reported: list[Reported] = []
        for instance in self.instances if everyone else listeners:
            spec = instance.spec
            if not read and spec.rule.by_part:
                continue
            if tensors is not None and not instance.reads(tensors):
                continue
            if shed and not spec.rule.by_presence:
                continue
            if offset >= instance.covers and (not spec.match or spec.fits(self.state.labels)):
                found = instance.call(
                    method,
                    at,
                    fails_as=self._failing,
                    input_seen=spec.name in fed,
                    part=part,
                    scalars_of=scalars_of,
                )
                if found:
                    reported += self._with_causes(found, at)
        return [self._with_detail_request(one) for one in reported]

    def _with_known_names(self, frame: TensorFrame) -> TensorFrame:
        """The same with the names object that came last, if it has the same names.

        Whoever compares it with what he keeps then compares addresses, not thousands of names.
        """
        key = (frame.collection, frame.mode, frame.part)
        known = self._names.get(key)
        if known == frame.rows:
            return replace(frame, rows=known)
        self._names[key] = frame.rows
        return frame

    def _with_causes(self, found: Sequence[Reported], at: Moment) -> Iterator[Reported]:
        """The same, each with its cause; and what was reported before, of which one is the
        cause.
        """
        for reported in found:
            if reported.issue.state == "resolved":
                self.state.causes.resolved(reported.issue)
            if (fault := fault_of(reported.issue)) is not None:
                self.state.restarts.note(fault)
            fires = reported.issue.state == "firing"
            attributions = self.state.causes.fired(reported.issue) if fires else []
            again: list[Reported] = []
            for attribution in attributions:
                for instance in self.instances:
                    placed = instance.attribute(attribution, reported, at)
                    if placed is None:
                        continue
                    if placed.issue.issue_id == reported.issue.issue_id:
                        reported = placed
                    else:
                        again.append(placed)
            yield reported
            yield from again

    def _with_detail_request(self, reported: Reported) -> Reported:
        """With the request that it brings, unless the run has ended or was asked not long ago."""
        request = None if self.state.ended else detail_request(reported.issue, self.state.looked_ms)
        if request is None:
            return reported
        self.state.looked_ms = reported.issue.at_ms
        return replace(reported, request=request)

    @property
    def held_back(self) -> bool:
        """Whether a timer is past its due time, because a live worker had not earned it yet."""
        return bool(self._not_before)

    # -- time ------------------------------------------------------------------------------

    def fire(self, now_ms: int, *, since_ms: int | None = None) -> list[Reported]:
        """Fire what is due at `now_ms`, in the order of the due times.

        `since_ms` is for a live worker: since when it has had no lag. None: a record is the proof.
        """
        reported: list[Reported] = []
        self._not_before.clear()
        while True:
            due = self._due_by(now_ms, since_ms)
            reported += self._failures(now_ms)
            if due is None:
                break
            due_ms, instance = due
            self.dirty = True
            if instance is None:
                self._own_timer(due_ms)
                continue
            at = Moment(now_ms=due_ms, run=self.state)
            found = instance.call(_timer(at), at, fails_as=self._failing, input_seen=False)
            reported += [self._with_detail_request(one) for one in self._with_causes(found, at)]
            # Before the next checkpoint, which may be torn: what is saved of a fault was compared.
            reported += self._restart_loop(at)
        return reported

    def _failures(self, now_ms: int) -> list[Reported]:
        """What instances failed at between records."""
        at = Moment(now_ms=now_ms, run=self.state)
        failed = [instance for instance in self.instances if instance.unreported]
        self.dirty |= bool(failed)
        return [t for i in failed for t in i.report_failure(at, fails_as=self._failing)]

    def _due_by(self, now_ms: int, since_ms: int | None) -> tuple[int, Instance | None] | None:
        first: tuple[int, Instance | None] | None = None
        own = self._own_due_ms()
        if own is None:
            return None
        if own <= now_ms:
            first = (own, None)
        for instance in self._timed:
            due = instance.due_ms()
            if due is None or due > now_ms or (first is not None and due >= first[0]):
                continue
            if since_ms is not None:
                ready_ms = since_ms + instance.rule.grace_ms()
                if ready_ms > now_ms:
                    self._not_before[instance.spec.name] = ready_ms
                    continue
            first = (due, instance)
        return first

    def next_due_ms(self) -> int | None:
        """When a live worker must come back."""
        if self.expired:
            return None
        dues = [
            max(due, self._not_before.get(instance.spec.name, due))
            for instance in self._timed
            if (due := instance.due_ms()) is not None
        ]
        if any(instance.unreported for instance in self.instances):
            return self.state.heard_ms
        own = self._own_due_ms()
        return min([*dues, own] if own is not None else dues, default=None)

    def _own_due_ms(self) -> int | None:
        """When the run is lost, or its state may go; None: it may now."""
        if self.expired:
            return None
        quiet = self.state.quiet_due_ms()
        if quiet is not None:
            return quiet
        ended = self.state.ended_ms
        return (self.state.heard_ms if ended is None else ended) + KEEP_MS

    def _own_timer(self, due_ms: int) -> None:
        if self.state.quiet_due_ms() is None:
            self.expired = True
        else:
            self.state.went_quiet(due_ms)
            self.urgent = True

    # -- snapshots -------------------------------------------------------------------------

    def snapshots(
        self, *, next_offset: int, clock_ms: int, software: str, changed: bool = False
    ) -> list[Snapshot]:
        """All states, the run's own last: what is newer than it after a crash waits for it.

        `changed`: of the rules only those with another state than this gave the last time; who
        goes on from an older one is given the records since then, which change nothing of it. Those
        that were restored from beyond `next_offset` are on the bus as they are, and wait.
        """
        snapshot = self._snapshots_at(next_offset, clock_ms, software)
        saved = []
        for instance in self.instances:
            if not changed or (instance.touched and instance.covers <= next_offset):
                saved.append(snapshot(instance.spec.name, instance.version, instance.snapshot()))
                # What it failed at in this moment is saved the next time.
                instance.touched = instance.unreported
        if not changed or self.covers <= next_offset:
            saved.append(snapshot(RUN_KEY, RUN_STATE_VERSION, pack(dump_state(self.state))))
        return saved

    def call_under_way(self) -> tuple[Instance, Moment] | None:
        """The call into a rule that has not returned, if there is one. Any thread."""
        calls = ((one, one.in_call) for one in self.instances)
        return next(((one, at) for one, at in calls if at is not None), None)

    def abandon(
        self, instance: Instance, *, next_offset: int, clock_ms: int, software: str
    ) -> Snapshot:
        """Quarantine a rule into which a call does not return; its state.

        From any thread. The run must not be used any more.
        """
        snapshot = self._snapshots_at(next_offset, clock_ms, software)
        return snapshot(instance.spec.name, instance.version, instance.abandon())

    def _snapshots_at(
        self, next_offset: int, clock_ms: int, software: str
    ) -> Callable[[str, int, bytes], Snapshot]:
        def snapshot(rule: str, version: int, payload: bytes) -> Snapshot:
            return Snapshot(
                run_id=self.state.run_id,
                incarnation=self.state.incarnation,
                rule=rule,
                rule_version=version,
                next_offset=next_offset,
                payload=payload,
                saved_at_ms=clock_ms,
                software=software,
            )

        return snapshot

    def restore(self, snapshots: Mapping[str, Snapshot]) -> None:
        """Take back what was saved, by rule name. What cannot be read starts cold."""
        self._restored = dict(snapshots)
        self._newest = max(snapshots.values(), key=lambda s: s.next_offset, default=None)
        self.saved_rules = frozenset(snapshots)
        own = self._restored.pop(RUN_KEY, None)
        # What is left of a run whose own state was never written is not kept for ever either.
        self.state.heard_ms = max((s.saved_at_ms for s in snapshots.values()), default=0)
        if own is None or own.rule_version != RUN_STATE_VERSION:
            return
        try:
            self.state = load_state(RunState, unpack(own.payload))
        except MalformedRecord as error:
            _cold(own, str(error))
            return
        self.covers = own.next_offset
        self._equip(0, "there was no such rule before")

    def is_of_another_log(self, offset: int, append_ms: int) -> bool:
        """Whether what was restored was not made of the log of this record, as when its topic was
        created anew: a state says when the newest of the records that are in it was appended."""
        newest = self._newest
        if newest is None or offset >= newest.next_offset:
            return False
        return 0 < newest.saved_at_ms < append_ms

    def waits(self, next_offset: int) -> bool:
        """Whether a changed state is to be saved only once more was read: see `snapshots`."""
        return any(one.touched and one.covers > next_offset for one in self.instances)

    def save_again(self) -> None:
        """All states at the next checkpoint, whatever has changed."""
        for instance in self.instances:
            instance.touched = True
        self.dirty = True

    def unsaved_begin_now(self) -> None:
        """Rules of which nothing was saved begin where the run's own state stands: whoever saved
        it did not have them, and what is read once more is not the whole run."""
        for instance in self.instances:
            if instance.spec.name not in self._restored:
                instance.covers = max(instance.covers, self.covers)

    def _equip(self, offset: int, unsaved: str | None) -> None:
        """Fresh instances for the incarnation at hand, or as far as they were saved beyond
        `offset`. `unsaved`: why one that was not saved begins cold; None: it does not."""
        self._not_before.clear()
        # None once an incarnation has completed.
        past = {i.spec.name: i.faults for i in self.instances if self.state.restarts.past}
        self.instances = [Instance(spec, self._times) for spec in self._specs]
        self._listeners = Listeners(self.instances)
        for instance in self.instances:
            if instance.rule.other_runs():
                instance.rule.on_references(self._references)
        self._timed = [instance for instance in self.instances if instance.has_timer]
        for instance in self.instances:
            saved = self._restored.get(instance.spec.name)
            instance.remember(past.get(instance.spec.name, ()))
            if saved is None or saved.next_offset <= offset:
                if unsaved is not None:
                    self._cold.add(instance, unsaved, lost=False)
                continue
            if saved.incarnation != self.state.incarnation:
                # A torn checkpoint: the rule is further, in an incarnation that comes later.
                instance.covers = saved.next_offset
                continue
            try:
                # One that is older than the run's own state was not called since.
                covers = max(saved.next_offset, self.covers)
                instance.restore(saved.payload, covers=covers, version=saved.rule_version)
            except MalformedRecord as error:
                self._begins_cold(instance, saved, str(error))
        self.state.causes.restored(i for each in self.instances for i in each.open_issues())
        faults = (fault for instance in self.instances for fault in instance.faults)
        self.state.restarts.restored(faults, self.state.incarnation)

    def _begins_cold(self, instance: Instance, saved: Snapshot, why: str) -> None:
        _cold(saved, why)
        self._cold.add(instance, f"its state was lost: {why}", lost=True)


def _failing(specs: Iterable[RuleSpec]) -> RuleSpec | None:
    """The rule that reports rules with an error."""
    return next((spec for spec in specs if spec.rule.meta.name == "rule_failed"), None)


def _timer(at: Moment) -> Callable[[AnyRule], Iterable[Outcome]]:
    def call(rule: AnyRule) -> list[Outcome]:
        outcomes = list(rule.on_timer(at))
        due = rule.next_due_ms()
        if due is not None and due <= at.now_ms:
            raise RuntimeError(f"its timer did not move on: {due} after {at.now_ms}")
        return outcomes

    return call


def _cold(saved: Snapshot, why: str) -> None:
    logger.warning(
        "snapshot not taken back, the rule starts cold",
        extra={"action": "rules", "run_id": saved.run_id, "rule": saved.rule, "reason": why},
    )
