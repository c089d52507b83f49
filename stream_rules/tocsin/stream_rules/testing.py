"""For authors of rules: made and recorded runs, and what rules find in them.

run = RunBuilder()
run.started()
run.steps(range(100), loss=2.0)
run.steps([100], loss=float("nan"))
assert_fires(run.records, "nonfinite", first_step=100)
assert_fires(load_records("bad-run.gz"), "my_rule", specs=only(MyRule, limit=2.0))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from tocsin.bus.port import Partition, Record
from tocsin.runtime.testing import FakeClock as FakeClock
from tocsin.schemas.records.checkpoints import Checkpoint, CheckpointWritten
from tocsin.schemas.records.events import Data, Event
from tocsin.schemas.records.frames import (
    COUNT_COLUMNS,
    STATISTIC_COLUMNS,
    Frame,
    Mode,
    RecordOrigin,
    StepFrame,
    SystemFrame,
    TensorFrame,
)
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.program_facts import LossInputsSeen
from tocsin.schemas.records.runs import (
    Heartbeat,
    Outcome,
    PhaseMark,
    Role,
    RunEnded,
    RunStarted,
)
from tocsin.schemas.records.wire import meta_of
from tocsin.schemas.topics import Topics, telemetry_partition
from tocsin.stream_rules.catalogue import RuleCatalogue, built_in
from tocsin.stream_rules.engine.configured_rules import RuleSpec, rule_specs
from tocsin.stream_rules.engine.replay import replay
from tocsin.stream_rules.reading.recordings import load_records as load_records
from tocsin.stream_rules.reading.recordings import records_of_run as records_of_run
from tocsin.stream_rules.reading.recordings import save_records as save_records
from tocsin.stream_rules.rule import AnyRule

START_MS: Final = 1_800_000_000_000
"""When a made run begins (Unix, milliseconds)."""

Numbers = float | Sequence[float] | npt.NDArray[np.floating]


class RunBuilder:
    """Builds the records of one run, for tests of rules.

    Args:
        step_ms: duration of a step, milliseconds.

    Attributes:
        records: the records so far.
        now_ms: append time of the next record, Unix milliseconds.
    """

    def __init__(
        self,
        run_id: str = "made",
        *,
        incarnation: str = "made-1",
        world_size: int = 1,
        step_ms: int = 100,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self.run_id = run_id
        self.incarnation = incarnation
        self.world_size = world_size
        self.step_ms = step_ms
        self.labels = dict(labels or {})
        self.now_ms = START_MS
        self.records: list[Record] = []
        self._partition = Partition(Topics().telemetry, telemetry_partition(run_id))
        self._sequences: dict[str, int] = {}
        self.boot = "boot"

    def origin(self, rank: int = 0) -> RecordOrigin:
        """The sender, as frames name it."""
        return RecordOrigin(
            run_id=self.run_id,
            incarnation=self.incarnation,
            rank=rank,
            world_size=self.world_size,
        )

    def add(self, value: Frame | Event[Data], *, rank: int = 0, boot: str | None = None) -> Record:
        """Append a frame or an event as a record, and return the record."""
        boot = boot or f"{self.boot}-{rank}"
        seq = self._sequences.get(boot, -1) + 1
        self._sequences[boot] = seq
        record = Record(
            self._partition,
            len(self.records),
            self.now_ms,
            self.run_id.encode(),
            value.encode(),
            meta_of(value, rank=rank, boot=boot, seq=seq).headers(),
        )
        self.records.append(record)
        return record

    def lose(self, rank: int = 0, records: int = 1) -> None:
        """Lose the next records of a rank, as a broken connection does."""
        boot = f"{self.boot}-{rank}"
        self._sequences[boot] = self._sequences.get(boot, -1) + records

    def again(self, record: Record) -> None:
        """Append a record a second time, as after a repeated send."""
        self.records.append(
            Record(
                record.partition,
                len(self.records),
                self.now_ms,
                record.key,
                record.value,
                record.headers,
            )
        )

    def wait(self, seconds: float) -> None:
        """Advance the clock."""
        self.now_ms += round(1000 * seconds)

    # -- numbers ---------------------------------------------------------------------------

    def steps(
        self,
        steps: Iterable[int],
        *,
        rank: int = 0,
        mode: Mode = "train",
        per_frame: int = 1,
        columns: Mapping[str, Numbers] | None = None,
        **scalars: Numbers,
    ) -> None:
        """Append step scalars: one value for all steps, or one for each.

        Names that are no Python names (`lr.0`, `log.reward`) go into `columns`.
        """
        listed = list(steps)
        table = {
            name: np.broadcast_to(np.asarray(value, np.float64), (len(listed),))
            for name, value in {**scalars, **(columns or {})}.items()
        }
        for i in range(0, len(listed), per_frame):
            part = slice(i, i + per_frame)
            rows = len(listed[part])
            self.now_ms += self.step_ms * rows if mode == "train" else 0
            values = np.column_stack([column[part] for column in table.values()])
            self.add(
                StepFrame(
                    origin=self.origin(rank),
                    mode=mode,
                    steps=np.asarray(listed[part], np.uint64),
                    at_us=np.full(rows, self.now_ms * 1000, np.uint64),
                    columns=tuple(table),
                    values=values.astype(np.float32),
                ),
                rank=rank,
            )

    def tensors(
        self,
        step: int,
        collection: str,
        rows: Sequence[str],
        *,
        rank: int = 0,
        mode: Mode = "train",
        nans: Mapping[str, int] | None = None,
        infs: Mapping[str, int] | None = None,
        columns: Mapping[str, Numbers] | None = None,
    ) -> None:
        """Append summaries; `nans` and `infs` by row, statistics 1 unless in `columns`.

        `columns` may have others than the usual ones: `update_l2`, `dead`.
        """
        own = tuple(name for name in columns or () if name not in STATISTIC_COLUMNS)
        names = STATISTIC_COLUMNS + own
        values = np.ones((len(rows), len(names)), np.float32)
        for name, column in (columns or {}).items():
            values[:, names.index(name)] = column
        counts = np.zeros((len(rows), len(COUNT_COLUMNS)), np.uint64)
        counts[:, COUNT_COLUMNS.index("numel")] = 100
        for name, bad in (("nans", nans), ("infs", infs)):
            for row, count in (bad or {}).items():
                counts[list(rows).index(row), COUNT_COLUMNS.index(name)] = count
        self.add(
            TensorFrame(
                origin=self.origin(rank),
                step=step,
                collection=collection,
                rows=tuple(rows),
                columns=names,
                values=values,
                count_columns=COUNT_COLUMNS,
                counts=counts,
                at_us=self.now_ms * 1000,
                mode=mode,
            ),
            rank=rank,
        )

    def system(
        self, columns: Mapping[str, Numbers], *, node: str = "node", every_s: float = 0.0
    ) -> None:
        """Append system samples, `every_s` seconds apart; that time passes."""
        table = [np.atleast_1d(np.asarray(column, np.float64)) for column in columns.values()]
        self.add(
            SystemFrame(
                origin=self.origin(),
                node=node,
                at_us=self.now_ms * 1000
                + (np.arange(len(table[0])) * every_s * 1e6).astype(np.uint64),
                columns=tuple(columns),
                values=np.column_stack(table),
            ),
            boot=f"{self.boot}-launcher",
        )
        self.wait(every_s * len(table[0]))

    # -- events ----------------------------------------------------------------------------

    def event(self, data: Data, *, rank: int = 0, role: Role = "trainer") -> None:
        """Append an event."""
        boot = f"{self.boot}-{'launcher' if role == 'launcher' else rank}"
        seq = self._sequences.get(boot, -1) + 1
        source = f"/runs/{self.run_id}/ranks/{rank}"
        self.add(
            Event.wrap(data, id=f"{boot}/{seq}", source=source, time_ms=self.now_ms),
            rank=rank,
            boot=boot,
        )

    def started(
        self,
        *,
        rank: int = 0,
        role: Role = "trainer",
        optimizers: int = 1,
        environment: bool = False,
        node: str = "",
    ) -> None:
        """Append the start of a rank on a node, or of the launcher."""
        self.event(
            RunStarted(
                run_id=self.run_id,
                incarnation=self.incarnation,
                rank=rank,
                world_size=self.world_size,
                role=role,
                job_id="job",
                labels=self.labels,
                optimizers=optimizers,
                collections=("gradients", "weights"),
                environment=environment,
                node=node,
            ),
            rank=rank,
            role=role,
        )

    def loss_inputs(self, classes: int, *, function: str = "cross_entropy", step: int = 1) -> None:
        """Append the event that names the loss function and its number of classes."""
        self.event(
            LossInputsSeen(
                run_id=self.run_id,
                incarnation=self.incarnation,
                function=function,
                step=step,
                rows=64,
                classes=classes,
                minimum=-1.0,
                maximum=1.0,
            )
        )

    def heartbeat(
        self,
        *,
        rank: int = 0,
        role: Role = "trainer",
        last_step: int | None = None,
        busy: str | None = None,
        forward_calls: int = 0,
    ) -> None:
        """Append a heartbeat of a rank, or of the launcher."""
        self.event(
            Heartbeat(
                run_id=self.run_id,
                incarnation=self.incarnation,
                rank=rank,
                world_size=self.world_size,
                role=role,
                last_step=last_step,
                busy=busy,
                forward_calls=forward_calls,
            ),
            rank=rank,
            role=role,
        )

    def phase(self, name: str, edge: str, *, rank: int = 0) -> None:
        """Append the start or the end of a phase."""
        self.event(
            PhaseMark.model_validate(
                {
                    "run_id": self.run_id,
                    "incarnation": self.incarnation,
                    "rank": rank,
                    "name": name,
                    "edge": edge,
                }
            ),
            rank=rank,
        )

    def checkpoint(self, step: int, *, path: str = "", finite: bool | None = True) -> None:
        """Append a checkpoint."""
        written = Checkpoint(path=path or f"step-{step}.pt", step=step, finite=finite)
        self.event(
            CheckpointWritten(run_id=self.run_id, incarnation=self.incarnation, checkpoint=written)
        )

    def ended(
        self, *, rank: int = 0, role: Role = "trainer", outcome: Outcome = "completed"
    ) -> None:
        """Append the end of a rank, or of the job."""
        self.event(
            RunEnded(
                run_id=self.run_id,
                incarnation=self.incarnation,
                rank=rank,
                world_size=self.world_size,
                role=role,
                outcome=outcome,
                exit_code=0 if role == "launcher" else None,
            ),
            rank=rank,
            role=role,
        )


def only(
    rule: str | type[AnyRule], *, catalogue: RuleCatalogue | None = None, **params: object
) -> tuple[RuleSpec, ...]:
    """One instance of a single rule, given by class or name, with these parameters."""
    found = (catalogue or built_in()).get(rule) if isinstance(rule, str) else rule
    name = found.meta.name
    return (RuleSpec(name=name, rule=found, params=found.meta.params.model_validate(params)),)


def issues_of(
    records: Iterable[Record],
    rule: str | None = None,
    *,
    specs: Sequence[RuleSpec] | None = None,
    until_ms: int | None = None,
) -> list[IssueFiring]:
    """The issues that the rules report for the records, in order and in all states."""
    reported = replay(records, rule_specs() if specs is None else specs, until_ms=until_ms)
    return [one.issue for one in reported if rule is None or one.issue.rule == rule]


def assert_fires(
    records: Iterable[Record],
    rule: str,
    *,
    first_step: int | None = None,
    specs: Sequence[RuleSpec] | None = None,
    until_ms: int | None = None,
) -> IssueFiring:
    """The one issue that a rule fires. Raises AssertionError for none, several, or another step."""
    issues = issues_of(records, rule, specs=specs, until_ms=until_ms)
    firing = [issue for issue in issues if issue.state == "firing"]
    if len(firing) != 1:
        raise AssertionError(f"{rule} fired {len(firing)} times: {[i.reason for i in firing]}")
    if first_step is not None and firing[0].first_step != first_step:
        raise AssertionError(
            f"{rule} says that it began at step {firing[0].first_step}, expected {first_step}"
        )
    return firing[0]


def assert_quiet(
    records: Iterable[Record],
    *,
    specs: Sequence[RuleSpec] | None = None,
    until_ms: int | None = None,
) -> None:
    """Raise AssertionError if a rule reports anything above `info`."""
    issues = issues_of(records, specs=specs, until_ms=until_ms)
    loud = [f"{i.rule}: {i.reason}" for i in issues if i.severity != "info"]
    if loud:
        raise AssertionError("expected silence, got:\n" + "\n".join(loud))
