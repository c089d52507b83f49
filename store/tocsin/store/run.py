"""One run as Python sees it: its steps, scalars, tensors, samples and issues, stored and live."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from tocsin.schemas.records.collections import Mode
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.events import Data, Event
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.records.runs_fold import RunsView
from tocsin.schemas.records.saved_tensors import TensorsSaved
from tocsin.schemas.topics import Topics
from tocsin.store.catalog import despite_merges
from tocsin.store.errors import NotCaptured
from tocsin.store.reading.live import LiveRun
from tocsin.store.reading.source import Contents, Points, Source, joined
from tocsin.store.storage.port import Storage
from tocsin.store.stored import StoredFiles
from tocsin.store.tensor import Tensor
from tocsin.store.values import Collection, Integers, Matrix, Series, System, unit_of, wide

if TYPE_CHECKING:
    import pandas

K = TypeVar("K")
T = TypeVar("T")


class Run:
    """One run: what the store has of it, then what the bus has since. `open_run` makes one.

    All methods but those on `issues` and the view read files, so they block: call them in a thread
    from async code. What is there is read when the run is opened, and again by `refresh`.

    Args:
        incarnation: the one whose numbers are meant; None: the newest.
    """

    def __init__(
        self,
        run_id: str,
        *,
        stored: StoredFiles | None = None,
        live: LiveRun | None = None,
        view: RunsView,
        topics: Topics,
        incarnation: str | None = None,
    ) -> None:
        self.run_id: Final = run_id
        self._stored = stored
        self._live = live
        self._view = view
        self._topics = topics
        self._chosen = incarnation

    def __repr__(self) -> str:
        return f"<Run {self.run_id} of {len(self.incarnations)} incarnations>"

    # -- what it is ------------------------------------------------------------------------

    @property
    def incarnations(self) -> Sequence[str]:
        """Its trainings, the oldest first."""
        found = dict.fromkeys(() if self._stored is None else self._stored.incarnations)
        if self._live is not None:
            found.update(dict.fromkeys(self._live.frames))
        seen = self._view.seen.get(self.run_id)
        if seen is not None:
            views = sorted(seen.views.values(), key=lambda view: view.started_ms)
            found = dict.fromkeys([*(view.incarnation for view in views), *found])
            if seen.incarnation:
                found.pop(seen.incarnation, None)
                found[seen.incarnation] = None
        return tuple(found)

    @property
    def incarnation(self) -> str:
        """The training whose numbers are meant: the newest, unless another was asked for."""
        if self._chosen is not None:
            return self._chosen
        return self.incarnations[-1] if self.incarnations else ""

    @property
    def view(self) -> RunView | None:
        """The newest that the rules have published of this training; None: nothing yet."""
        seen = self._view.seen.get(self.run_id)
        return None if seen is None else seen.views.get(self.incarnation)

    @property
    def runs_view(self) -> RunsView:
        """The fold of all events of this run: states of issues, people's answers, the stop."""
        return self._view

    def issues(self) -> Sequence[IssueFiring]:
        """Its issues in order of occurrence, each in its newest state; of all incarnations."""
        return self._view.issues

    def deliveries(self) -> Sequence[Delivery]:
        """What was sent and stopped for them, each in its newest state."""
        found = self._view.deliveries
        return [delivery for delivery in found if delivery.run_id == self.run_id]

    def events(self) -> Sequence[Event[Data]]:
        """Its records that are not numbers, in order: starts, phases, checkpoints, heartbeats,
        the end; of all incarnations."""
        found = self._stored_events()
        return found if self._live is None else [*found, *(one[2] for one in self._live.events)]

    # -- scalars ---------------------------------------------------------------------------

    def steps(self, mode: Mode = "train") -> Integers:
        """The steps with scalars of any rank, int64[n], ascending."""
        found = self.each(lambda source: source.steps(mode))
        return np.unique(np.concatenate(found)) if found else np.empty(0, np.int64)

    def ranks(self) -> Sequence[int]:
        """The ranks that have sent numbers, ascending."""
        return sorted(frozenset().union(*self.each(lambda source: source.ranks())))

    def scalars(self, mode: Mode = "train") -> Sequence[str]:
        """Names of what there is one number of for each step: `loss`, `lr.0`, `step_time_s`, …"""
        return list(_union(self.each(lambda source: source.scalars(mode))))

    def series(self, name: str, mode: Mode = "train", rank: int = 0) -> Series:
        """One scalar over the steps.

        Raises:
            NotCaptured: this rank has no such scalar in this mode.
        """
        points = self._scalar(name, mode, rank)
        if not points.steps.size:
            raise NotCaptured(f"scalar of rank {rank} in mode {mode}", name, self.scalars(mode))
        return Series(points.steps, points.values, points.at_us, name, unit_of(name))

    def to_pandas(self, mode: Mode = "train", rank: int = 0) -> pandas.DataFrame:
        """A row for each step, a column for each scalar; of several values of a step the last.

        Raises:
            ConfigurationError: pandas is not installed.
        """
        columns = {}
        for name in self.scalars(mode):
            points = self._scalar(name, mode, rank)
            if points.steps.size:
                columns[name] = Series(points.steps, points.values, points.at_us, name)
        return wide(columns)

    # -- tensors ---------------------------------------------------------------------------

    def collections(self) -> Mapping[str, Collection]:
        """What was captured of tensors, by the name of the collection."""
        found: dict[str, list[Contents]] = {}
        saved = self.saved_tensors()
        for each in self.each(lambda source: source.collections()):
            for name, contents in each.items():
                found.setdefault(name, []).append(contents)
        return {
            name: Collection(
                name,
                tuple(_union(one.tensors for one in parts)),
                tuple(_union(one.statistics for one in parts)),
                len(frozenset().union(*(one.steps for one in parts))),
                sum(len(one.tensors) for one in saved if one.collection == name),
            )
            for name, parts in sorted(found.items())
        }

    def tensors(self, regex: str | None = None, collection: str | None = None) -> Sequence[str]:
        """Names of tensors, of one collection or of all, that the expression is found in.

        Raises:
            NotCaptured: there is no such collection. re.error: it is no regular expression.
        """
        collections = self.collections()
        if collection is not None and collection not in collections:
            raise NotCaptured("collection", collection, collections)
        chosen = collections.values() if collection is None else [collections[collection]]
        names = _union(one.tensors for one in chosen)
        return [name for name in names if regex is None or re.search(regex, name)]

    def tensor(self, name: str, collection: str | None = None) -> Tensor:
        """One tensor. Without a collection, the first of gradients, weights and the others (by
        name) that has it.

        Raises:
            NotCaptured: no collection has it.
        """
        collections = self.collections()
        if collection is not None and collection not in collections:
            raise NotCaptured("collection", collection, collections)
        first = [one for one in ("gradients", "weights") if one in collections]
        order = [collection] if collection is not None else [*first, *collections]
        for one in order:
            if name in collections[one].tensors:
                return Tensor(self, name, collections[one])
        where = "tensor" if collection is None else f"tensor of {collection}"
        raise NotCaptured(where, name, self.tensors(collection=collection))

    def saved_tensors(self) -> Sequence[TensorsSaved]:
        """What this incarnation has saved in full: files, with the tensors in each."""
        kind = TensorsSaved.event_type
        found = self._stored_events(kind)
        found += [] if self._live is None else [event for _, _, event in self._live.events]
        return [
            event.data
            for event in found
            if isinstance(event.data, TensorsSaved) and event.data.incarnation == self.incarnation
        ]

    def matrix(
        self, collection: str, statistic: str, rank: int = 0, mode: Mode = "train"
    ) -> Matrix:
        """One statistic of all tensors of a collection over the steps.

        Of several values of a step (batches of an evaluation) the last one counts.

        Raises:
            NotCaptured: there is no such collection, or this rank has no such statistic of it.
        """
        parts = self.each(lambda source: source.cells(collection, statistic, mode, rank))
        names = tuple(_union(part.names for part in parts))
        if not names:
            collections = self.collections()
            if collection not in collections:
                raise NotCaptured("collection", collection, collections)
            what = f"statistic of {collection} of rank {rank} in mode {mode}"
            raise NotCaptured(what, statistic, collections[collection].statistics)
        number = {name: place for place, name in enumerate(names)}
        steps = np.unique(np.concatenate([part.steps for part in parts]))
        values = np.full((len(names), steps.size), np.nan)
        present = np.zeros(values.shape, np.bool_)
        for part in parts:
            if part.steps.size:
                rows = np.array([number[name] for name in part.names], np.int64)[part.rows]
                columns = np.searchsorted(steps, part.steps)
                values[rows, columns] = part.values
                present[rows, columns] = True
        return Matrix(names, steps, values, present, statistic)

    # -- nodes -----------------------------------------------------------------------------

    def nodes(self) -> Sequence[str]:
        """Names of the nodes that were sampled."""
        found = self.each(lambda source: source.nodes(), of_nodes=True)
        return sorted(frozenset().union(*found))

    def system(self, node: str | None = None) -> System:
        """Samples of a node; None: the first by name.

        Raises:
            NotCaptured: no such node was sampled.
        """
        nodes = self.nodes()
        name = node if node is not None else (nodes[0] if nodes else "")
        if name not in nodes:
            raise NotCaptured("node", name, nodes)
        parts = self.each(lambda source: source.system(name), of_nodes=True)
        columns = tuple(_union(part.columns for part in parts))
        number = {column: place for place, column in enumerate(columns)}
        at_us = np.unique(np.concatenate([part.at_us for part in parts]))
        values = np.full((at_us.size, len(columns)), np.nan)
        for part in parts:
            if part.at_us.size:
                places = np.array([number[column] for column in part.columns], np.int64)
                values[np.searchsorted(at_us, part.at_us), places[part.names]] = part.values
        return System(name, at_us, columns, values)

    # -- while it runs ---------------------------------------------------------------------

    def refresh(self) -> None:
        """Read what has come since. Raises what `open_run` does."""
        self._reload()
        if self._live is not None:
            self._live.read()

    def wait_for_step(self, step: int, timeout_s: float = 60.0) -> bool:
        """Read the bus until the incarnation has come to that step; whether it has.

        False if it did not within `timeout_s`, or ended before.
        """
        deadline = time.monotonic() + timeout_s
        while not self._reached(step):
            left = deadline - time.monotonic()
            if self._live is None or left <= 0:
                return False
            if self._live.follow(lambda: self._reached(step) or self._over(), left):
                break
        return self._reached(step)

    def _reached(self, step: int) -> bool:
        last = -1 if self._stored is None else self._stored.last_step(self.incarnation)
        if self._live is not None:
            last = max(last, self._live.last_step.get(self.incarnation, -1))
        view = self.view
        if view is not None and view.incarnation == self.incarnation:
            last = max(last, -1 if view.last_step is None else view.last_step)
        return last >= step

    def _over(self) -> bool:
        seen = self._view.seen.get(self.run_id)
        return seen is not None and (seen.ended is not None or not seen.running)

    @property
    def storage(self) -> Storage | None:
        """Where the store keeps its files; None: the run is not read from a store."""
        return None if self._stored is None else self._stored.store.storage

    # -- where from ------------------------------------------------------------------------

    def _scalar(self, name: str, mode: Mode, rank: int) -> Points:
        return joined(self.each(lambda source: source.scalar(name, mode, rank)))

    def each(self, ask: Callable[[Source], T], *, of_nodes: bool = False) -> list[T]:
        """The answers of all that its numbers come from: files, then frames. A file that was merged
        into another meanwhile is looked for again."""

        def answers() -> list[T]:
            return [ask(one) for one in (self._nodes() if of_nodes else self._sources())]

        return despite_merges(answers, self._reload, of=f"run {self.run_id}")

    def _stored_events(self, kind: str | None = None) -> list[Event[Data]]:
        stored = self._stored
        if stored is None:
            return []
        # Before those of the bus are looked at: what is in files by now is dropped there.
        return despite_merges(
            lambda: list(stored.events(self._topics, kind)), self._reload, of=f"run {self.run_id}"
        )

    def _reload(self) -> None:
        if self._stored is not None:
            self._stored.reload()
            if self._live is not None:
                self._live.drop(self._stored.covered)

    def _sources(self) -> Sequence[Source]:
        """Of the chosen incarnation, the older first."""
        return self._sources_of(self.incarnation)

    def _nodes(self) -> Sequence[Source]:
        """As `_sources`; of all incarnations if that one has no samples: the sampler of a node may
        speak in the name of the first training of its job."""
        own = self._sources()
        if any(source.nodes() for source in own):
            return own
        return [
            source for incarnation in self.incarnations for source in self._sources_of(incarnation)
        ]

    def _sources_of(self, incarnation: str) -> list[Source]:
        found: list[Source] = []
        if self._stored is not None and (source := self._stored.source(incarnation)) is not None:
            found.append(source)
        if self._live is not None and (frames := self._live.frames.get(incarnation)):
            found.append(frames)
        return found


def _union(parts: Iterable[Iterable[K]]) -> dict[K, None]:
    return dict.fromkeys(one for part in parts for one in part)
