"""`dataloader`: the training waits for its next batch, or the loader's settings do not fit the
machine.

- starvation: the wait for the next batch takes more than `share` percent of the step time, and 5 ms
  or more, in the last `for_steps` steps after the first ones. Workers deliver in rounds, and the
  first batch of an epoch takes longer; so steps are grouped by the number of workers, and the
  median of the groups decides. On a GPU the training thread may wait while the GPU has work: only
  the share of the step without GPU work counts. It is a warning if a GPU has to wait, or if more
  than four fifths of the time are lost, and a batch takes at least 8 ms plus 40 µs per sample; if
  more than half of the time is lost, at least 8 ms plus 60 µs per sample. Anything less is an info,
  and so are tensors in memory (a TensorDataset) on a CPU. An unknown batch size counts as 1,024
  samples.
- workers: the worker processes of the node's ranks together are more than `max_threshold` percent
  of its cores; with `few`, also fewer than `min_threshold` percent of them. A rank that may use
  some of the node's cores only has its own workers compared with those. An info. If the training
  starves, the remedy asks for more.
- pin_memory: the model is on a GPU, and batches are copied there from memory that is not pinned. An
  info: this is correct if the data set is already on the GPU.

The limits of the workers and the alias come from SageMaker Debugger, which reports few workers even
if nothing waits; most healthy trainings would have that issue. Above a fifth of the time, a better
loader is worth the work. The limits of a warning come from 700 healthy trainings of the
repository's fixtures: small models on a CPU wait for tensors in memory for up to 83 % of their
time, 4 to 23 µs per sample (medians of 30 steps), and up to 64 µs on a machine with five times as
many busy threads as cores.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from pydantic import Field

from tocsin.schemas.records.frames import StepFrame, SystemFrame
from tocsin.schemas.records.issues import Fact, Series, Subject
from tocsin.schemas.records.runs import DataLoaderSeen, RunData, RunStarted
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.reading.rank_series import SERIES_POINTS, RankSeries, StoredRankSeries
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, event, scalar, system

_DEVICE: Final = ("forward_device_s", "backward_device_s", "optimizer_device_s")
_NODE_CORES: Final = "cpu.cores"
_FIRST: Final = 3
"""Steps that are left out: workers start, kernels are chosen."""

_MIN_S: Final = 0.005
_GRAVE_S: Final = 0.008
_GRAVE_SAMPLE_S: Final = 40e-6
_HALF_SAMPLE_S: Final = 60e-6
_IN_MEMORY: Final = "TensorDataset"
_HALF: Final = 50.0
_MAIN_PERCENT: Final = 80.0
_UNKNOWN_BATCH: Final = 1024
_MAX_GROUP: Final = 16
_GROUPS: Final = 4
_TIMED: Final = 20
_ADVICE_STEPS: Final = 100
_OVER: Final = 0.8


class DataloaderParams(Params):
    """Parameters of `dataloader`."""

    share: float = Field(default=20.0, gt=0, lt=100)
    """Share of the step time spent waiting for the next batch. Unit: percent."""
    for_steps: int = Field(default=20, ge=5, le=10_000)
    """Minimum number of steps that are checked. Unit: steps."""
    min_threshold: float = Field(default=70.0, ge=0)
    """Fewer workers are too few. Unit: percent of the cores."""
    max_threshold: float = Field(default=200.0, gt=0)
    """More workers are too many. Unit: percent of the cores."""
    few: bool = False
    """Whether to report too few workers although nothing waits for them."""


@dataclass(slots=True)
class _Loader:
    workers: int
    pin_memory: bool
    prefetch: int | None
    cores: int | None
    dataset: str
    batch_size: int | None
    gpu: bool


@dataclass(slots=True)
class _State:
    rank_series: StoredRankSeries = field(default_factory=RankSeries)
    loader: _Loader | None = None
    node_of: dict[int, str] = field(default_factory=dict)
    cores_of: dict[str, float] = field(default_factory=dict)
    seen: int = 0
    steps: list[int] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    time_at: dict[int, float] = field(default_factory=dict)
    at_work: list[float] = field(default_factory=list)
    starving: bool = False
    said: list[str] = field(default_factory=list)


class Dataloader(Rule[DataloaderParams, _State]):
    """One episode for each branch, based on the lowest rank."""

    meta = RuleMeta(
        name="dataloader",
        version=1,
        family="system",
        meaning="The training waits for its data, or its loader does not fit the machine.",
        severity="warning",
        available="maybe",
        inputs=(
            scalar("data_wait_s"),
            scalar("step_time_s", optional=True),
            *(scalar(name, optional=True) for name in _DEVICE),
            event(DataLoaderSeen, optional=True),
            event(RunStarted, optional=True),
            system(_NODE_CORES, optional=True),
        ),
        capture_hint="the wait is captured when batches come from a torch.utils.data.DataLoader",
        remedy="Give the DataLoader num_workers and persistent_workers=True, prepare samples once "
        "instead of each time, store many in one file, and keep the data on a local disk.",
        alias="Dataloader",
        params=DataloaderParams,
        presets={
            "sagemaker": {
                "min_threshold": 70.0,
                "max_threshold": 200.0,
                "few": True,
            }
        },
        branches={
            "starvation": "the training waits for its next batch",
            "workers": "too many worker processes, or too few (info)",
            "pin_memory": "batches are copied to the GPU from unpinned memory (info)",
        },
        does_not_see="Data from anything but PyTorch's DataLoader, and the loaders of higher "
        "ranks; straggler_rank sees their wait.",
        resolve_after_steps=0,
    )
    state_type = _State

    def on_event(self, data: RunData, at: Moment) -> Outcomes:
        state = self.state
        if isinstance(data, RunStarted) and data.role == "trainer":
            state.node_of[data.rank] = data.node
        elif (
            isinstance(data, DataLoaderSeen)
            and data.mode == "train"
            and (state.rank_series.rank is None or data.rank <= state.rank_series.rank)
        ):
            state.loader = _Loader(
                data.workers,
                data.pin_memory,
                data.prefetch_factor,
                data.cores,
                data.dataset,
                data.batch_size,
                data.gpu,
            )
        return ()

    def on_system(self, frame: SystemFrame, at: Moment) -> Outcomes:
        cores = frame.column(_NODE_CORES)
        if cores is not None and len(cores) and cores[-1] > 0:
            self.state.cores_of[frame.node] = float(cores[-1])
        return ()

    def on_steps(self, frame: StepFrame, at: Moment) -> Outcomes:
        state = self.state
        if state.rank_series.overtaken_by(frame):
            loader, advised = state.loader, state.said
            state = self.state = _State(
                rank_series=state.rank_series,
                loader=loader,
                node_of=state.node_of,
                cores_of=state.cores_of,
                starving=state.starving,
                said=advised,
            )
        if not state.rank_series.accepts(frame):
            return
        self._time_on_device(frame)
        waits, times = frame.column("data_wait_s"), frame.column("step_time_s")
        if waits is None or times is None:
            return
        long = False
        for step, wait, time in zip(
            frame.steps.tolist(), waits.tolist(), times.tolist(), strict=True
        ):
            if not (wait >= 0 and 0 < time < float("inf")) or not state.rank_series.add(step, wait):
                continue
            state.seen += 1
            if state.seen > _FIRST:
                state.steps.append(step)
                state.waits.append(min(wait, time))
                state.times.append(time)
                state.time_at[step] = time
                long |= 100 * wait > self.params.share * time
        self._reset()
        # A step that waits for little begins no starvation.
        if long or state.starving:
            yield from self._evaluate(state.rank_series.last_step)
        if state.seen > _FIRST:
            yield from self._advise(state.rank_series.last_step)

    def _time_on_device(self, frame: StepFrame) -> None:
        """What the GPU itself worked, each tenth step; it comes some steps later."""
        columns = [c for name in _DEVICE if (c := frame.column(name)) is not None]
        if not columns:
            return
        sums = np.sum(columns, axis=0).tolist()
        for step, worked in zip(frame.steps.tolist(), sums, strict=True):
            time = self.state.time_at.get(step)
            if time is not None and worked >= 0:
                self.state.at_work = [*self.state.at_work, min(1.0, worked / time)][-_TIMED:]

    def _reset(self) -> None:
        state = self.state
        if len(state.steps) > 2 * self._window():
            most = max(self._window(), SERIES_POINTS)
            del state.steps[:-most], state.waits[:-most], state.times[:-most]
            state.time_at = dict(zip(state.steps, state.times, strict=True))

    def _group(self) -> int:
        loader = self.state.loader
        return 1 if loader is None else min(max(1, loader.workers), _MAX_GROUP)

    def _window(self) -> int:
        return max(self.params.for_steps, _GROUPS * self._group())

    def _evaluate(self, step: int) -> Outcomes:
        state, params = self.state, self.params
        group, window = self._group(), self._window()
        if len(state.steps) >= window:
            size = window // group * group
            waits = np.array(state.waits[-size:]).reshape(-1, group).sum(1)
            times = np.array(state.times[-size:]).reshape(-1, group).sum(1)
            share = 100 * float(np.median(waits / times))
            wait_s = float(np.median(waits)) / group
            on_gpu = bool(state.at_work)
            if on_gpu:
                share = min(share, 100 * (1 - float(np.median(state.at_work))))
            if share > params.share and wait_s >= _MIN_S:
                state.starving = True
                grave = self._is_grave(share, wait_s, on_gpu=on_gpu)
                yield self._starves(step, share, wait_s, size, grave=grave)
            elif share < _OVER * params.share or wait_s < _OVER * _MIN_S:
                state.starving = False
                yield Clear(about="starvation")

    def _is_grave(self, share: float, wait_s: float, *, on_gpu: bool) -> bool:
        loader = self.state.loader
        batch = (loader and loader.batch_size) or _UNKNOWN_BATCH
        if loader is not None and loader.dataset == _IN_MEMORY and not on_gpu:
            return False
        if on_gpu or share > _MAIN_PERCENT:
            return wait_s >= _GRAVE_S + _GRAVE_SAMPLE_S * batch
        return share > _HALF and wait_s >= _GRAVE_S + _HALF_SAMPLE_S * batch

    def _starves(
        self, step: int, share: float, wait_s: float, window: int, *, grave: bool
    ) -> Finding:
        state, loader = self.state, self.state.loader
        facts = [
            fact("wait_share", share, limit=self.params.share, unit="percent"),
            fact("wait", 1000 * wait_s, unit="ms"),
            fact("step_time", 1000 * float(np.median(state.times)), unit="ms"),
        ]
        remedy = None
        if loader is not None:
            facts += _facts(loader)
            cores = loader.cores or 0
            if 100 * loader.workers * self._ranks()[1] < self.params.min_threshold * cores:
                remedy = (
                    f"Give the DataLoader more workers than {loader.workers} (there are {cores} "
                    "cores) and persistent_workers=True, or prepare the samples once."
                )
        return Finding(
            about="starvation",
            branch="starvation",
            subject=Subject(kind="rank", name=f"rank {state.rank_series.rank}"),
            reason=f"{share:.0f} % of the step time is spent waiting for the next batch: "
            f"{1000 * wait_s:,.0f} ms a step over {window} steps",
            first_step=state.steps[-window],
            first_rank=state.rank_series.rank,
            severity=None if grave else "info",
            remedy=remedy,
            facts=tuple(facts),
            series=Series(
                name="wait for the next batch",
                unit="ms",
                steps=tuple(state.steps[-SERIES_POINTS:]),
                values=tuple(1000 * wait for wait in state.waits[-SERIES_POINTS:]),
            ),
            explanation="the median of groups of as many steps as there are workers",
        )

    def _ranks(self) -> tuple[int, int]:
        """How many ranks share the cores of the leading one, at least and at most: all of its node,
        but for one that is bound to some of the node's cores."""
        state = self.state
        here = state.node_of.get(state.rank_series.rank or 0, "")
        all_here = max(1, sum(node == here for node in state.node_of.values()))
        cores, of_node = state.loader and state.loader.cores, state.cores_of.get(here)
        if not cores or of_node is None:
            return 1, all_here
        return (1, 1) if cores < of_node else (all_here, all_here)

    def _advise(self, step: int) -> Outcomes:
        state, params, loader = self.state, self.params, self.state.loader
        if loader is None:
            return
        if loader.cores and "workers" not in state.said:
            least, most = (loader.workers * ranks for ranks in self._ranks())
            many = 100 * least / loader.cores > params.max_threshold
            workers = least if many else most
            percent = 100 * workers / loader.cores
            if many or (params.few and percent < params.min_threshold):
                state.said = [*state.said, "workers"]
                yield self._advice(
                    "workers",
                    step,
                    f"{workers} data-loader workers on {loader.cores} cores: "
                    + ("more than they can feed" if many else "fewer than could load"),
                    "Use fewer workers: they compete for cores and memory with each other and with "
                    "the training."
                    if many
                    else "Give the DataLoader more workers, and persistent_workers=True.",
                    fact(
                        "workers_share",
                        percent,
                        limit=params.max_threshold if many else params.min_threshold,
                        unit="percent",
                    ),
                )
        pins = loader.pin_memory or not loader.gpu or not state.at_work
        if not pins and state.seen >= _ADVICE_STEPS and "pin_memory" not in state.said:
            state.said = [*state.said, "pin_memory"]
            yield self._advice(
                "pin_memory",
                step,
                "batches are copied to the GPU from memory that is not pinned",
                "Set pin_memory=True on the DataLoader and copy with non_blocking=True.",
                fact("pinned", 0.0),
            )

    def _advice(self, branch: str, step: int, reason: str, remedy: str, fact: Fact) -> Finding:
        loader = self.state.loader
        assert loader is not None
        return Finding(
            about=branch,
            branch=branch,
            subject=Subject(kind="rank", name=f"rank {self.state.rank_series.rank}"),
            reason=reason,
            first_step=step,
            first_rank=self.state.rank_series.rank,
            severity="info",
            remedy=remedy,
            facts=(fact, *_facts(loader)),
        )


def _facts(loader: _Loader) -> list[Fact]:
    found = [fact("workers", loader.workers)]
    if loader.cores is not None:
        found.append(fact("cores", loader.cores))
    if loader.prefetch is not None:
        found.append(fact("prefetch_factor", loader.prefetch))
    if loader.dataset:
        found.append(fact("dataset", loader.dataset))
    return found
