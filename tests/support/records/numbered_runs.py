"""Runs whose every number is made for a test, as `tocsin.store.Run` would give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tocsin.schemas.records.collections import Mode
from tocsin.schemas.records.events import Data, Event
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.records.runs import RunData
from tocsin.schemas.records.runs_fold import RunsView
from tocsin.store import Collection, Matrix, NotCaptured, Series, System

INCARNATION = "0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11"
START_US = 1_795_258_000_000_000
START_MS = START_US // 1000


@dataclass
class MadeRun:
    """One run. Put numbers in with `scalar`, `tensors`, `node`, and events with `say`."""

    run_id: str = "made"
    incarnation: str = INCARNATION
    runs_view: RunsView = field(default_factory=RunsView)
    _scalars: dict[tuple[str, int], dict[str, Series]] = field(default_factory=dict)
    _matrices: dict[tuple[str, str, str], Matrix] = field(default_factory=dict)
    _systems: dict[str, System] = field(default_factory=dict)
    _events: list[Event[Data]] = field(default_factory=list)

    def scalar(
        self,
        name: str,
        values: npt.ArrayLike,
        *,
        steps: npt.ArrayLike | None = None,
        rank: int = 0,
        mode: Mode = "train",
        every_us: int = 1_000_000,
    ) -> MadeRun:
        """One number for each step, from step 0 on; a step takes `every_us`."""
        found = np.asarray(values, np.float64)
        at = np.arange(found.size) if steps is None else np.asarray(steps)
        at_us = START_US + (np.arange(found.size, dtype=np.int64) + 1) * every_us
        series = Series(at.astype(np.int64), found, at_us, name)
        self._scalars.setdefault((mode, rank), {})[name] = series
        return self

    def tensors(
        self,
        collection: str,
        statistic: str,
        rows: Sequence[str],
        values: npt.ArrayLike,
        *,
        steps: npt.ArrayLike | None = None,
        mode: Mode = "train",
    ) -> MadeRun:
        """A statistic of tensors: values[rows, steps]; NaN is a value, too."""
        cells = np.asarray(values, np.float64)
        at = np.arange(cells.shape[1]) if steps is None else np.asarray(steps)
        present = np.ones(cells.shape, bool)
        matrix = Matrix(tuple(rows), at.astype(np.int64), cells, present, statistic)
        self._matrices[(collection, statistic, mode)] = matrix
        return self

    def node(
        self, columns: Mapping[str, npt.ArrayLike], *, name: str = "node-1", every_s: float = 0.5
    ) -> MadeRun:
        """Samples of a node, two in a second."""
        values = [np.asarray(one, np.float64) for one in columns.values()]
        count = values[0].size
        at_us = START_US + (np.arange(count) * every_s * 1e6).astype(np.int64)
        self._systems[name] = System(name, at_us, tuple(columns), np.array(values).T)
        return self

    def say(self, *said: RunData) -> MadeRun:
        """Events; views, issues and deliveries go into the fold of the run."""
        for data in said:
            event: Event[Data] = Event.wrap(
                data, id=f"e-{len(self._events)}", source="/test", time_ms=START_MS
            )
            self._events.append(event)
            self.runs_view.add(data, offset=len(self._events), append_ms=START_MS)
        return self

    # What a report reads

    @property
    def view(self) -> RunView | None:
        return self.runs_view.run(self.run_id)

    def issues(self) -> Sequence[IssueFiring]:
        return self.runs_view.issues

    def events(self) -> Sequence[Event[Data]]:
        return self._events

    def ranks(self) -> Sequence[int]:
        return sorted({rank for _, rank in self._scalars})

    def scalars(self, mode: Mode = "train") -> Sequence[str]:
        found = (each for (m, _), each in self._scalars.items() if m == mode)
        return list(dict.fromkeys(name for each in found for name in each))

    def series(self, name: str, mode: Mode = "train", rank: int = 0) -> Series:
        found = self._scalars.get((mode, rank), {})
        if name not in found:
            raise NotCaptured("scalar", name, found)
        return found[name]

    def collections(self) -> Mapping[str, Collection]:
        found: dict[str, Collection] = {}
        for (collection, _, _), matrix in self._matrices.items():
            statistics = [s for c, s, _ in self._matrices if c == collection]
            found[collection] = Collection(
                collection, matrix.rows, tuple(statistics), int(matrix.steps.size)
            )
        return found

    def matrix(
        self, collection: str, statistic: str, rank: int = 0, mode: Mode = "train"
    ) -> Matrix:
        if (collection, statistic, mode) not in self._matrices:
            raise NotCaptured("statistic", statistic, [])
        return self._matrices[(collection, statistic, mode)]

    def nodes(self) -> Sequence[str]:
        return sorted(self._systems)

    def system(self, node: str | None = None) -> System:
        return self._systems[node if node is not None else self.nodes()[0]]


def view_of(run: MadeRun, **fields: object) -> RunView:
    """A view of that run: ended well after 200 steps, unless told otherwise."""
    given: dict[str, object] = {
        "run_id": run.run_id,
        "incarnation": run.incarnation,
        "state": "ended",
        "outcome": "completed",
        "exit_code": 0,
        "started_ms": START_MS,
        "ended_ms": START_MS + 200_000,
        "last_step": 199,
        "rules": {"nonfinite": "no_issues_found"},
    }
    return RunView.model_validate(given | fields)


def issue_of(run: MadeRun, **fields: object) -> IssueFiring:
    """A critical issue of `nonfinite` at step 40, unless told otherwise."""
    given: dict[str, object] = {
        "run_id": run.run_id,
        "incarnation": run.incarnation,
        "issue_id": "b1c5a1de-3b0f-5d0e-8a35-6a4c1c1f9d27",
        "rule": "nonfinite",
        "use": "nonfinite",
        "rule_version": 1,
        "severity": "critical",
        "subject": {"kind": "loss", "name": "loss"},
        "reason": "the loss is NaN",
        "remedy": "Go back to a checkpoint.",
        "first_step": 40,
        "first_rank": 0,
        "onset_ms": START_MS + 41_000,
        "at_ms": START_MS + 41_000,
        "evidence": {
            "facts": [{"name": "nans", "value": 12.0}],
            "series": {"name": "loss", "steps": [38, 39, 40], "values": [2.0, 2.1, "NaN"]},
        },
    }
    return IssueFiring.model_validate(given | fields)
