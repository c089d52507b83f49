"""Checksums of parameters: replicas of a model must have the same, bit for bit.

A checksum is a sum of the tensor's bits as whole numbers of 64 bits, each times an odd number that
its place decides: any single bit that differs makes another sum, and so do numbers that have
changed places. It is the same whatever the number of threads, and is compared between ranks that
keep the same numbers on the same kind of device; a DTensor gives the sum of its local part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch

from tocsin.emitter.plan.schedule import CHECKSUMS, CHECKSUMS_EVERY, Due
from tocsin.emitter.probes.probe import NEVER, Probe
from tocsin.emitter.statistics.async_copy import HostCopy, is_recording
from tocsin.emitter.statistics.reductions import dense
from tocsin.emitter.statistics.tables import Table
from tocsin.schemas.records.frames import Counts

if TYPE_CHECKING:
    from tocsin.emitter.model.optimizers import Optimizers, WatchedOptimizer
    from tocsin.emitter.training.training import Training

MAX_ROWS: Final = 1024
"""Above it parameters that follow each other share a row."""

GROUPS: Final = 64

_PLACES: Final = 512
_CHUNK: Final = 1 << 16
_ODD: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1
_WEIGHTS: Final[npt.NDArray[np.uint64]] = np.arange(1, 2 * _PLACES, 2, dtype=np.uint64) * np.uint64(
    _ODD
)
_WHOLE: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaChecksums(Probe):
    """The checksums of one of several ranks, every `CHECKSUMS_EVERY` steps."""

    name = CHECKSUMS

    def start(self, training: Training, optimizers: Optimizers) -> None:
        """The first optimizer step of a training is being made."""
        self.on = training.identity.world_size > 1
        self.reads = _following(training.next_step - 1) if self.on else NEVER

    def read(self, step: int, watched: WatchedOptimizer, due: Due) -> tuple[str, Checksums] | None:
        """The optimizer has changed its weights: the tables of this step, which may still be on
        their way from a GPU, and the name of the collection that bears their cost."""
        self.reads = _following(step)
        if step % CHECKSUMS_EVERY or is_recording():
            return None
        return CHECKSUMS, Checksums(watched.parameters)


def _following(step: int) -> int:
    return step + CHECKSUMS_EVERY - step % CHECKSUMS_EVERY


class Checksums:
    """Checksums of named parameters, of any shape, as they are now. Those on a GPU come later."""

    def __init__(self, parameters: Sequence[tuple[str, torch.Tensor]]) -> None:
        names: list[str] = []
        self._sums: list[int] = []
        places: dict[torch.device, tuple[list[int], list[torch.Tensor]]] = {}
        with torch.no_grad():
            for name, parameter in parameters:
                flat = dense(parameter)
                if flat is None:
                    continue
                if flat.is_cpu:
                    self._sums.append(_on_host(flat))
                else:
                    at, sums = places.setdefault(flat.device, ([], []))
                    at.append(len(names))
                    sums.append(_on_device(flat))
                    self._sums.append(0)
                names.append(name)
            # As halves, which float64 holds.
            self._copies = [
                (at, HostCopy(torch.stack(sums).view(torch.int32))) for at, sums in places.values()
            ]
        self._names: Final = names

    @property
    def ready(self) -> bool:
        """Whether they are on the host; never waits."""
        return all(copy.ready() for _, copy in self._copies)

    def tables(self) -> Iterator[Table]:
        """One table without statistics; its count column is `checksum`."""
        for at, copy in self._copies:
            halves = copy.values().astype(np.int64).reshape(-1, 2) & 0xFFFFFFFF
            for i, (low, high) in zip(at, halves.tolist(), strict=True):
                self._sums[i] = high << 32 | low
        self._copies.clear()
        names, sums = self._names, self._sums
        if len(names) > MAX_ROWS:
            names, sums = _grouped(names, sums)
        counts: Counts = np.array(sums, np.uint64).reshape(-1, 1)
        nothing = np.zeros((len(names), 0), np.float32)
        yield Table(CHECKSUMS, tuple(names), nothing, counts, (), ("checksum",))


def _on_host(flat: torch.Tensor) -> int:
    octets = flat.view(torch.uint8).numpy()
    whole = octets.size - octets.size % 8
    words = octets[:whole].view(np.uint64)
    total = 0
    for start in range(0, words.size, _CHUNK):
        chunk = words[start : start + _CHUNK]
        total = (total * _ODD + _mixed(chunk)) & _MASK
    if whole < octets.size:
        total = total * _ODD + int.from_bytes(octets[whole:].tobytes(), "little")
    return total & _MASK


def _mixed(words: npt.NDArray[np.uint64]) -> int:
    whole = words.size - words.size % _PLACES
    rest = words[whole:]
    columns = np.add.reduce(words[:whole].reshape(-1, _PLACES), axis=0)
    columns[: rest.size] += rest
    return int(np.add.reduce(columns * _WEIGHTS))


def _on_device(flat: torch.Tensor) -> torch.Tensor:
    bits = flat.view(_WHOLE[flat.dtype.itemsize])
    whole = bits.numel() - bits.numel() % _PLACES
    columns = bits[:whole].view(-1, _PLACES).sum(0, dtype=torch.int64)
    rest = bits[whole:]
    columns[: rest.numel()] += rest
    weights = torch.arange(1, 2 * _PLACES, 2, device=flat.device) * (_ODD - (1 << 64))
    return (columns * weights).sum()


def _grouped(names: Sequence[str], sums: Sequence[int]) -> tuple[list[str], list[int]]:
    """GROUPS rows, each of parameters that follow each other, named after the first and last."""
    found, together = [], []
    bounds = np.linspace(0, len(names), GROUPS + 1).astype(int).tolist()
    for start, stop in pairwise(bounds):
        total = 0
        for one in sums[start:stop]:
            total = (total * _ODD + one) & _MASK
        found.append(f"{names[start]} … {names[stop - 1]}")
        together.append(total)
    return found, together
