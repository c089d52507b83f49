"""Writes a run as TensorBoard's files: scalars, histograms of tensors, issues as text.

Of each rank and mode a folder, which TensorBoard shows as a run: `RUN`, `RUN/eval`, `RUN/rank-1`. A
file has a fixed name and is written anew, so that an export repeated shows nothing twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import numpy.typing as npt

from tocsin.schemas.records.collections import MODES, Mode
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.text import plain_line, time_text, where_text
from tocsin.store.errors import NotCaptured, StoreUnavailable
from tocsin.store.export.alignment import aligned
from tocsin.store.export.series import scalars_of
from tocsin.store.export.tensorboard_events import (
    QUANTILES,
    Distribution,
    histogram_record,
    plain,
    scalar_record,
    text_record,
    usable,
    version_record,
)
from tocsin.store.run import Run
from tocsin.store.values import Integers

FILE: Final = "events.out.tfevents.0000000000.tocsin"

FOLLOW_S: Final = 5.0
"""Pause between two readings of a run that is followed."""

_OPEN_STEPS: Final = 16
"""Of so many steps, the newest with summaries, parts may still come."""

_US: Final = 1e6
_NEEDED: Final = ("min", *(name for name, _ in QUANTILES), "max", "numel", "mean", "std")


@dataclass(slots=True)
class Written:
    """What was written."""

    scalars: int = 0
    histograms: int = 0
    issues: int = 0


@dataclass(slots=True)
class _Exported:
    """The steps of each series as they are written, the tensors of the newest steps, and which
    issue in which state."""

    steps: dict[tuple[str, ...], Integers] = field(default_factory=dict)
    tensors: dict[tuple[str, ...], dict[int, set[str]]] = field(default_factory=dict)
    issues: set[tuple[str, str, int]] = field(default_factory=set)


class TensorBoardExport:
    """The files of one run below a folder. Close it: then the files are whole."""

    def __init__(self, run: Run, folder: Path) -> None:
        self._run = run
        self.folder: Final = folder / run.run_id
        self._exported = _Exported()
        self._files: dict[Path, BinaryIO] = {}
        self.written = Written()

    def write(self) -> None:
        """Write what there is by now and was not written yet. Blocks.

        Raises:
            StoreUnavailable: the disk is full, or the folder cannot be written to.
        """
        try:
            self._scalars()
            self._histograms()
            self._issues()
            for file in self._files.values():
                file.flush()
        except OSError as error:
            raise StoreUnavailable(f"{self.folder} cannot be written: {error}") from error

    def follow(self, wait: Callable[[], bool]) -> None:
        """Write what comes until the run has ended or `wait` returns False. Blocks.

        Raises:
            StoreUnavailable, BusUnavailable: as `write` and `Run.refresh` do.
        """
        while True:
            over = self._over()
            self.write()
            if over or not wait():
                return
            self._run.refresh()

    def close(self) -> None:
        """Let go of the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _over(self) -> bool:
        view = self._run.view
        return view is not None and view.state != "running"

    def _file(self, mode: Mode, rank: int) -> BinaryIO:
        folder = self.folder
        folder = folder if rank == 0 else folder / f"rank-{rank}"
        folder = folder if mode == "train" else folder / mode
        path = folder / FILE
        if path not in self._files:
            folder.mkdir(parents=True, exist_ok=True)
            # A reader that has the old file open goes on reading that one.
            with suppress(FileNotFoundError):
                os.unlink(path)
            self._files[path] = path.open("wb")
            self._files[path].write(version_record())
        return self._files[path]

    def _scalars(self) -> None:
        for one in scalars_of(self._run):
            series, key = one.series, ("scalar", one.mode, str(one.rank), one.series.name)
            new = _new(series.steps, self._exported.steps.get(key))
            if not new.any():
                continue
            file, tag = self._file(one.mode, one.rank), plain_line(series.name)
            for step, value, at_us in zip(
                series.steps[new].tolist(),
                series.values[new].tolist(),
                series.at_us[new].tolist(),
                strict=True,
            ):
                file.write(scalar_record(tag, value, step=step, at_s=at_us / _US))
                self.written.scalars += 1
            self._exported.steps[key] = series.steps

    def _histograms(self) -> None:
        run = self._run
        for collection, found in run.collections().items():
            if not set(_NEEDED) <= set(found.statistics):
                continue
            for mode in MODES:
                for rank in run.ranks():
                    with suppress(NotCaptured):  # another rank has it, or another mode
                        self._collection(collection, mode, rank)

    def _collection(self, collection: str, mode: Mode, rank: int) -> None:
        run, key = self._run, ("tensors", collection, mode, str(rank))
        found = aligned({name: run.matrix(collection, name, rank, mode) for name in _NEEDED})
        if not found.rows:
            return
        clock = run.tensor(found.rows[0], collection).statistic(_NEEDED[0], rank, mode)
        at_s = dict(zip(clock.steps.tolist(), (clock.at_us / _US).tolist(), strict=True))
        written = self._exported.tensors.setdefault(key, {})
        oldest = min(written) if len(written) >= _OPEN_STEPS else -1
        for column, step in enumerate(found.steps.tolist()):
            if step < oldest:
                continue
            here = written.setdefault(step, set())
            for row in np.flatnonzero(found.present[:, column]):
                if found.rows[row] in here:
                    continue
                here.add(found.rows[row])
                cells = {name: float(one[row, column]) for name, one in found.values.items()}
                distribution = _distribution(cells)
                if usable(distribution):
                    tag = plain_line(f"{collection}/{found.rows[row]}")
                    self._file(mode, rank).write(
                        histogram_record(tag, distribution, step=step, at_s=at_s.get(step, 0.0))
                    )
                    self.written.histograms += 1
            if len(written) > _OPEN_STEPS:
                del written[min(written)]

    def _issues(self) -> None:
        for issue in self._run.issues():
            key = (issue.issue_id, issue.state, issue.times)
            if issue.incarnation != self._run.incarnation or key in self._exported.issues:
                continue
            self._exported.issues.add(key)
            self._file("train", 0).write(
                text_record(
                    plain_line(f"issues/{issue.rule}"),
                    issue_text(issue),
                    step=issue.first_step or 0,
                    at_s=issue.at_ms / 1_000,
                )
            )
            self.written.issues += 1


def _new(steps: Integers, written: Integers | None) -> npt.NDArray[np.bool_]:
    """Which points are not written yet: a step has several (batches of an evaluation), of which
    later ones come behind the others. Steps ascend."""
    if written is None:
        return np.ones(steps.size, np.bool_)
    before = np.searchsorted(written, steps, "right") - np.searchsorted(written, steps)
    earlier: Integers = np.arange(steps.size) - np.searchsorted(steps, steps)
    return earlier >= before


def issue_text(issue: IssueFiring) -> str:
    """An issue as Markdown."""
    lines = [
        f"**{issue.severity}**, {issue.state}: {plain(plain_line(issue.reason))}",
        plain(plain_line(where_text(issue))),
        f"{time_text(issue.at_ms)}, `tocsin why {issue.short_id}`",
    ]
    if issue.remedy:
        lines.insert(2, plain(plain_line(issue.remedy)))
    return "\n\n".join(lines)


def _distribution(cells: Mapping[str, float]) -> Distribution:
    return Distribution(
        least=cells["min"],
        quantiles=[cells[name] for name, _ in QUANTILES],
        largest=cells["max"],
        count=cells["numel"],
        mean=cells["mean"],
        std=cells["std"],
    )
