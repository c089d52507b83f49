"""One tensor of a run: its statistics over the steps, and its values where they were saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from tocsin.schemas.records.collections import Mode
from tocsin.schemas.records.saved_tensors import SavedTensor, TensorsSaved
from tocsin.store.errors import NotCaptured
from tocsin.store.reading.source import Source, joined
from tocsin.store.storage.port import Storage
from tocsin.store.tensor_values import Values, read_tensor
from tocsin.store.values import Collection, Series, wide

if TYPE_CHECKING:
    import pandas

T = TypeVar("T")


class Numbers(Protocol):
    """A run, as far as its tensors need it."""

    @property
    def storage(self) -> Storage | None:
        """Where the store keeps its files."""
        ...

    def saved_tensors(self) -> Sequence[TensorsSaved]:
        """What it has saved in full."""
        ...

    def each(self, ask: Callable[[Source], T]) -> list[T]:
        """The answers of all that its numbers come from."""
        ...


class Tensor:
    """One tensor of one collection of a run."""

    def __init__(self, run: Numbers, name: str, collection: Collection) -> None:
        self.name: Final = name
        self.collection: Final = collection.name
        self._run = run
        self._statistics = collection.statistics

    def __repr__(self) -> str:
        return f"<Tensor {self.name} of {self.collection}>"

    def statistics(self) -> Sequence[str]:
        """Names of the statistics and counts of its collection."""
        return self._statistics

    def statistic(self, name: str, rank: int = 0, mode: Mode = "train") -> Series:
        """One statistic over the steps at which the tensor was captured.

        Raises:
            NotCaptured: this rank has no such statistic of it in this mode.
        """
        points = joined(
            self._run.each(
                lambda source: source.statistic(self.collection, self.name, name, mode, rank)
            )
        )
        if not points.steps.size:
            what = f"statistic of {self.name} in {self.collection} of rank {rank} in mode {mode}"
            raise NotCaptured(what, name, self._statistics)
        return Series(points.steps, points.values, points.at_us, f"{self.name}/{name}")

    def saved_steps(self, rank: int = 0) -> Sequence[int]:
        """The steps at which this rank has saved it in full, ascending."""
        return sorted({record.step for record, _ in self._saved(rank)})

    def value(self, step: int, rank: int = 0) -> Values:
        """The tensor itself, as this rank has saved it at that step (`save: full`); of a tensor in
        parts on the ranks this rank's part. bfloat16 comes as float32.

        Raises:
            NotCaptured: it was not saved at that step.
            DamagedStore: the file is gone, or its checksum differs.
            MissingExtra: the extra `store` is not installed.
        """
        for record, tensor in self._saved(rank):
            if record.step == step:
                return read_tensor(record, tensor, self._run.storage)
        raise NotCaptured(
            f"value of {self.name} in {self.collection} of rank {rank} at step",
            str(step),
            map(str, self.saved_steps(rank)),
        )

    def _saved(self, rank: int) -> list[tuple[TensorsSaved, SavedTensor]]:
        return [
            (record, tensor)
            for record in self._run.saved_tensors()
            if record.collection == self.collection and record.rank == rank
            for tensor in record.tensors
            if tensor.name == self.name
        ]

    def to_pandas(self, rank: int = 0, mode: Mode = "train") -> pandas.DataFrame:
        """A row for each step, a column for each statistic that it has.

        Raises:
            ConfigurationError: pandas is not installed.
        """
        columns = {}
        for name in self._statistics:
            try:
                columns[name] = self.statistic(name, rank, mode)
            except NotCaptured:
                continue
        return wide(columns)
