"""The engine of the child process: the custom rules, behind their guard, over what it is given."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Final

from tocsin.bus.port import Record
from tocsin.schemas.ids import issue_id
from tocsin.schemas.records.snapshots import Snapshot
from tocsin.stream_rules.custom.call_guard import Guard, GuardedSpec, OutOfMemory
from tocsin.stream_rules.custom.current_call import Marker
from tocsin.stream_rules.custom.description import description, stand_ins
from tocsin.stream_rules.custom.loading import load_specs
from tocsin.stream_rules.custom.protocol import (
    CUSTOM_KEY,
    Adopt,
    Advance,
    Answer,
    DisabledRule,
    Drop,
    Forget,
    Hello,
    LoadedRules,
    Message,
    Records,
    Save,
    Saved,
    SavedRun,
)
from tocsin.stream_rules.engine.episodes import Reported
from tocsin.stream_rules.engine.partitions import PartitionEngine, UnusableRecord
from tocsin.stream_rules.engine.rule_spec import RuleSpec
from tocsin.stream_rules.engine.run import RUN_KEY, RunEngine
from tocsin.stream_rules.rules.about_rules.rule_failed import RuleFailed, RuleFailedParams

logger = logging.getLogger(__name__)

_ANSWER_S: Final = 0.1
"""A batch that takes longer is answered in between."""


class ChildEngine:
    """The rules at work. `loaded` is what came of loading.

    Args:
        send: sends a message to the worker; blocks until it has taken it.
    """

    def __init__(self, hello: Hello, marker: Marker, send: Callable[[Message], None]) -> None:
        self._hello = hello
        self._send = send
        self._names = frozenset(entry.name for entry in hello.entries)
        specs, why = self._load(marker)
        disabled = [DisabledRule(rule=name, run_id=None, why=text) for name, text in why.items()]
        self._guard = Guard(marker, [*hello.disabled, *disabled], hello.memory_bytes)
        guarded: list[RuleSpec] = [
            GuardedSpec(
                **{field.name: getattr(spec, field.name) for field in fields(spec)},
                guard=self._guard,
            )
            for spec in specs
        ]
        if hello.failing is not None:
            name, severity = hello.failing
            failing = RuleSpec(
                name=name, rule=RuleFailed, params=RuleFailedParams(), severity=severity
            )
            guarded.append(failing)
        self._engine = PartitionEngine(guarded)
        self._positions: dict[int, int] = {}
        self._reported: list[Reported] = []
        self._answered_s = time.monotonic()
        self._done = 0

    def _load(self, marker: Marker) -> tuple[Sequence[RuleSpec], Mapping[str, str]]:
        """The specs, and why some of them must not run: an earlier child could load them."""
        hello = self._hello
        entries = [
            entry.model_copy(update={"loc": (number,)})
            for number, entry in enumerate(hello.entries)
        ]
        specs = stand_ins(entries, hello.described)
        if hello.unloaded:
            self.loaded = LoadedRules(described=hello.described)
            return list(specs.values()), dict.fromkeys(self._names, hello.unloaded)
        found = load_specs(
            entries, folder=Path(hello.folder), used_names=hello.taken, marked=marker.loading
        )
        specs |= found.specs
        self.loaded = LoadedRules(
            described={name: description(spec.rule.meta) for name, spec in specs.items()},
            problems=tuple(found.problems),
        )
        why: dict[str, str] = {}
        for problem in found.problems:
            name = entries[int(problem.loc[0])].name
            why[name] = "; ".join(filter(None, (why.get(name), problem.message)))
        return list(specs.values()), why

    # -- messages --------------------------------------------------------------------------

    def apply(self, order: Message) -> None:
        """Deal with one message, and answer: at its end, and in between if that takes long.

        Raises:
            OutOfMemory: there is no going on.
        """
        save = isinstance(order, Save)
        if isinstance(order, Records):
            for record in order.records:
                self._apply(record)
                if time.monotonic() - self._answered_s > _ANSWER_S:
                    self._send(self._answer())
        elif isinstance(order, Advance):
            self._guard.at("", order.partition, self._positions.get(order.partition, 0) - 1)
            self._reported += self._engine.tick(
                order.partition, order.as_of_ms, since_ms=order.since_ms
            )
        elif isinstance(order, Adopt):
            self._adopt(order)
        elif isinstance(order, Forget):
            self._engine.release(order.partitions)
            for number in order.partitions:
                self._positions.pop(number, None)
        elif isinstance(order, Drop) and self._engine.has(order.partition, order.run_id.encode()):
            self._engine.drop(order.partition, order.run_id)
        self._done += 1
        self._send(self._answer(save=save or self._urgent()))

    def _apply(self, record: Record) -> None:
        number = record.partition.number
        self._guard.at(record.key.decode(errors="replace"), number, record.offset)
        self._positions[number] = record.offset + 1
        try:
            self._reported += self._engine.apply(record)
        except UnusableRecord as error:
            self._reported += error.reported
            if isinstance(error.error.__cause__, MemoryError) or isinstance(
                error.__cause__, MemoryError
            ):
                raise OutOfMemory(self._guard.culprit()) from error
            # The worker has read it too, and puts it among the dead letters.
            logger.debug("record passed over", extra={"action": "rules", "reason": str(error)})

    def _adopt(self, order: Adopt) -> None:
        snapshots = {
            RUN_KEY if snapshot.rule == CUSTOM_KEY else snapshot.rule: snapshot
            for snapshot in order.snapshots
        }
        self._guard.at(order.run_id, order.partition, -1)
        run = self._engine.adopt(
            order.partition, order.run_id, snapshots, next_offset=order.next_offset
        )
        if order.begin_now:
            run.unsaved_begin_now()
        known = self._positions.get(order.partition, 0)
        self._positions[order.partition] = max(known, order.next_offset)

    def _urgent(self) -> bool:
        return any(run.urgent for _, _, run in self._engine.runs())

    def _answer(self, *, save: bool = False) -> Answer:
        done, self._done = self._done, 0
        saved = self._save() if save else None
        reported, self._reported = [_one_failure(one) for one in self._reported], []
        self._answered_s = time.monotonic()
        return Answer(
            done=done,
            told=tuple(
                (one.issue.state, one.number, one.issue.model_dump_json()) for one in reported
            ),
            used=self._guard.used(),
            due_ms=self._engine.next_due_ms(),
            saved=saved,
        )

    def _save(self) -> Saved:
        runs: list[SavedRun] = []
        urgent = False
        for number, state, run in self._engine.runs():
            run.earlier.clear()
            if run.expired:
                self._engine.drop(number, run.state.run_id)
                continue
            if not run.dirty:
                continue
            urgent |= run.urgent
            self._guard.at(run.state.run_id, number, self._positions.get(number, 0) - 1)
            taken = tuple(
                _own(snapshot)
                for snapshot in run.snapshots(
                    next_offset=state.next_offset,
                    clock_ms=state.clock_ms,
                    software=self._hello.software,
                )
                if snapshot.rule in self._names or snapshot.rule == RUN_KEY
            )
            runs.append(self._saved(number, run, taken))
            run.dirty = run.urgent = False
            self._engine.reschedule(number, run.state.run_id)
        return Saved(covers=dict(self._positions), runs=tuple(runs), urgent=urgent)

    def _saved(self, number: int, run: RunEngine, snapshots: tuple[Snapshot, ...]) -> SavedRun:
        state = run.state
        mine = [each for each in run.instances if each.spec.name in self._names]
        stopped = state.outcome in ("stopped", "interrupted")
        return SavedRun(
            partition=number,
            run_id=state.run_id,
            incarnation=state.incarnation,
            statuses={
                each.spec.name: each.status(ended=state.ended, stopped=stopped)
                for each in mine
                if each.spec.fits(state.labels)
            },
            over=state.ended or state.lost,
            found=sum(each.found for each in mine),
            failed=tuple(each.spec.name for each in mine if each.failed),
            snapshots=snapshots,
        )


def _own(snapshot: Snapshot) -> Snapshot:
    """The run's own state under the key of this process, beside the worker's."""
    if snapshot.rule != RUN_KEY:
        return snapshot
    return Snapshot(**{**asdict(snapshot), "rule": CUSTOM_KEY})


def _one_failure(reported: Reported) -> Reported:
    """An id that does not depend on the record at which a rule fails: that of one that is slow is
    another in each attempt, and a rule fails but once in a training."""
    issue = reported.issue
    if issue.use != RuleFailed.meta.name:
        return reported
    own = issue_id(
        issue.run_id, issue.incarnation, issue.rule, issue.rule_version, issue.subject.name
    )
    return replace(reported, issue=issue.model_copy(update={"issue_id": own}))
