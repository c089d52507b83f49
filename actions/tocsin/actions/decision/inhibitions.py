"""The stage of the inhibitions: issues that other open issues of their run explain. Pure.

An issue that fits both sides of an inhibition is not muted by others that do, nor any by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tocsin.actions.decision.planned import Held, Place
from tocsin.schemas.configuration.routing.inhibitions import InhibitEntry
from tocsin.schemas.configuration.routing.matches import labels_fit
from tocsin.schemas.records.issues import SHORT_ID

WAIT_MS: Final = 2_000
"""A notice about an issue that could be muted waits so long: its cause may be published a moment
later. An issue that explains it and comes after that mutes its later states only."""


@dataclass(frozen=True, slots=True)
class OpenIssue:
    """An issue that is open, as far as it matters here."""

    issue_id: str
    labels: Mapping[str, str]


def inhibited(
    entries: Sequence[InhibitEntry],
    issue: OpenIssue,
    others: Iterable[OpenIssue],
    place: Place,
) -> Held | None:
    """What mutes an issue, given the open issues of the same training."""
    known = [other for other in others if other.issue_id != issue.issue_id]
    for entry in entries:
        if not labels_fit(entry.mute, issue.labels):
            continue
        on_both_sides = labels_fit(entry.when, issue.labels)
        for other in known:
            if (
                labels_fit(entry.when, other.labels)
                and not (on_both_sides and labels_fit(entry.mute, other.labels))
                and all(issue.labels.get(k) == other.labels.get(k) for k in entry.equal)
            ):
                named = f"{entry.name}, " if entry.name else ""
                rule = other.labels["rule"]
                return Held(
                    "inhibition",
                    f"explained by the open issue {other.issue_id[:SHORT_ID]} of {rule} "
                    f"({named}{place(entry.loc)})",
                )
    return None


def could_be_muted(entries: Iterable[InhibitEntry], labels: Mapping[str, str]) -> bool:
    """Whether an issue with these labels would be muted, did another one explain it."""
    return any(labels_fit(entry.mute, labels) for entry in entries)


def could_mute(entries: Iterable[InhibitEntry], labels: Mapping[str, str]) -> bool:
    """Whether an open issue with these labels explains others."""
    return any(labels_fit(entry.when, labels) for entry in entries)
