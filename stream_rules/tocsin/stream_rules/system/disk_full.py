"""`disk_full`: the disk that the job writes to is full, or will be soon.

Full is less than `floor` percent free and less than 10 GB: two percent of a large array are no
emergency. Soon is when a steady decline, over at least five minutes, reaches zero within `horizon`;
a single checkpoint is none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, Literal

from pydantic import Field

from tocsin.schemas.config_values import Duration
from tocsin.schemas.issues import Evidence, Fact, Subject
from tocsin.schemas.telemetry import SystemFrame
from tocsin.stream_rules.rule import (
    Clear,
    Finding,
    Moment,
    Outcome,
    Params,
    Rule,
    RuleMeta,
    system,
)
from tocsin.stream_rules.system.trend import Trend

_GB: Final = 1e9
_SMALL_BYTES: Final = 10 * _GB


class DiskFullParams(Params):
    """Parameters of `disk_full`."""

    horizon: Duration = Field(default=timedelta(hours=1), examples=["1h"])
    """How far ahead the disk must be full. Unit: a duration."""
    floor: float = Field(default=2.0, ge=0, le=100)
    """Free space below which it counts as full. Unit: percent."""


@dataclass(slots=True)
class _Node:
    trend: Trend = field(default_factory=Trend)
    first_ms: dict[str, int] = field(default_factory=dict)
    episodes: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _State:
    nodes: dict[str, _Node] = field(default_factory=dict)


class DiskFull(Rule[DiskFullParams, _State]):
    """A warning while it is ahead, critical when it is here; a stop frees no space."""

    meta = RuleMeta(
        name="disk_full",
        version=1,
        family="system",
        meaning="The disk of the working folder is full, or will be within the hour.",
        severity="warning",
        comes="later",
        inputs=(system("disk.free_bytes"), system("disk.total_bytes", beside=True)),
        capture_hint="the node is sampled by the launcher, or by `tocsin sample`",
        remedy="Delete old checkpoints or keep fewer of them; a checkpoint that does not fit is "
        "lost, and often the job with it.",
        params=DiskFullParams,
        resolve_after_steps=0,
    )
    state_type = _State

    def on_system(self, frame: SystemFrame, at: Moment) -> Iterable[Outcome]:
        free, total = frame.column("disk.free_bytes"), frame.column("disk.total_bytes")
        if free is None or total is None or not len(free):
            return
        node = self.state.nodes.setdefault(frame.node, _Node())
        for at_us, value in zip(frame.at_us.tolist(), free.tolist(), strict=True):
            node.trend.add(at_us / 1e6, value)
        here = _is_full(float(free.max()), float(total[-1]), self.params.floor)
        ahead = node.trend.meets_in_s(0.0)
        horizon_s = self.params.horizon.total_seconds()
        soon = ahead is not None and ahead <= horizon_s * (2 if "soon" in node.episodes else 1)
        yield from self._say(frame.node, node, "full", here, ahead, float(total[-1]), at)
        yield from self._say(
            frame.node, node, "soon", soon and not here, ahead, float(total[-1]), at
        )

    def _say(
        self,
        name: str,
        node: _Node,
        why: Literal["full", "soon"],
        holds: bool,
        ahead: float | None,
        total: float,
        at: Moment,
    ) -> Iterable[Outcome]:
        about = f"{why} {name}"
        if not holds:
            if node.episodes.pop(why, None) is not None:
                yield Clear(about=about)
            return
        if why not in node.episodes:
            node.episodes[why], node.first_ms[why] = f"{at.boot}/{at.seq}", at.now_ms
        free = node.trend.last
        percent = 100 * free / total if total > 0 else 0.0
        reason = f"{free / _GB:.1f} of {total / _GB:,.0f} GB ({percent:.1f} %) are free on {name}"
        if why == "soon" and ahead is not None:
            reason += f", none in {ahead / 60:,.0f} min at this pace"
        facts = [Fact(name="free", value=free, unit="bytes")]
        facts.append(
            Fact(name="free_share", value=percent, limit=self.params.floor, unit="percent")
        )
        if ahead is not None:
            limit_s = self.params.horizon.total_seconds()
            facts.append(Fact(name="full_in", value=ahead, limit=limit_s, unit="s"))
        yield Finding(
            about=about,
            subject=Subject(kind="node", name=name),
            reason=reason,
            episode=node.episodes[why],
            onset_ms=node.first_ms[why],
            severity="critical" if why == "full" else None,
            evidence=Evidence(
                facts=tuple(facts), series=node.trend.series("free space", "bytes", 0.0)
            ),
        )


def _is_full(free: float, total: float, floor: float) -> bool:
    return free < floor / 100 * total and free < _SMALL_BYTES
