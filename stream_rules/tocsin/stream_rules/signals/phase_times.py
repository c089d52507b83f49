"""Where the time of a node's steps goes, so that it can be laid beside samples of the node."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from tocsin.schemas.records.frames import StepFrame

PHASES: Final = {
    "data_wait_s": "data loading",
    "forward_s": "the forward pass",
    "backward_s": "the backward pass",
    "optimizer_s": "the optimizer",
    "checkpoint_s": "checkpoints",
    "evaluation_s": "evaluation",
}
BUCKET_US: Final = 5_000_000
MAX_BUCKETS: Final = 2048


@dataclass(slots=True)
class _Node:
    rank: int
    last_step: int = -1
    buckets: dict[int, list[float]] = field(default_factory=dict)


@dataclass(slots=True)
class PhaseTimes:
    """Seconds by phase, of the lowest rank of each node, in buckets of five seconds."""

    node_of: dict[int, str] = field(default_factory=dict)
    nodes: dict[str, _Node] = field(default_factory=dict)

    def add(self, frame: StepFrame) -> None:
        """Take the phases of some steps."""
        rank = frame.origin.rank
        name = self.node_of.get(rank, "")
        node = self.nodes.get(name)
        if node is None or rank < node.rank:
            node = self.nodes[name] = _Node(rank)
        if rank != node.rank:
            return
        columns = [frame.column(phase) for phase in PHASES]
        for i, step in enumerate(frame.steps.tolist()):
            if step <= node.last_step:
                continue
            node.last_step = step
            totals = node.buckets.setdefault(int(frame.at_us[i]) // BUCKET_US, [0.0] * len(PHASES))
            for place, column in enumerate(columns):
                if column is not None and column[i] > 0:
                    totals[place] += float(column[i])
        while len(node.buckets) > MAX_BUCKETS:
            del node.buckets[min(node.buckets)]

    def shares(self, name: str, at_us: Collection[int]) -> dict[str, float]:
        """Percent of the steps' time by phase, at those times of a node, the largest first."""
        node = self.nodes.get(name) or self.nodes.get("")
        if node is None:
            return {}
        wanted = {int(at) // BUCKET_US for at in at_us}
        totals = [0.0] * len(PHASES)
        for bucket in wanted & node.buckets.keys():
            totals = [sum(pair) for pair in zip(totals, node.buckets[bucket], strict=True)]
        whole = sum(totals)
        found = zip(PHASES.values(), totals, strict=True)
        ordered = sorted(found, key=lambda pair: pair[1], reverse=True)
        return {phase: 100 * s / whole for phase, s in ordered if s > 0} if whole > 0 else {}
