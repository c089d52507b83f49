"""What kind of data loaders a training takes its batches from: one record for each.

The iterator of a loader shows its workers, pinning and batch size with its first batch. Whether it
belongs to the training or an evaluation is known a little later: a backward call follows the batch
of a training. No loader is kept alive, and nothing is put on one.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import torch
from torch.utils.data import IterableDataset

from tocsin.emitter.probes.probe import NEVER, Probe
from tocsin.schemas.records.events import clip
from tocsin.schemas.records.runs import DataLoaderSeen

if TYPE_CHECKING:
    from tocsin.emitter.training.training import Training

MAX_LOADERS: Final = 32
"""Different ones that are reported of one training, for each mode: a loop may make a new one for
each evaluation. As many are remembered, those that were used last."""

Key = tuple[int, object]


@dataclass(slots=True)
class DataLoaderInfo:
    """One loader. `mode` is None until it is known what its batches are for."""

    dataset: str
    workers: int
    pin_memory: bool
    prefetch_factor: int | None
    persistent_workers: bool
    batch_size: int | None
    iterable: bool
    samples: int | None
    mode: Literal["train", "eval"] | None = None
    reported: bool = False
    silent: int = 0
    """Batches that it gave before it was known what they are for."""


class DataLoaderProbe(Probe):
    """The loaders that this process iterates."""

    name = "loaders"

    def __init__(self) -> None:
        self._newest: weakref.ref[object] | None = None
        self._facts: dict[Key, DataLoaderInfo] = {}
        self._last: DataLoaderInfo | None = None
        self.undecided = False
        """Whether it is not known yet what the loader that gave the last batch feeds."""
        self._reports = {"train": 0, "eval": 0}
        self.wakes = NEVER

    def reset(self) -> None:
        """Another training begins. Loaders that it used before its first step are reported, too."""
        for facts in self._facts.values():
            facts.reported = False
            facts.mode, facts.silent = None, 0
        self._reports = {"train": 0, "eval": 0}
        self.undecided = self._last is not None
        self.wakes = 0 if self.undecided else NEVER

    def record_batch(self, iterator: object, *, evaluating: bool) -> None:
        """This iterator of a data loader gave a batch; most often it is the one from before."""
        if self._newest is None or self._newest() is not iterator:
            self._newest = weakref.ref(iterator)
            self._last = self._inspect(iterator)
        facts = self._last
        if facts is not None and facts.mode is None:
            facts.silent += 1
            if evaluating:
                facts.mode = "eval"
                self.wakes = 0
        self.undecided = facts is not None and facts.mode is None

    def backward(self) -> None:
        """The batch that was given last is one of training."""
        facts = self._last
        if facts is not None and facts.mode is None:
            facts.mode = "train"
            self.wakes = 0
        self.undecided = False

    @property
    def newest(self) -> object | None:
        """The iterator that gave the last batch, while it lives."""
        return None if self._newest is None else self._newest()

    @property
    def is_silent(self) -> bool:
        """Whether the loader that gave the last batch has given others before, and neither was one
        followed by a backward call nor was the model in `eval()`.
        """
        return self._last is not None and self._last.mode is None and self._last.silent > 1

    @property
    def trains(self) -> bool:
        """Whether the loader that gave the last batch feeds the training."""
        return self._last is not None and self._last.mode == "train"

    @property
    def is_read(self) -> bool:
        """Whether a loader that is iterated now feeds the training, not one of an earlier one."""
        return self.trains and self._newest is not None and self._newest() is not None

    def stepped(self, training: Training, step: int) -> None:
        """Report what is known and was not reported yet."""
        self.close(training)

    def close(self, training: Training) -> None:
        """The same at the end."""
        self.wakes = NEVER
        for facts in self._facts.values():
            if facts.mode is not None and not facts.reported:
                facts.reported = True
                self._reports[facts.mode] += 1
                if self._reports[facts.mode] > MAX_LOADERS:
                    continue
                training.emit(
                    DataLoaderSeen(
                        **training.who,
                        mode=facts.mode,
                        workers=facts.workers,
                        pin_memory=facts.pin_memory,
                        prefetch_factor=facts.prefetch_factor,
                        persistent_workers=facts.persistent_workers,
                        batch_size=facts.batch_size,
                        dataset=clip(facts.dataset, 200),
                        iterable=facts.iterable,
                        samples=facts.samples,
                        cores=len(os.sched_getaffinity(0)),
                        gpu=torch.cuda.is_available(),
                        step=training.last_step,
                    )
                )

    def _inspect(self, iterator: object) -> DataLoaderInfo:
        """The facts of an iterator's loader; a new epoch's are those of the one before."""
        facts = facts_of(iterator)
        dataset = getattr(iterator, "_dataset", None)
        key = (
            id(dataset),
            (facts.workers, facts.batch_size, facts.pin_memory, facts.prefetch_factor),
        )
        known = self._facts.pop(key, facts)
        if len(self._facts) >= MAX_LOADERS:
            del self._facts[next(iter(self._facts))]
        self._facts[key] = known
        return known


def facts_of(iterator: object) -> DataLoaderInfo:
    """What PyTorch's iterator knows of the loader that made it."""
    dataset = getattr(iterator, "_dataset", None)
    workers = _whole(getattr(iterator, "_num_workers", 0)) or 0
    stream = isinstance(dataset, IterableDataset)
    batches = getattr(iterator, "_index_sampler", None)
    return DataLoaderInfo(
        dataset=type(dataset).__name__,
        workers=workers,
        pin_memory=bool(getattr(iterator, "_pin_memory", False)),
        prefetch_factor=_whole(getattr(iterator, "_prefetch_factor", None)) if workers else None,
        persistent_workers=bool(getattr(iterator, "_persistent_workers", False)),
        batch_size=_whole(getattr(batches, "batch_size", None)),
        iterable=stream,
        # That of a stream is a guess of its author, and asking for it makes PyTorch warn later.
        samples=None if stream else _length(dataset),
    )


def _length(dataset: object) -> int | None:
    try:
        return len(dataset) if isinstance(dataset, Sized) else None
    # The user's own code, which may raise anything: one that does not know its length.
    except Exception:
        return None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None
