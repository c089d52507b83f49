"""The open issues that may explain others, by training."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, TypeVar

from tocsin.actions.decision.inhibitions import OpenIssue, could_mute
from tocsin.actions.decision.issue_labels import issue_labels
from tocsin.schemas.configuration.routing.inhibitions import InhibitEntry
from tocsin.schemas.records.issues import Issue
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.topics import issue_partition

_State = tuple[int, Mapping[str, str] | None]
"""From this offset on, what an issue is matched by; None: it explains no other one."""

K = TypeVar("K")
V = TypeVar("V")

PER_TRAINING: Final = 256
"""Open issues of one training that are remembered; the oldest is forgotten first."""

TRAININGS: Final = 10_000
"""Trainings with open issues; likewise. One that ends is forgotten at once."""


class OpenIssues:
    """The open issues of the issues topic, up to what was read of it."""

    def __init__(self, entries: Sequence[InhibitEntry]) -> None:
        self._entries = entries
        self._of: dict[tuple[str, str], dict[str, OpenIssue]] = {}
        # Read at a restart, before it is known how far the group had come.
        self._earlier: dict[int, dict[tuple[str, str], dict[str, list[_State]]]] = {}

    def use(self, entries: Sequence[InhibitEntry]) -> None:
        """Remember what these inhibitions need, from now on."""
        self._entries = entries

    def note(self, issue: Issue) -> None:
        """Take a state of an issue in."""
        training = (issue.run_id, issue.incarnation)
        self._note(training, issue.issue_id, self._labels(issue))

    def explains(self, issue: Issue) -> bool:
        """Whether an issue is open and may explain others."""
        return issue.issue_id in self._of.get((issue.run_id, issue.incarnation), ())

    def in_training(self, run_id: str, incarnation: str) -> Iterable[OpenIssue]:
        """The open issues of a training."""
        return self._of.get((run_id, incarnation), {}).values()

    def follow(self, run: RunView) -> None:
        """Forget a training that is over."""
        if run.state != "running":
            self._of.pop((run.run_id, run.incarnation), None)

    def restore(self, partition: int, offset: int, issue: Issue) -> None:
        """A record of the topic from before this worker had the partition, in order.

        The topic has thousands of issues of a month: only what may explain others is kept, without
        its evidence, and its end.
        """
        labels = self._labels(issue)
        trainings = self._earlier.setdefault(partition, {})
        issues = trainings.get((issue.run_id, issue.incarnation), {})
        states = issues.get(issue.issue_id, [])
        if labels != (states[-1][1] if states else None):
            states.append((offset, labels))
            issues[issue.issue_id] = states
            trainings[issue.run_id, issue.incarnation] = issues

    def restored(self, partition: int, next_offset: int | None) -> None:
        """The group continues at `next_offset`: what came before it is known, and no more."""
        for training, issues in self._earlier.pop(partition, {}).items():
            for issue_id, states in issues.items():
                known = [labels for at, labels in states if at < (next_offset or 0)]
                if known:
                    self._note(training, issue_id, known[-1])

    def _labels(self, issue: Issue) -> Mapping[str, str] | None:
        """What an issue is matched by; None: it explains no other one (any more)."""
        if issue.state == "resolved":
            return None
        labels = issue_labels(issue)
        return labels if could_mute(self._entries, labels) else None

    def _note(
        self, training: tuple[str, str], issue_id: str, labels: Mapping[str, str] | None
    ) -> None:
        known = self._of.get(training, {})
        if labels is None:
            if known.pop(issue_id, None) is not None and not known:
                del self._of[training]
            return
        known[issue_id] = OpenIssue(issue_id, labels)
        self._of[training] = known
        _bound(known, PER_TRAINING)
        _bound(self._of, TRAININGS)

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
