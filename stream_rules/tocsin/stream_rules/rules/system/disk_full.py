"""`disk_full`: the disk that the job writes to is full, or will be soon.

The rule watches the disk of the working folder, and of each folder in `capture.system.folders`; if
two folders are on one disk, it names the first.

`full` means less than `floor` percent free and less than 10 GB: two percent of a large array are
not an emergency. It resolves when a tenth more than that has been free for five minutes. `soon`
means that a steady decline, over at least five minutes, reaches zero within `horizon`; a single
checkpoint is not a decline. It resolves when the disk is not full, and for 20 minutes no trend
reaches zero within twice the horizon.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, Literal

from pydantic import Field

from tocsin.schemas.configuration.values import Duration
from tocsin.schemas.records.frames import Doubles, SystemFrame
from tocsin.schemas.records.issues import Subject
from tocsin.stream_rules.outcomes import Clear, Finding, Holds, Moment, Outcomes, fact
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, system
from tocsin.stream_rules.signals.hysteresis import Hysteresis
from tocsin.stream_rules.signals.trend import Trend

_GB: Final = 1e9
_SMALL_BYTES: Final = 10 * _GB
_ENOUGH: Final = 1.1
_FREE_S: Final = 300.0
_STEADY_S: Final = 1200.0


class DiskFullParams(Params):
    """Parameters of `disk_full`."""

    horizon: Duration = Field(default=timedelta(hours=1), examples=["1h"])
    """Time within which the disk will be full. Unit: a duration."""
    floor: float = Field(default=2.0, ge=0, le=100)
    """Free space below which it counts as full. Unit: percent."""


@dataclass(slots=True)
class _Node:
    trend: Trend = field(default_factory=Trend)
    full: Hysteresis = field(default_factory=Hysteresis)
    soon: Hysteresis = field(default_factory=Hysteresis)


@dataclass(slots=True)
class _State:
    nodes: dict[str, _Node] = field(default_factory=dict)


class DiskFull(Rule[DiskFullParams, _State]):
    """A warning before the disk is full, critical once it is; it requests no stop, since that frees
    no space."""

    meta = RuleMeta(
        name="disk_full",
        version=2,
        family="system",
        meaning="A disk that the job writes to is full, or will be within the hour.",
        severity="warning",
        available="later",
        inputs=(
            system("disk.free_bytes"),
            system("disk.*.free_bytes"),
            system("disk.*total_bytes", optional=True),
        ),
        capture_hint="the node is sampled by the launcher, or by `tocsin sample`",
        remedy="Delete old checkpoints or keep fewer of them; a checkpoint that does not fit is "
        "lost, and often the whole job.",
        params=DiskFullParams,
        branches={
            "soon": "the disk will be full within the horizon",
            "full": "the disk is full (critical)",
        },
        does_not_see="Quotas, and file systems of other folders than the working folder and those "
        "in capture.system.folders; a disk that runs out of inodes.",
        resolve_after_steps=0,
    )
    state_type = _State

    def on_system(self, frame: SystemFrame, at: Moment) -> Outcomes:
        seen: set[tuple[float, float]] = set()
        for column in sorted(frame.columns, key=lambda name: (name.count("/"), name)):
            if not column.startswith("disk.") or not column.endswith("free_bytes"):
                continue
            path = column[len("disk.") : -len("free_bytes")].rstrip(".")
            total = frame.column(f"{column[: -len('free_bytes')]}total_bytes")
            free = frame.column(column)
            if free is None or total is None or not len(free):
                continue
            disk = float(free[-1]), float(total[-1])
            if disk not in seen:
                seen.add(disk)
                name = f"{path} of {frame.node}" if path else frame.node
                yield from self._disk(name, frame, free, float(total[-1]), at)

    def _disk(
        self, name: str, frame: SystemFrame, free: Doubles, total: float, at: Moment
    ) -> Outcomes:
        node = self.state.nodes.setdefault(name, _Node())
        for at_us, value in zip(frame.at_us.tolist(), free.tolist(), strict=True):
            node.trend.add(at_us / 1e6, value)
        at_s, least, most = at.now_ms / 1000, float(free.min()), float(free.max())
        floor = min(self.params.floor / 100 * total, _SMALL_BYTES)
        ahead = node.trend.meets_in_s(0.0)
        if most < floor:
            node.full.holds(at)
            yield self._finding(name, node, "full", node.full, ahead, total)
        elif not least > _ENOUGH * floor:
            node.full.doubtful()
        elif node.full.gone(at_s, least=_FREE_S):
            yield Clear(about=f"full {name}")
        horizon_s = self.params.horizon.total_seconds()
        if node.full.open and node.soon.open:
            # It has come true: whoever was warned is not told now that it is over.
            node.soon.holds(at)
            yield Holds(about=f"soon {name}")
        elif (
            ahead is not None
            and not node.full.open
            and ahead <= horizon_s * (2 if node.soon.open else 1)
        ):
            node.soon.holds(at)
            yield self._finding(name, node, "soon", node.soon, ahead, total)
        elif node.soon.gone(at_s, least=_STEADY_S):
            yield Clear(about=f"soon {name}")

    def _finding(
        self,
        name: str,
        node: _Node,
        why: Literal["full", "soon"],
        hysteresis: Hysteresis,
        ahead: float | None,
        total: float,
    ) -> Finding:
        free = node.trend.last
        percent = 100 * free / total if total > 0 else 0.0
        reason = f"{free / _GB:.1f} of {total / _GB:,.0f} GB ({percent:.1f} %) are free on {name}"
        if why == "soon" and ahead is not None:
            reason += f", none in {ahead / 60:,.0f} min at this pace"
        facts = [fact("free", free, unit="bytes")]
        facts.append(fact("free_share", percent, limit=self.params.floor, unit="percent"))
        if ahead is not None:
            limit_s = self.params.horizon.total_seconds()
            facts.append(fact("full_in", ahead, limit=limit_s, unit="s"))
        return Finding(
            about=f"{why} {name}",
            branch=why,
            subject=Subject(kind="node", name=name),
            reason=reason,
            episode=hysteresis.episode,
            onset_ms=hysteresis.first_ms,
            severity="critical" if why == "full" else None,
            facts=tuple(facts),
            series=node.trend.series("free space", "bytes", 0.0),
        )
