"""The stage of the silences: issues that are known, of which nobody is notified. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tocsin.actions.decision.planned import Held, Place
from tocsin.schemas.configuration.routing.matches import labels_fit
from tocsin.schemas.configuration.routing.silences import Muted, SilenceEntry
from tocsin.schemas.text import plain_line, time_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """A silence, of the config file or of `tocsin silence`.

    Attributes:
        decided_by: the config line, or the silence's id.
    """

    match: Mapping[str, tuple[str, ...]]
    from_ms: int
    until_ms: int
    mutes: Collection[Muted]
    by: str
    why: str
    decided_by: str

    def reason(self) -> str:
        """The sentence for people."""
        by = f" by {plain_line(self.by)}" if self.by else ""
        why = f": {plain_line(self.why)}" if self.why else ""
        return f"silenced{by} until {time_text(self.until_ms)} ({self.decided_by}){why}"


def configured(entries: Iterable[SilenceEntry], place: Place) -> Sequence[Silence]:
    """The silences of the config file."""
    return [
        Silence(
            match=entry.match,
            from_ms=0 if entry.from_ is None else round(1000 * entry.from_.timestamp()),
            until_ms=round(1000 * entry.until.timestamp()),
            mutes=frozenset(entry.mutes),
            by=entry.by,
            why=entry.why,
            decided_by=place(entry.loc),
        )
        for entry in entries
    ]


def silenced(
    silences: Iterable[Silence], labels: Mapping[str, str], what: Muted, now_ms: int
) -> Held | None:
    """What silences an issue with these labels now; of several silences the one that ends last."""
    found = [
        one
        for one in silences
        if what in one.mutes
        and one.from_ms <= now_ms < one.until_ms
        and labels_fit(one.match, labels)
    ]
    longest = max(found, key=lambda one: one.until_ms, default=None)
    return None if longest is None else Held("silence", longest.reason(), longest.until_ms)
