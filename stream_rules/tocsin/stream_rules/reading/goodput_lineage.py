"""Which of the steps that a run has made were kept, and which had to be made again. Pure.

An incarnation goes on from a checkpoint of an earlier one, or from nothing. What is kept is the
way back from the newest incarnation: of each, the steps up to the checkpoint that the next one on
the way has loaded. An incarnation that has completed keeps all that it did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

FROM_NOTHING: Final = ""
"""The incarnation from which one goes on that begins anew."""

MAX_MARKS: Final = 16
"""Checkpoints that are remembered of an incarnation, the newest."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A checkpoint, and how much of its incarnation's time in steps is in it, milliseconds."""

    path: str
    trained_ms: float


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an incarnation goes on: at a checkpoint that holds `trained_ms` of an earlier one."""

    incarnation: str
    trained_ms: float = 0.0


@dataclass(slots=True)
class Lap:
    """The time of one incarnation, by parts, milliseconds; that of its steps is `trained_ms`.

    Attributes:
        steps: how many it has made.
        marks: its checkpoints, the oldest first.
        done_steps: steps of earlier incarnations that it goes on from; None: it has not told.
        origin: None while it is not known.
    """

    incarnation: str = ""
    trained_ms: float = 0.0
    steps: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)
    completed: bool = False
    done_steps: int | None = None
    origin: Origin | None = None

    def add(self, part: str, ms: float) -> None:
        """More time of a part that is no step."""
        if ms > 0:
            self.parts[part] = self.parts.get(part, 0.0) + ms

    def saved(self, path: str, trained_ms: float) -> None:
        """A checkpoint was written; under the same path it is no more what it was."""
        kept = [mark for mark in self.marks if mark.path != path]
        self.marks = [*kept, Mark(path, trained_ms)][-MAX_MARKS:]


@dataclass(slots=True)
class Kept:
    """What became of the steps of an incarnation, milliseconds."""

    productive: float = 0.0
    redone: float = 0.0
    unknown: float = 0.0


def origin_by_file(past: Sequence[Lap], loaded: Sequence[str]) -> Origin | None:
    """The newest checkpoint of `past` among files that were loaded, the last one loaded first.

    A checkpoint may be a folder; then a file in it counts.
    """
    for path in reversed(loaded):
        for lap in reversed(past):
            for mark in reversed(lap.marks):
                if path == mark.path or path.startswith(mark.path.rstrip("/") + "/"):
                    return Origin(lap.incarnation, mark.trained_ms)
    return None


def origin_by_step(past: Sequence[Lap], done_steps: int) -> Origin | None:
    """Where an incarnation goes on that reports how many steps were made before; None: not known.

    The time up to that step is taken as its share of the steps.
    """
    if done_steps == 0:
        return Origin(FROM_NOTHING)
    for lap in reversed(past):
        if lap.completed:
            return None
        if not lap.steps:
            continue
        if lap.done_steps is None:
            return None
        if done_steps >= lap.done_steps:
            kept = min(done_steps - lap.done_steps, lap.steps) / lap.steps
            return Origin(lap.incarnation, kept * lap.trained_ms)
    return None


def kept_of(laps: Sequence[Lap]) -> list[Kept]:
    """What became of the steps of each incarnation; the newest is the last.

    Where it is not known from what an incarnation goes on, nor are the steps before it; those
    after the newest checkpoint before it are lost in any case.
    """
    found: list[Kept] = []
    all_kept, known, origin = True, True, Origin(FROM_NOTHING)
    for lap in reversed(laps):
        here = Kept()
        found.append(here)
        if lap.completed or all_kept:
            here.productive = lap.trained_ms
            on_the_way = True
        elif not known:
            on_the_way = False
            here.unknown = lap.marks[-1].trained_ms if lap.marks else lap.trained_ms
            here.unknown = min(here.unknown, lap.trained_ms)
            here.redone = lap.trained_ms - here.unknown
        else:
            on_the_way = lap.incarnation == origin.incarnation
            here.productive = min(origin.trained_ms, lap.trained_ms) if on_the_way else 0.0
            here.redone = lap.trained_ms - here.productive
        if lap.origin is not None and on_the_way:
            all_kept, known, origin = False, True, lap.origin
        elif lap.steps and on_the_way:
            all_kept, known = False, False
    return found[::-1]
