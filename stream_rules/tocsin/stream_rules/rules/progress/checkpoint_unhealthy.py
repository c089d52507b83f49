"""`checkpoint_unhealthy`: a checkpoint from which the run should not continue.

- after_onset: it was saved at or after the first step of a stop-worthy issue of `nonfinite` or
  `loss_diverged`, so it contains weights that the fault has changed.
- torn: its files are not complete: truncated, empty, or a part is missing.
- nonfinite: tensors in it have NaN or Inf. A tensor of only 0 and -Inf is a mask, and is ignored.
- zeros: matrices are all zero that were not in the previous checkpoint of the same kind; or, of at
  least four matrices, half or more are all zero.
- smaller: it is more than `smaller` percent smaller than the median of the earlier checkpoints of
  its kind (at least three).

Checkpoints are of one kind if their paths differ only in digits that are the same in all files of a
step, as its number is: the shards of one step (`rank_0.pt`, `rank_1.pt`) are of different kinds.
`tocsin run` and `tocsin.emitter.start()` have a separate process read the files on the node that
wrote them, without unpickling, so the conditions on the contents need a path that this node can
read. At most 4 GiB of a checkpoint are read; of a larger one, only the beginning of each tensor.

The limits are choices, not measurements: for one model and optimizer, the sizes of healthy
checkpoints differ by less than a percent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from typing import Final, TypeVar

from pydantic import Field

from tocsin.schemas.records.checkpoints import Checkpoint, CheckpointRead, CheckpointWritten
from tocsin.schemas.records.events import clip
from tocsin.schemas.records.issues import Fact, Subject
from tocsin.schemas.records.runs import Heartbeat, RunData
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, event

SPOILING: Final = frozenset({"nonfinite", "loss_diverged"})
"""Rules whose faults are in the weights from their first step on."""

_KINDS: Final = 128
_SIZES: Final = 16
_MIN_SIZES: Final = 3
_MIN_MATRICES: Final = 4
_RECENT: Final = 32
_NAMES: Final = 8

_DIGITS: Final = re.compile(r"\d+")

T = TypeVar("T")


class CheckpointUnhealthyParams(Params):
    """Parameters of `checkpoint_unhealthy`."""

    smaller: float = Field(default=10.0, gt=0, lt=100)
    """How much smaller than its kind a checkpoint must be. Unit: percent."""


@dataclass(slots=True)
class _Kind:
    """The checkpoints of one kind so far; `zeros` None: none was read completely."""

    sizes: list[int] = field(default_factory=list)
    zeros: list[str] | None = None


@dataclass(slots=True)
class _Paths:
    """Paths that are the same but for their numbers: the numbers of the first file of each recent
    step, and the places where other files of that step have another number."""

    firsts: dict[int, list[str]] = field(default_factory=dict)
    parts: list[int] = field(default_factory=list)

    def add(self, step: int, numbers: list[str]) -> None:
        first = self.firsts.setdefault(step, numbers)
        differ = {
            i for i, (one, other) in enumerate(zip(first, numbers, strict=True)) if one != other
        }
        self.parts = sorted(differ.union(self.parts))
        while len(self.firsts) > _SIZES:
            del self.firsts[min(self.firsts)]


@dataclass(slots=True)
class _State:
    paths: dict[str, _Paths] = field(default_factory=dict)
    kinds: dict[str, _Kind] = field(default_factory=dict)
    recent: list[Checkpoint] = field(default_factory=list)
    reported: int = -1
    """The step of the newest checkpoint that was reported as written after the onset."""


class CheckpointUnhealthy(Rule[CheckpointUnhealthyParams, _State]):
    """An episode for each condition and kind; a sound checkpoint of that kind ends it."""

    meta = RuleMeta(
        name="checkpoint_unhealthy",
        version=1,
        family="progress",
        meaning="The run saved a checkpoint from which it should not continue.",
        severity="warning",
        available="later",
        inputs=(
            event(CheckpointWritten),
            event(CheckpointRead),
            event(Heartbeat, optional=True),
        ),
        capture_hint="torch.save, safetensors and the frameworks' checkpoints are noticed",
        remedy="Resume from an older checkpoint, and delete the unhealthy one, so that no restart "
        "takes it. If it is torn, look at the space and quota of the file system.",
        does_not_see="Contents of files that this node cannot read, of object storage, and of the "
        "formats of others; weights that are finite and wrong.",
        branches={
            "after_onset": "It was saved after the weights were spoiled.",
            "torn": "Its files are not whole.",
            "nonfinite": "Tensors in it have NaN or Inf.",
            "zeros": "Matrices in it are all zero.",
            "smaller": "It is smaller than those before of its kind.",
        },
        params=CheckpointUnhealthyParams,
        history_steps=0,
        resolve_after_steps=0,
    )
    state_type = _State

    def on_event(self, data: RunData, at: Moment) -> Outcomes:
        if isinstance(data, CheckpointWritten | CheckpointRead):
            self._compare_paths(data.checkpoint)
        if isinstance(data, CheckpointWritten):
            self.state.recent = [*self.state.recent, data.checkpoint][-_RECENT:]
            yield from self._size(data.checkpoint, at)
        elif isinstance(data, CheckpointRead) and not (data.unread or data.changed):
            yield from self._contents(data, at)
        # An issue may be known later than a checkpoint that was written after its onset.
        yield from self._after_onset(at)

    def _after_onset(self, at: Moment) -> Iterator[Finding]:
        fault, state = at.run.fault, self.state
        if fault is None or fault.rule not in SPOILING:
            return
        spoiled = [one for one in state.recent if one.step >= fault.step]
        newest = max((one.step for one in spoiled), default=-1)
        if newest <= state.reported:
            return
        state.reported = newest
        first = spoiled[0]
        yield self._finding(
            "after_onset",
            first,
            at,
            f"{_name(first)} was saved at step {first.step:,}, and {fault.rule} began at step "
            f"{fault.step:,}",
            facts=(
                fact("saved_at", float(first.step), limit=float(fault.step)),
                fact("checkpoints after the onset", len(spoiled)),
            ),
        )

    def _size(self, checkpoint: Checkpoint, at: Moment) -> Outcomes:
        size = checkpoint.size_bytes
        if size is None:
            return
        kind = self._kind(checkpoint)
        before, kind.sizes = kind.sizes, [*kind.sizes, size][-_SIZES:]
        if len(before) < _MIN_SIZES:
            return
        usual = median(before)
        limit = usual * (1 - self.params.smaller / 100)
        if size >= limit:
            yield Clear(step=max(0, checkpoint.step), about=self._about("smaller", checkpoint))
            return
        # It is no measure for those that follow.
        kind.sizes = before
        yield self._finding(
            "smaller",
            checkpoint,
            at,
            f"{_name(checkpoint)} has {size:,} bytes, and those before of its kind {usual:,.0f}",
            facts=(
                fact("size", size, limit=limit, unit="bytes"),
                fact("usual_size", usual, unit="bytes"),
            ),
        )

    def _contents(self, read: CheckpointRead, at: Moment) -> Outcomes:
        step, checkpoint = max(0, read.checkpoint.step), read.checkpoint
        if read.torn:
            yield self._finding(
                "torn", checkpoint, at, f"{_name(checkpoint)} is not whole: {read.torn}"
            )
            return
        yield Clear(step=step, about=self._about("torn", checkpoint))
        if read.nonfinite_tensors:
            yield self._finding(
                "nonfinite",
                checkpoint,
                at,
                f"{_name(checkpoint)} has NaN or Inf in {_some(read.nonfinite)}"
                f"{_count_text(read.nonfinite_tensors, read.tensors)}",
                facts=(
                    fact("nonfinite_tensors", read.nonfinite_tensors, limit=0),
                    fact("tensors", read.tensors),
                ),
                also=read.nonfinite,
            )
        elif read.complete:
            yield Clear(step=step, about=self._about("nonfinite", checkpoint))
        if read.complete:
            yield from self._zeros(read, at)

    def _zeros(self, read: CheckpointRead, at: Moment) -> Outcomes:
        kind = self._kind(read.checkpoint)
        known = kind.zeros
        new = [] if known is None else [name for name in read.zeros if name not in known]
        # Where names are left out of the list, one that is not in it may have been zero, too.
        all_listed = read.zero_tensors <= len(read.zeros)
        most = read.matrices >= _MIN_MATRICES and 2 * read.zero_tensors >= read.matrices
        if not (most or (new and all_listed)):
            kind.zeros = list(read.zeros)
            yield Clear(
                step=max(0, read.checkpoint.step), about=self._about("zeros", read.checkpoint)
            )
            return
        names = tuple(new) or read.zeros
        yield self._finding(
            "zeros",
            read.checkpoint,
            at,
            f"{_name(read.checkpoint)} has only zeros in {_some(names)}"
            f"{_count_text(read.zero_tensors, read.matrices)}",
            facts=(
                fact("zero_tensors", read.zero_tensors),
                fact("matrices", read.matrices),
            ),
            also=names,
        )

    def _compare_paths(self, checkpoint: Checkpoint) -> None:
        numbers = _DIGITS.findall(checkpoint.path)
        _newest(self.state.paths, _form(checkpoint), _Paths).add(checkpoint.step, numbers)

    def _kind(self, checkpoint: Checkpoint) -> _Kind:
        return _newest(self.state.kinds, self._kind_name(checkpoint), _Kind)

    def _kind_name(self, checkpoint: Checkpoint) -> str:
        """Its path, with the numbers that name a part of the step's files."""
        paths = self.state.paths.get(_form(checkpoint)) or _Paths()
        places = count()
        return _DIGITS.sub(
            lambda number: number[0] if next(places) in paths.parts else "#", checkpoint.path
        )

    def _about(self, branch: str, checkpoint: Checkpoint) -> str:
        return f"{branch} {self._kind_name(checkpoint)}"

    def _finding(
        self,
        branch: str,
        checkpoint: Checkpoint,
        at: Moment,
        reason: str,
        *,
        facts: tuple[Fact, ...] = (),
        also: tuple[str, ...] = (),
    ) -> Finding:
        return Finding(
            about=branch if branch == "after_onset" else self._about(branch, checkpoint),
            branch=branch,
            subject=Subject(kind="run", name=at.run.run_id),
            reason=clip(reason, 500),
            first_step=max(0, checkpoint.step),
            first_rank=at.rank,
            facts=(*facts, fact("path", clip(checkpoint.path, 500))),
            followed=max(0, len(also) - 1),
            also=also[:_NAMES],
        )


def _form(checkpoint: Checkpoint) -> str:
    return _DIGITS.sub("#", checkpoint.path)


def _newest(known: dict[str, T], name: str, make: Callable[[], T]) -> T:
    """The entry of that name, now the newest; the oldest go where there are too many."""
    entry = known[name] = known.pop(name, None) or make()
    while len(known) > _KINDS:
        del known[next(iter(known))]
    return entry


def _name(checkpoint: Checkpoint) -> str:
    """Its last two names, as frameworks call a file the same in folders that count."""
    return clip("/".join(checkpoint.path.rsplit("/", 2)[-2:]), 200)


def _some(names: tuple[str, ...]) -> str:
    return names[0] if names else "a tensor"


def _count_text(count: int, all_of_them: int) -> str:
    return f" ({count:,} of {all_of_them:,} tensors)" if all_of_them else ""
