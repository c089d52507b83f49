"""`host_memory_increase`: the job's memory grows towards its limit.

Used memory is the resident memory of all processes of the job, at most the memory in use on the
node (pages that workers share are counted for each of them). The limit is the limit of the control
group, or else the memory of the machine. Growth before the first step (such as reading a data set)
is ignored; a job without steps is checked after its first ten minutes. Branches, `steady` and
`fast` with half of the limit in use:

- steady: a growth over at least five minutes, measured over five or 20, meets the limit within
  `horizon`;
- graphs: the graphs of at least ten of the last losses are still in memory, in two consecutive
  checks: something keeps them, whatever the size of a graph and the limit; it resolves when they
  are gone;
- fast: a growth over at least half a minute, by a tenth of the limit, reaches it within as much
  time again: waiting five minutes would be too late.

It resolves when for 20 minutes no trend reaches the limit within twice the horizon.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, Literal

import numpy as np
from pydantic import Field

from tocsin.schemas.configuration.values import Duration
from tocsin.schemas.records.frames import StepFrame, SystemFrame
from tocsin.schemas.records.issues import Subject
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, scalar, system
from tocsin.stream_rules.signals.hysteresis import Hysteresis
from tocsin.stream_rules.signals.trend import Trend

_GIB: Final = 1 << 30
_STARTING_US: Final = 600_000_000
_STEADY_S: Final = 1200.0
_FAST_SHARE: Final = 0.1

_MAX_GRAPHS: Final = 10
_CHECKS: Final = 2
_GRAPHS: Final = "graphs"

Branch = Literal["steady", "fast"]


class HostMemoryIncreaseParams(Params):
    """Parameters of `host_memory_increase`."""

    horizon: Duration = Field(default=timedelta(hours=1), examples=["1h"])
    """Time within which the limit will be reached. Unit: a duration."""
    least_percent: float = Field(default=50.0, ge=0, le=100)
    """Share of the limit that must be in use. Unit: percent."""


@dataclass(slots=True)
class _Node:
    trend: Trend = field(default_factory=Trend)
    quick: Trend = field(default_factory=lambda: Trend(1.0, 60, 30, 1.0))
    start_us: int | None = None
    hysteresis: Hysteresis = field(default_factory=Hysteresis)


@dataclass(slots=True)
class _State:
    nodes: dict[str, _Node] = field(default_factory=dict)
    graphs: dict[int, int] = field(default_factory=dict)
    """Looks in a row at which a rank's graphs were kept."""
    reported_of: int | None = None


class HostMemoryIncrease(Rule[HostMemoryIncreaseParams, _State]):
    """One episode for each node."""

    meta = RuleMeta(
        name="host_memory_increase",
        version=3,
        family="system",
        meaning="The job's memory will reach its limit within the hour, or the graphs of past "
        "steps are kept in memory.",
        severity="warning",
        available="later",
        inputs=(
            system("memory.process_tree_bytes"),
            system("memory.limit_bytes", optional=True),
            system("memory.total_bytes", optional=True),
            system("memory.used_bytes", optional=True),
            scalar("graphs_kept", optional=True),
        ),
        capture_hint="the node is sampled by the launcher, or by `tocsin sample`",
        remedy="Look for losses or outputs that are kept with their graph (use .item() or "
        ".detach()), lists that grow with each step, and data-loader workers that copy the data.",
        params=HostMemoryIncreaseParams,
        branches={
            "steady": "over minutes, and full within the horizon",
            "fast": "over half a minute, and full in about as long",
            _GRAPHS: "the graphs of past steps are still in memory",
        },
        does_not_see="A limit of the process itself (ulimit -v), memory that is neither resident "
        "nor in the control group, and a leak that is far from the limit, unless it is one of "
        "graphs.",
        resolve_after_steps=0,
    )
    state_type = _State

    def on_system(self, frame: SystemFrame, at: Moment) -> Outcomes:
        tree, limits = frame.column("memory.process_tree_bytes"), frame.column("memory.limit_bytes")
        if limits is None:
            limits = frame.column("memory.total_bytes")
        if tree is None or limits is None or not len(tree):
            return
        all_used = frame.column("memory.used_bytes")
        used = tree if all_used is None else np.minimum(tree, all_used)
        node = self.state.nodes.setdefault(frame.node, _Node())
        if node.start_us is None:
            node.start_us = int(frame.at_us[0])
        if at.run.last_step is None and int(frame.at_us[-1]) < node.start_us + _STARTING_US:
            return
        for at_us, value in zip(frame.at_us.tolist(), used.tolist(), strict=True):
            node.trend.add(at_us / 1e6, value)
            node.quick.add(at_us / 1e6, value)
        yield from self._evaluate(frame.node, node, float(limits[-1]), at)

    def on_steps(self, frame: StepFrame, at: Moment) -> Outcomes:
        kept = frame.column("graphs_kept")
        if kept is None or not len(kept):
            return
        rank, state = frame.origin.rank, self.state
        if kept[-1] < _MAX_GRAPHS:
            state.graphs.pop(rank, None)
            if state.reported_of == rank:
                state.reported_of = None
                yield Clear(about=_GRAPHS)
            return
        looks = state.graphs[rank] = state.graphs.get(rank, 0) + 1
        if looks >= _CHECKS and state.reported_of in (None, rank):
            state.reported_of = rank
            yield _graphs_finding(rank, int(kept[-1]), int(frame.steps[-1]))

    def _evaluate(self, name: str, node: _Node, limit: float, at: Moment) -> Outcomes:
        horizon_s = self.params.horizon.total_seconds()
        branch: Branch = "steady"
        ahead = node.trend.meets_in_s(limit)
        if ahead is None or ahead > horizon_s:
            soon = node.quick.meets_in_s(limit)
            if soon is not None and node.quick.change() >= _FAST_SHARE * limit:
                ahead, branch = soon, "fast"
        share = 100 * node.trend.last / limit if limit > 0 else 0.0
        enough = share >= self.params.least_percent
        most_s = horizon_s * (2 if node.hysteresis.open else 1)
        if ahead is not None and enough and ahead <= most_s:
            node.hysteresis.holds(at)
            yield self._finding(name, node, limit, share, ahead, branch)
        elif node.hysteresis.gone(at.now_ms / 1000, least=_STEADY_S):
            yield Clear(about=name)

    def _finding(
        self, name: str, node: _Node, limit: float, share: float, ahead: float, branch: Branch
    ) -> Finding:
        slope = (limit - node.trend.last) / ahead
        return Finding(
            about=name,
            branch=branch,
            subject=Subject(kind="node", name=name),
            reason=f"the job uses {node.trend.last / _GIB:.1f} of {limit / _GIB:.1f} GiB on {name} "
            f"and grows by {60 * slope / 2**20:,.0f} MiB a minute: full in {ahead / 60:,.0f} min",
            episode=node.hysteresis.episode,
            onset_ms=node.hysteresis.first_ms,
            facts=(
                fact("used", node.trend.last, limit=limit, unit="bytes"),
                fact("share", share, unit="percent"),
                fact("growth", slope, unit="bytes/s"),
                fact("full_in", ahead, limit=self.params.horizon.total_seconds(), unit="s"),
            ),
            series=(node.trend if branch == "steady" else node.quick).series(
                "memory of the job", "bytes", limit
            ),
            explanation="the growth is that between the medians of the first and the last "
            f"ninth of the last {'5 or 20 minutes' if branch == 'steady' else 'minute'}",
        )


def _graphs_finding(rank: int, kept: int, step: int) -> Finding:
    return Finding(
        about=_GRAPHS,
        branch=_GRAPHS,
        subject=Subject(kind="rank", name=f"rank {rank}"),
        reason=f"the graphs of {kept} of the last 20 losses that were checked "
        "are still in memory: each step adds one",
        first_step=max(0, step - 10 * kept),
        first_rank=rank,
        remedy="Find what keeps a loss or an output with its graph: a list, or a running sum such "
        "as `total += loss`. Keep `loss.item()` or `loss.detach()`.",
        facts=(
            fact("graphs_kept", kept, limit=_MAX_GRAPHS),
            fact("looked_at_steps", step),
        ),
        explanation="a marker in a graph disappears together with it",
    )
