"""The open issues that may explain others, by training."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final, TypeVar

from tocsin.actions.decision.inhibitions import OpenIssue, could_mute
from tocsin.actions.decision.issue_labels import issue_labels
from tocsin.schemas.configuration.inhibitions import InhibitEntry
from tocsin.schemas.records.issues import Issue
from tocsin.schemas.records.runs import RunView
from tocsin.schemas.topics import issue_partition

K = TypeVar("K")
V = TypeVar("V")

PER_TRAINING: Final = 256
"""Open issues of one training that are remembered; the oldest is forgotten first."""

TRAININGS: Final = 10_000
"""Trainings with open issues; likewise. One that ends is forgotten at once."""


class OpenIssues:
    """What the issues topic says, up to what was read of it."""

    def __init__(self, entries: Sequence[InhibitEntry]) -> None:
        self._entries = entries
        self._of: dict[tuple[str, str], dict[str, OpenIssue]] = {}
        # Read at a restart, before it is known how far the group had come.
        self._earlier: dict[int, list[tuple[int, Issue]]] = {}

    def use(self, entries: Sequence[InhibitEntry]) -> None:
        """Remember what these inhibitions need, from now on."""
        self._entries = entries

    def note(self, issue: Issue) -> None:
        """Take a state of an issue in."""
        labels = issue_labels(issue)
        training = (issue.run_id, issue.incarnation)
        known = self._of.get(training, {})
        if issue.state == "resolved" or not could_mute(self._entries, labels):
            if known.pop(issue.issue_id, None) is not None and not known:
                del self._of[training]
            return
        known[issue.issue_id] = OpenIssue(issue.issue_id, labels)
        self._of[training] = known
        _bound(known, PER_TRAINING)
        _bound(self._of, TRAININGS)

    def explains(self, issue: Issue) -> bool:
        """Whether an issue is open and may explain others."""
        return issue.issue_id in self._of.get((issue.run_id, issue.incarnation), ())

    def of(self, run_id: str, incarnation: str) -> Iterable[OpenIssue]:
        """The open issues of a training."""
        return self._of.get((run_id, incarnation), {}).values()

    def follow(self, run: RunView) -> None:
        """Forget a training that is over."""
        if run.state != "running":
            self._of.pop((run.run_id, run.incarnation), None)

    def restore(self, partition: int, offset: int, issue: Issue) -> None:
        """A record of the topic from before this worker had the partition, in order."""
        self._earlier.setdefault(partition, []).append((offset, issue))

    def restored(self, partition: int, next_offset: int | None) -> None:
        """The group continues at `next_offset`: what came before it is known, and no more."""
        for offset, issue in self._earlier.pop(partition, ()):
            if next_offset is not None and offset < next_offset:
                self.note(issue)

    def release(self, partitions: Collection[int]) -> None:
        """Drop the runs of these partitions."""
        self._of = {
            (run_id, incarnation): found
            for (run_id, incarnation), found in self._of.items()
            if issue_partition(run_id) not in partitions
        }


def _bound(found: dict[K, V], most: int) -> None:
    if len(found) > most:
        del found[next(iter(found))]
