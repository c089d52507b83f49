"""The rules as a service of the worker: records in; out come issues, requests to look closer,
snapshots and run views.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Final

from tocsin.bus.port import Outgoing, Partition, Record
from tocsin.runtime import metrics as names
from tocsin.runtime.leased_runs import HoldLimit
from tocsin.runtime.metrics import Metrics
from tocsin.runtime.second_reader import ReadAgain, SecondReading
from tocsin.runtime.service import Attachment, Poison, Service, Tick
from tocsin.schemas.configuration.file import Config
from tocsin.schemas.errors import ConfigurationError, RecordError
from tocsin.schemas.records.events import Data, Event
from tocsin.schemas.records.issues import issue_event
from tocsin.schemas.records.snapshots import Snapshot
from tocsin.schemas.records.stops.commands import DetailRequest, detail_request_key
from tocsin.schemas.records.wire import meta_of
from tocsin.schemas.topics import Topics, issue_partition, telemetry_partition
from tocsin.stream_rules.catalogue import RuleCatalogue
from tocsin.stream_rules.custom.call_limits import Limits
from tocsin.stream_rules.custom.host import CustomHost
from tocsin.stream_rules.custom.protocol import CUSTOM_KEY
from tocsin.stream_rules.custom.service import CustomRules
from tocsin.stream_rules.engine.configured_rules import RuleSpec, custom_entries, rule_specs
from tocsin.stream_rules.engine.episodes import Reported
from tocsin.stream_rules.engine.overload_decision import Fairness
from tocsin.stream_rules.engine.partitions import PartitionEngine, UnusableRecord
from tocsin.stream_rules.engine.published_views import PublishedViews
from tocsin.stream_rules.engine.rule_times import RuleTimes
from tocsin.stream_rules.engine.run import RUN_KEY, Earlier, RunEngine
from tocsin.stream_rules.engine.run_accounts import RunAccounts
from tocsin.stream_rules.engine.run_view import run_view
from tocsin.stream_rules.engine.saved_states import SavedStates
from tocsin.stream_rules.overload_control import OverloadControl
from tocsin.stream_rules.rules.about_rules.rule_failed import RuleFailed

logger = logging.getLogger(__name__)

SAVE_S: Final = 2.0
"""How long the states of custom rules are waited for before partitions are given up, seconds."""

SURE_S: Final = 2.0
"""How long a call into a rule must last when the worker is about to be ended, to be the cause."""

AT_ONCE: Final = 20
"""How many of the runs that nothing is heard of are taken up in one round: a tenth of a second."""


class RulesService(Service):
    """The engine behind the worker.

    Args:
        software: name and version, for the snapshots.
        metrics: where the time of runs is counted; None: nowhere.
        times: measures the rules; None: by the clocks of the process.
        fairness: decides which run gives way if the worker cannot keep up; None: as usual.
        customs: the process of the custom rules among `specs`, which was started; None: there are
            none. The service ends it.
    """

    name = "rules"
    bus_time = True

    # Whoever serves a run saves its state every few seconds. Should it die, what came since then
    # is among the last records, and its snapshots say where they begin.
    holds_skipped = True
    hold_limit = HoldLimit()

    def __init__(
        self,
        topics: Topics,
        specs: Sequence[RuleSpec],
        *,
        software: str = "",
        customs: CustomHost | None = None,
        metrics: Metrics | None = None,
        times: RuleTimes | None = None,
        fairness: Fairness | None = None,
    ) -> None:
        self.inputs = (topics.telemetry,)
        self.restores = (topics.state,)
        self.read_ahead = (topics.state, topics.runs)
        self.specs = tuple(specs)
        """The instances that new incarnations get."""
        self._metrics: Final = metrics or Metrics()
        self._times: Final = times or RuleTimes(time.perf_counter, time.thread_time)
        self.engine: Final = PartitionEngine(
            [spec for spec in specs if not spec.custom], self._times
        )
        self._customs: Final = CustomRules(specs, customs) if customs is not None else None
        self._topics: Final = topics
        own = () if self._customs is None else (CUSTOM_KEY,)
        self._names = (*(spec.name for spec in specs), RUN_KEY, *own)
        self._adopt = True
        self._software = software
        self._reported: list[Reported] = []
        # Runs whose states are to be taken from the bus: their log is another one by now.
        self._stale: list[tuple[int, RunEngine]] = []
        self._saved: Final = SavedStates()
        # Runs of partitions that were restored, to be taken up in the rounds that follow.
        self._waiting: deque[tuple[int, str, int]] = deque()
        self._at_once = AT_ONCE
        self._nudge: Callable[[], None] = _nobody
        self._views: Final = PublishedViews(topics.runs)
        self._accounts: Final = RunAccounts(self._metrics)
        self._overload: Final = OverloadControl(
            self.engine,
            fairness or Fairness(),
            telemetry=topics.telemetry,
            wall_s=self._times.wall_s,
            metrics=self._metrics,
            nudge=lambda: self._nudge(),
        )

    def use(self, specs: Sequence[RuleSpec]) -> None:
        """Give these rules to new incarnations; in the worker's thread. Custom ones stay the same
        (`specs_at_runtime`)."""
        self.specs = tuple(specs)
        self.engine.use([spec for spec in specs if not spec.custom])
        # States of rules that are gone go with their run.
        self._names = tuple(dict.fromkeys((*self._names, *(spec.name for spec in specs))))

    # -- state comes and goes --------------------------------------------------------------

    def attached(self, to: Attachment) -> None:
        # A run that another process may have is taken up only once a record of it comes here;
        # else at once, so that its timers go on though it is silent.
        self._adopt = self._overload.may_postpone = to.skip is None
        self._nudge = to.nudge
        if self._customs is not None:
            self._customs.attached(to.nudge, keep=not self._adopt)

    def follows(self, partition: int) -> Sequence[Partition]:
        """The views, of which others write some: they are taken away when they are old. Where
        others serve runs, also the states, to go on with theirs. And the telemetry of runs that
        rules compare others with, wherever it is."""
        topics = [self._topics.runs] if self._adopt else [self._topics.runs, self._topics.state]
        named = {telemetry_partition(run) for run in self.engine.references.run_ids}
        return [
            *(Partition(topic, partition) for topic in topics),
            *(Partition(self._topics.telemetry, number) for number in sorted(named)),
        ]

    def order_of(self, record: Record) -> int:
        if record.partition.topic != self._topics.state:
            return record.offset
        try:
            return Snapshot.offset_of(record.value or b"")
        except RecordError:
            return -1

    def restore(self, partition: int, records: Sequence[Record]) -> None:
        for record in records:
            if record.partition.topic == self._topics.runs:
                self._views.apply(record)
            elif record.partition.topic == self._topics.telemetry:
                self.engine.references.read(record)
            else:
                self._saved.apply(partition, record)

    def consult(self, records: Sequence[Record]) -> None:
        for record in records:
            self.engine.references.read(record)

    def restored(self, partition: int, next_offset: int | None) -> None:
        """A run takes milliseconds to be taken up, and there may be thousands: those of which a
        record comes are first, the others follow while there is nothing else to do."""
        if self._adopt:
            self._waiting.extend(
                (partition, run_id, next_offset or 0) for run_id in self._saved.runs(partition)
            )
            self._adopt_waiting()

    def _adopt_waiting(self) -> None:
        while self._waiting and self._at_once > 0:
            partition, run_id, next_offset = self._waiting.popleft()
            if self._saved.has(partition, run_id):
                self._adopt_run(partition, run_id, next_offset)
                self._at_once -= 1
        if self._waiting:
            self._nudge()

    def release(self, partitions: Collection[int]) -> None:
        self.engine.release(partitions)
        if self._customs is not None:
            self._customs.release(partitions)
        self._accounts.release(partitions)
        self._overload.release(partitions)
        gone = frozenset(partitions)
        self._waiting = deque(one for one in self._waiting if one[0] not in gone)
        self._stale = [one for one in self._stale if one[0] not in gone]
        self._saved.release(partitions)
        self._views.release(partitions)

    def _adopt_run(self, partition: int, run_id: str, next_offset: int) -> None:
        outlived = self._saved.outlived(partition, run_id)
        snapshots = self._saved.pop(partition, run_id)
        if snapshots:
            if self._customs is not None:
                self._customs.adopt(
                    partition, run_id, snapshots, next_offset=next_offset, begin_now=not self._adopt
                )
            run = self.engine.adopt(partition, run_id, snapshots, next_offset=next_offset)
            if not self._adopt:
                run.unsaved_begin_now()
            if outlived:
                run.save_again()

    def _drop_stale(self, number: int, run: RunEngine) -> None:
        """The run begins anew, and in the middle: its states say that they have records which they
        have not, and would win over all that follow."""
        logger.warning(
            "the log of the run is another one than its state is of: its rules start cold",
            extra={"action": "rules", "run_id": run.state.run_id, "partition": number},
        )
        # What it asked for is over; the one that begins may ask again.
        run.state.looked_ms = None
        self._stale.append((number, run))
        self._drop(number, run.state.run_id)

    def _drop(self, number: int, run_id: str) -> None:
        self._accounts.drop(number, run_id)
        self.engine.drop(number, run_id)
        if self._customs is not None:
            self._customs.drop(number, run_id)

    def lost(self, runs: Collection[str]) -> None:
        """What they were at is remembered as if it had been read; whoever has them now writes what
        is newer, and where that is not there yet when they come back, ours is the newest."""
        for number, state, run in self.engine.runs():
            run_id = run.state.run_id
            if run_id not in runs:
                continue
            saved = run.snapshots(
                next_offset=state.next_offset, clock_ms=state.clock_ms, software=self._software
            )
            if self._customs is not None:
                saved += self._customs.lost(number, run_id, SAVE_S, self.engine)
            self._saved.keep(number, run_id, saved)
            self._accounts.drop(number, run_id)
            self.engine.drop(number, run_id)

    def last_words(self) -> Sequence[Outgoing]:
        call = self.engine.call_under_way()
        if call is None:
            return ()
        # A worker that is slow in many calls has no rule that hangs.
        time.sleep(SURE_S)
        found = self.engine.abandon(call, self._software)
        return () if found is None else [self._snapshot(*found)]

    # -- rounds ----------------------------------------------------------------------------

    def apply(self, records: Sequence[Record], tick: Tick) -> Sequence[Poison]:
        self._at_once = AT_ONCE
        self._times.round()
        poison: list[Poison] = []
        telemetry: list[Record] = []
        for record in records:
            # A state comes before the records that go on from it, whatever the order of reading.
            if record.partition.topic == self._topics.runs:
                self._views.apply(record)
            elif record.partition.topic == self._topics.telemetry:
                telemetry.append(record)
            elif not self.engine.has(record.partition.number, record.key.partition(b"/")[0]):
                self._saved.apply(record.partition.number, record)
        began_s = round_s = self._times.wall_s()
        for record in telemetry:
            number = record.partition.number
            run_id = record.key.decode(errors="replace")
            if self._saved.has(number, run_id):
                self._adopt_run(number, run_id, record.offset)
            if (stale := self.engine.stale_run(run_id, record)) is not None:
                self._drop_stale(number, stale)
            if self._customs is not None:
                self._customs.feed(record)
            try:
                self._reported += self.engine.apply(record, was_away=tick.was_away)
            except UnusableRecord as error:
                self._reported += error.reported
                poison.append(Poison(record, error.error))
            ended_s = self._times.wall_s()
            self._overload.spent((number, run_id), ended_s - began_s)
            began_s = ended_s
        reported, unusable = self._overload.catch_up(tick, began_s - round_s)
        self._reported += reported
        poison += unusable
        self._adopt_waiting()
        self._overload.carry_out(tick)
        for number, caught_up in tick.caught_up.items():
            if number in tick.owned:
                self._reported += self.engine.tick(
                    number, caught_up.as_of_ms, since_ms=caught_up.since_ms
                )
        if self._customs is not None:
            self._reported += self._customs.exchange(tick, self.engine)
        return poison

    def second_reading(self) -> SecondReading:
        return self._overload.second_reading()

    def read_again(self, again: ReadAgain) -> None:
        self._overload.read_again(again)

    def next_due_ms(self) -> int | None:
        due = self.engine.next_due_ms()
        custom = None if self._customs is None else self._customs.host.due_ms()
        return min((d for d in (due, custom) if d is not None), default=None)

    def wants_checkpoint(self) -> bool:
        if self._customs is not None and self._customs.wants_checkpoint():
            return True
        return any(run.urgent for _, _, run in self.engine.runs())

    def committable(self, partition: Partition, next_offset: int) -> int:
        if self._customs is None:
            return next_offset
        return self._customs.committable(partition.number, next_offset)

    @property
    def has_custom(self) -> bool:
        """Whether there are custom rules, in a process of their own."""
        return self._customs is not None

    def close(self) -> None:
        """End the process of the custom rules, if there is one. Blocks, 2 s at most."""
        if self._customs is not None:
            self._customs.host.close()

    def settled(self) -> bool:
        if self._waiting or not self._overload.settled():
            return False
        return self._customs is None or self._customs.host.settled()

    async def ended(self) -> None:
        await asyncio.to_thread(self.close)

    def outputs(self) -> Sequence[Outgoing]:
        reported, self._reported = self._reported, []
        for one in reported:
            if one.issue.use == RuleFailed.meta.name and one.issue.state == "firing":
                self._metrics.add(names.QUARANTINES, rule=one.issue.subject.name)
        looks = [
            self._detail_request(one.request, one.issue.at_ms)
            for one in reported
            if one.request is not None
        ]
        return [*(self._issue(one) for one in reported), *looks]

    def snapshots(self, *, force: bool) -> Sequence[Outgoing]:
        # Before the new states of the same runs.
        written = [gone for number, run in self._stale for gone in self._tombstones(number, run)]
        self._stale.clear()
        if self._customs is not None:
            if force:
                self._reported += self._customs.save(SAVE_S, self.engine)
            written += [self._snapshot(*one) for one in self._customs.hand_out()]
        for number, state, run in self.engine.runs():
            written += [self._view(number, e, e.offset, e.state.heard_ms) for e in run.earlier]
            run.earlier.clear()
            # One that is postponed may go on in what was not read yet.
            if run.expired and not run.state.postponed:
                written += self._tombstones(number, run)
                self._drop(number, run.state.run_id)
            elif run.dirty:
                saved = run.snapshots(
                    next_offset=state.next_offset,
                    clock_ms=state.clock_ms,
                    software=self._software,
                    changed=True,
                )
                written += [self._snapshot(number, snapshot) for snapshot in saved]
                written.append(self._view(number, run, state.next_offset, state.clock_ms))
                run.dirty, run.urgent = run.waits(state.next_offset), False
                self.engine.reschedule(number, run.state.run_id)
        self._saved.drop_outdated()
        self._accounts.publish()
        by_rule, by_kind, by_tier = self._times.drain()
        for rule, seconds in by_rule.items():
            self._metrics.add(names.RULE_SECONDS, seconds, rule=rule)
        for kind, rows in by_kind.items():
            self._metrics.add(names.ROWS, rows, kind=kind)
        for tier, summaries in by_tier.items():
            self._metrics.add(names.SHED, summaries, tier=str(tier))
        return [*written, *self._views.drop_outdated()]

    # -- records ---------------------------------------------------------------------------

    def _issue(self, reported: Reported) -> Outgoing:
        issue = reported.issue
        event = issue_event(issue, event_id=reported.event_id, time_ms=issue.at_ms)
        partition = Partition(self._topics.issues, issue_partition(issue.run_id))
        headers = meta_of(event, rank=issue.rank).headers()
        return Outgoing(partition, issue.run_id.encode(), event.encode(), headers)

    def _detail_request(self, request: DetailRequest, at_ms: int) -> Outgoing:
        event: Event[Data] = Event.wrap(
            request,
            id=f"{request.issue_id}/look_closer",
            source=f"/runs/{request.run_id}/rules/{request.rule}",
            time_ms=at_ms,
        )
        partition = Partition(self._topics.control, issue_partition(request.run_id))
        return Outgoing(partition, request.key.encode(), event.encode(), meta_of(event).headers())

    def _snapshot(self, number: int, snapshot: Snapshot) -> Outgoing:
        partition = Partition(self._topics.state, number)
        headers = meta_of(snapshot).headers()
        return Outgoing(partition, snapshot.key.encode(), snapshot.encode(), headers)

    def _tombstones(self, number: int, run: RunEngine) -> list[Outgoing]:
        partition = Partition(self._topics.state, number)
        run_id = run.state.run_id
        names = dict.fromkeys((*self._names, *run.saved_rules))
        gone = [Outgoing(partition, f"{run_id}/{name}".encode(), None) for name in names]
        if run.state.looked_ms is not None:
            control = Partition(self._topics.control, issue_partition(run_id))
            gone.append(Outgoing(control, detail_request_key(run_id).encode(), None))
        return gone

    def _view(
        self, number: int, run: RunEngine | Earlier, next_offset: int, clock_ms: int
    ) -> Outgoing:
        view = run_view(run, next_offset=next_offset)
        self._accounts.apply(number, view)
        if self._customs is not None:
            view = self._customs.on_view(number, view)
        event: Event[Data] = Event.wrap(
            view,
            id=f"{view.incarnation}/view/{next_offset}/{clock_ms}",
            source=f"/runs/{view.run_id}/rules",
            time_ms=clock_ms,
        )
        partition = Partition(self._topics.runs, number)
        return Outgoing(partition, view.run_id.encode(), event.encode(), meta_of(event).headers())


def _nobody() -> None:
    """Whom nobody has attached."""


def build_rules_service(
    topics: Topics,
    config: Config | None = None,
    *,
    catalogue: RuleCatalogue | None = None,
    folder: Path | None = None,
    limits: Limits | None = None,
    metrics: Metrics | None = None,
) -> RulesService:
    """The service for the rules of a configuration, or for all at their defaults.

    With custom rules their process is started: that blocks for half a second, and may for half a
    minute.

    Args:
        folder: where relative paths of custom rules start; None: the working folder.
        limits: of the process of the custom rules; None: the usual ones.
        metrics: where the time of runs is counted; None: nowhere.

    Raises:
        ConfigurationError: a rule or its parameters are wrong, or a custom rule cannot be loaded.
    """
    config = config or Config()
    software = f"tocsin {version('tocsin')}"
    defaults = config.defaults.rules
    specs = rule_specs(config.rules, defaults=defaults, catalogue=catalogue)
    customs = custom_entries(config.rules, catalogue)
    if not customs:
        return RulesService(topics, specs, software=software, metrics=metrics)
    failing = next((spec for spec in specs if spec.rule is RuleFailed), None)
    folder = folder or Path.cwd()
    host = CustomHost(customs, folder, failing=failing, software=software, limits=limits)
    loaded = host.start()
    if loaded.problems:
        host.close()
        raise ConfigurationError("; ".join(problem.message for problem in loaded.problems))
    specs = rule_specs(config.rules, defaults=defaults, catalogue=catalogue, customs=loaded.specs)
    return RulesService(topics, specs, software=software, customs=host, metrics=metrics)
