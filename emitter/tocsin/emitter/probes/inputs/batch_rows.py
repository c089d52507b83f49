"""What a data loader gives to a training: rows of the tensors of a batch, by their place in it.

At a step that is due the first batch that is fetched for it is read, on whatever device it is then.
`0` and `1` are the parts of a pair, `image` is what is under that key, `1.label` what is in
a mapping that is the second of a pair; `batch` is one that is a tensor itself. What comes without a
data loader is not seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import torch

from tocsin.emitter.plan.collections import CollectionPlan
from tocsin.emitter.plan.schedule import CaptureSchedule, Due
from tocsin.emitter.probes.probe import NEVER, Probe
from tocsin.emitter.statistics.async_copy import is_recording
from tocsin.emitter.statistics.reductions import dense
from tocsin.emitter.statistics.tables import Pending
from tocsin.emitter.statistics.tensor_rows import TensorRows, Wanted
from tocsin.schemas.records.collections import Kind, Mode

if TYPE_CHECKING:
    from tocsin.emitter.model.optimizers import Optimizers, WatchedOptimizer
    from tocsin.emitter.training.training import Training

INPUTS: Final[Kind] = "inputs"

MAX_TENSORS: Final = 64
MAX_DEPTH: Final = 4
MAX_NAME: Final = 200


class InputProbe(Probe):
    """Reads the batches of the steps at which a collection of inputs is due."""

    name = INPUTS

    def __init__(self, mode: Mode = "train", schedule: CaptureSchedule | None = None) -> None:
        """In another mode than train, the steps are the batches of that `schedule`."""
        self._mode: Final[Mode] = mode
        self._own: Final = schedule
        self._rows: tuple[str, Pending] | None = None

    def start(self, training: Training, optimizers: Optimizers) -> None:
        """The first optimizer step of a training is being made."""
        plans = training.settings.plans_of(INPUTS)
        self.on = any(plan.schedule(self._mode) is not None for plan in plans)
        self._schedule = training.schedule if self._own is None else self._own

    def batch(self, batch: object, step: int) -> None:
        """A data loader returned a batch, which that step will use."""
        plans = self._schedule.due(step).get(INPUTS, ())
        if not plans or self._rows is not None or is_recording():
            return
        with self._schedule.costs(*(plan.name for plan in plans)):
            rows = read_inputs(batch, plans)
        if rows is not None:
            self._rows, self.reads = (plans[0].name, rows), 0

    def read(self, step: int, watched: WatchedOptimizer, due: Due) -> tuple[str, Pending] | None:
        """The optimizer has changed its weights: the tables of this step, which may still be on
        their way from a GPU, and the name of the collection that bears their cost."""
        return self.drain()

    def drain(self) -> tuple[str, Pending] | None:
        """The rows of the last batch that was read, and the name of its collection."""
        rows, self._rows, self.reads = self._rows, None, NEVER
        return rows


def tensors_of(batch: object) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a batch, of any shape, and their names, at most `MAX_TENSORS`."""
    found = []
    for name, tensor in _walk(batch, "", 0):
        found.append((name[:MAX_NAME] or "batch", tensor))
        if len(found) == MAX_TENSORS:
            break
    return found


def read_inputs(batch: object, plans: Sequence[CollectionPlan]) -> TensorRows | None:
    """Rows of a batch for these collections; None if there is nothing to read."""
    names, flat = [], []
    for name, tensor in tensors_of(batch):
        values = dense(tensor)
        if values is not None:
            names.append(name)
            flat.append(values)
    wanted = [Wanted(plan.name, _chosen(plan, names), plan.columns) for plan in plans]
    return TensorRows(names, flat, wanted) if flat else None


def _chosen(plan: CollectionPlan, names: Sequence[str]) -> frozenset[str] | None:
    return None if plan.everything else frozenset(filter(plan.selects, names))


def _walk(part: object, name: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(part, torch.Tensor):
        yield name, part
    elif depth < MAX_DEPTH:
        for key, inner in _parts(part):
            yield from _walk(inner, f"{name}.{key}" if name else key, depth + 1)


def _parts(part: object) -> Iterator[tuple[str, object]]:
    if isinstance(part, Mapping):
        for key, inner in part.items():
            yield str(key), inner
    elif isinstance(part, tuple | list):
        fields = getattr(part, "_fields", None)
        names = fields if isinstance(fields, tuple) else range(len(part))
        for field, inner in zip(names, part, strict=False):
            yield str(field), inner
