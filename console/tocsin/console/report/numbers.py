"""The numbers of a run, as sections want them: series or None, phases side by side, nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from tocsin.schemas.records.collections import Mode
from tocsin.schemas.records.events import Data, Event
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.records.runs import RunData
from tocsin.schemas.records.runs_fold import RunsView
from tocsin.store import Collection, Matrix, NotCaptured, Series, System
from tocsin.stream_rules.signals.gpus import memory_percent

Floats = npt.NDArray[np.float64]
Steps = npt.NDArray[np.int64]

PHASES: Final[Mapping[str, str]] = {
    "data_wait_s": "waiting for data",
    "forward_s": "forward",
    "backward_s": "backward",
    "optimizer_s": "optimizer",
    "checkpoint_s": "checkpoint",
    "evaluation_s": "evaluation",
}
"""Where the time of a step goes, by column; what is left of it is `REST`."""

REST: Final = "rest of the loop"

MAX_RANKS: Final = 64
"""Of more ranks than so many the first ones are read."""


class Source(Protocol):
    """What is read of a run: `tocsin.store.Run` has it. Its methods may block."""

    @property
    def run_id(self) -> str: ...
    @property
    def incarnation(self) -> str: ...
    @property
    def view(self) -> RunView | None: ...
    @property
    def runs_view(self) -> RunsView: ...
    def issues(self) -> Sequence[IssueFiring]: ...
    def events(self) -> Sequence[Event[Data]]: ...
    def ranks(self) -> Sequence[int]: ...
    def scalars(self, mode: Mode = "train") -> Sequence[str]: ...
    def series(self, name: str, mode: Mode = "train", rank: int = 0) -> Series: ...
    def collections(self) -> Mapping[str, Collection]: ...
    def matrix(
        self, collection: str, statistic: str, rank: int = 0, mode: Mode = "train"
    ) -> Matrix: ...
    def nodes(self) -> Sequence[str]: ...
    def system(self, node: str | None = None) -> System: ...


@dataclass(frozen=True, slots=True, eq=False)
class StepTimes:
    """Steps of one rank and where their time went, without the first step.

    Attributes:
        steps: int64[n].
        at_us: int64[n], the end of each step (Unix, microseconds).
        total_s: float64[n].
        parts: by name, float64[n] each, in seconds; those that never took time are left out. With
            `REST` they add up to the total.
    """

    steps: Steps
    at_us: Steps
    total_s: Floats
    parts: Mapping[str, Floats]

    @property
    def own_s(self) -> Floats:
        """The time of each step without evaluations, which are between two steps."""
        evaluation = self.parts.get("evaluation")
        return self.total_s if evaluation is None else np.maximum(self.total_s - evaluation, 0)


@dataclass(frozen=True, slots=True, eq=False)
class Gpu:
    """One GPU of a node; columns float64[samples]."""

    number: int
    node: Node

    @property
    def name(self) -> str:
        """`gpu 0 of node-17`."""
        return f"gpu {self.number} of {self.node.name}"

    def column(self, what: str) -> Floats | None:
        """`gpu.N.WHAT`; None: not sampled."""
        return self.node.column(f"gpu.{self.number}.{what}")

    def memory_percent(self) -> Floats | None:
        """How much of its memory is in use; None: not sampled."""
        return memory_percent(self.column)

    @property
    def is_jobs(self) -> bool:
        """Whether it is the job's, or nobody knows."""
        of_job = self.column("of_job")
        return of_job is None or bool(np.nanmax(of_job, initial=0) > 0)


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """Samples of one node; `seconds` float64[samples] count from the first sample of any node."""

    system: System
    start_us: int

    @property
    def name(self) -> str:
        return self.system.node

    @property
    def seconds(self) -> Floats:
        """When each sample was made."""
        return (self.system.at_us - self.start_us) / 1e6

    def column(self, name: str) -> Floats | None:
        """One quantity, float64[samples]; None: never sampled."""
        if name not in self.system.columns:
            return None
        values: Floats = self.system.values[:, self.system.columns.index(name)]
        return values if np.isfinite(values).any() else None

    def numbered(self, before: str, after: str) -> list[int]:
        """The N of the columns `BEFORE.N.AFTER`, ascending."""
        found = set()
        for column in self.system.columns:
            first, _, rest = column.partition(".")
            number, _, what = rest.partition(".")
            if first == before and what == after and number.isdigit():
                found.add(int(number))
        return sorted(found)

    def gpus(self) -> list[Gpu]:
        """The GPUs whose utilisation was sampled: those of the job, where that is known."""
        every = [Gpu(n, self) for n in self.numbered("gpu", "utilization_percent")]
        return [gpu for gpu in every if gpu.is_jobs] or every


@dataclass(slots=True)
class RunNumbers:
    """Reads a run once, and keeps what was read. Its methods may block."""

    run: Source
    _series: dict[tuple[str, str, int], Series | None] = field(default_factory=dict)
    _step_times: dict[int, StepTimes | None] = field(default_factory=dict)
    _nodes: list[Node] | None = None

    def series(self, name: str, mode: Mode = "train", rank: int | None = None) -> Series | None:
        """One scalar over the steps, of the first rank by default, one value for each step; None:
        not captured."""
        number = self.first_rank if rank is None else rank
        key = (name, mode, number)
        if key not in self._series:
            try:
                found = self.run.series(name, mode, number)
            except NotCaptured:
                self._series[key] = None
            else:
                self._series[key] = _last_of_each_step(found) if mode == "train" else found
        return self._series[key]

    @property
    def first_rank(self) -> int:
        """The rank whose numbers stand for the run."""
        return min(self.run.ranks(), default=0)

    def ranks(self) -> Sequence[int]:
        """The ranks with numbers, `MAX_RANKS` at most."""
        return list(self.run.ranks())[:MAX_RANKS]

    def step_times(self, rank: int | None = None) -> StepTimes | None:
        """Where the time of the steps went; None: no step was timed."""
        number = self.first_rank if rank is None else rank
        if number not in self._step_times:
            self._step_times[number] = self._read_step_times(number)
        return self._step_times[number]

    def first_step(self) -> int:
        """The step at which the numbers of the first rank begin; 0 if it has none."""
        found = [self.series(name) for name in ("step_time_s", "loss")]
        return min((int(one.steps[0]) for one in found if one and one.steps.size), default=0)

    def nodes(self) -> Sequence[Node]:
        """The nodes that were sampled."""
        if self._nodes is None:
            found = [self.run.system(name) for name in self.run.nodes()]
            start = min((int(one.at_us[0]) for one in found if one.at_us.size), default=0)
            self._nodes = [Node(one, start) for one in found if one.at_us.size]
        return self._nodes

    def gpus(self) -> list[Gpu]:
        """The GPUs of all nodes."""
        return [gpu for node in self.nodes() for gpu in node.gpus()]

    def matrix(self, collection: str, statistic: str, mode: Mode = "train") -> Matrix | None:
        """One statistic of all tensors of a collection; None: not captured."""
        try:
            found = self.run.matrix(collection, statistic, self.first_rank, mode)
        except NotCaptured:
            return None
        return found

    def events(self) -> Iterator[RunData]:
        """The events of this incarnation, in order."""
        for event in self.run.events():
            data = event.data
            if isinstance(data, RunData) and data.incarnation == self.run.incarnation:
                yield data

    def issues(self) -> Sequence[IssueFiring]:
        """The issues of this incarnation, in order of occurrence."""
        return [one for one in self.run.issues() if one.incarnation == self.run.incarnation]

    def found_by(self, *rules: str) -> list[IssueFiring]:
        """The issues of these rules of the catalogue."""
        return [issue for issue in self.issues() if issue.use in rules]

    def _read_step_times(self, rank: int) -> StepTimes | None:
        total = self.series("step_time_s", rank=rank)
        if total is None:
            return None
        known = np.flatnonzero(np.isfinite(total.values))
        if known.size > 1:
            # The first step waits for what is made once: kernels, workers, buffers.
            known = known[1:]
        steps, own = total.steps[known], total.values[known]
        if not steps.size:
            return None
        parts: dict[str, Floats] = {}
        for column, name in PHASES.items():
            part = self.series(column, rank=rank)
            if part is not None:
                values = _at(steps, part)
                if (values > 0).any():
                    parts[name] = values
        if parts:
            rest = own - np.sum(list(parts.values()), axis=0)
            parts[REST] = np.maximum(rest, 0)
        return StepTimes(steps, total.at_us[known], own, parts)


def _at(steps: Steps, series: Series) -> Floats:
    """Its values at these steps, 0 where it has none, or one that is not finite."""
    found = np.zeros(steps.size)
    places = np.searchsorted(series.steps, steps)
    inside = places < series.steps.size
    inside[inside] = series.steps[places[inside]] == steps[inside]
    found[inside] = np.nan_to_num(series.values[places[inside]], posinf=0, neginf=0)
    return np.maximum(found, 0)


def _last_of_each_step(series: Series) -> Series:
    steps = series.steps
    if steps.size < 2 or bool((np.diff(steps) > 0).all()):
        return series
    last = np.append(np.diff(steps) > 0, True)
    return Series(steps[last], series.values[last], series.at_us[last], series.name, series.unit)
