"""Which series of a run are exported, and what they are called elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tocsin.schemas.records.collections import MODES, Mode
from tocsin.store.errors import NotCaptured
from tocsin.store.run import Run
from tocsin.store.values import Series


@dataclass(frozen=True, slots=True, eq=False)
class Scalar:
    """A scalar of one rank in one mode."""

    mode: Mode
    rank: int
    series: Series

    @property
    def name(self) -> str:
        """What it is called where there is only a name: `loss`, `eval/loss`, `rank-1/loss`."""
        rank = f"rank-{self.rank}/" if self.rank else ""
        return f"{rank}{'' if self.mode == 'train' else f'{self.mode}/'}{self.series.name}"


def scalars_of(run: Run) -> Iterator[Scalar]:
    """All scalars of all ranks, in every mode. Blocks."""
    ranks = run.ranks()
    for mode in MODES:
        for name in run.scalars(mode):
            for rank in ranks:
                try:
                    yield Scalar(mode, rank, run.series(name, mode, rank))
                except NotCaptured:
                    continue  # another rank has it
