"""`replica_divergence`: replicas that must have identical weights, bit for bit, have different
ones.

With several ranks, each rank sends a checksum of the bits of every parameter, every 100 steps.
Ranks whose parameters have the same names are replicas of each other (the name of a shard includes
its position, `@tp1`, and it is compared only with the same shard). The checksums of a step are
compared when each rank has sent them, ten seconds after they were first found to differ, or when a
rank is four checks further. With three or more replicas, the rule names those that disagree with
the majority.

- diverged: weights that agreed at the first check differ now. Some ranks skipped an average or a
  broadcast, or a machine corrupted a value. It is critical for weights that agreed after they had
  changed. Weights that agreed only until something changed them may be meant to differ (local SGD
  or experts of each rank, from one seed, in a first step with a learning rate of 0; or they are
  frozen): a warning.
- never_alike: no weight was ever the same. Either gradients are not averaged, so each rank trains
  separately, or this is intended (local SGD, shards under one name). A warning, not critical.

Weights that differ from the first check on while others agree are treated as parts of the model
that belong to one rank, like the experts of an expert-parallel model.

It does not request a stop: a checksum shows that weights differ, not by how much, and the replica
that writes the checkpoints may be correct.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

import numpy as np
import numpy.typing as npt

from tocsin.schemas.records.frames import TensorFrame
from tocsin.schemas.records.issues import Evidence, Subject
from tocsin.schemas.records.runs import RunData, RunEnded
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.reading.state_codec import StateArray
from tocsin.stream_rules.reading.tensor_rows import named
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, tensors

CHECKSUMS: Final = "checksums"
DIVERGED, NEVER = "diverged", "never_alike"
_UNMOVED: Final = "diverged unmoved"
"""What the findings about weights that agreed before they changed are about."""

HOLD_MS: Final = 10_000
KEPT: Final = 4
"""Steps that are compared at once: ranks may be that far apart."""

_FLAT: Final = "_flat_param"
"""In the names of FSDP's first version, whose ranks have other parts under one name."""


class ReplicaDivergenceParams(Params):
    """Parameters of `replica_divergence`: none. Checksums come every 100 steps."""


@dataclass(slots=True)
class _Group:
    """Replicas at one step: which variant of the weights each rank has.

    Attributes:
        first: the checksums of the rank that came first, by row.
        differ: by row, whether any two replicas differ in it.
        variant: for each rank, a digest of its checksums.
    """

    rows: list[str]
    first: StateArray
    differ: StateArray
    variant: dict[int, str] = field(default_factory=dict)

    def add(self, rank: int, sums: npt.NDArray[np.uint64]) -> None:
        self.differ = self.differ | (self.first != sums)
        self.variant[rank] = blake2b(sums.tobytes(), digest_size=8).hexdigest()

    def diverging_ranks(self) -> list[int]:
        """Those that are not of the majority; none if there is no majority."""
        votes = Counter(self.variant.values())
        most, count = votes.most_common(1)[0]
        if 2 * count <= len(self.variant):
            return []
        return sorted(rank for rank, variant in self.variant.items() if variant != most)


_Differing = tuple[_Group, npt.NDArray[np.bool_]]
"""Replicas, and by row whether it is one that differs."""


@dataclass(slots=True)
class _Check:
    step: int
    groups: dict[str, _Group] = field(default_factory=dict)
    ranks: list[int] = field(default_factory=list)
    differs_ms: int | None = None


@dataclass(slots=True)
class _State:
    checks: list[_Check] = field(default_factory=list)
    decided: int = -1
    alike: dict[str, StateArray] = field(default_factory=dict)
    """For each group, by row, whether its replicas agreed at the first check."""
    moved: dict[str, StateArray] = field(default_factory=dict)
    """The same: whether they agreed when it had changed, and had never differed before."""
    parted: dict[str, StateArray] = field(default_factory=dict)
    """The same: whether they have differed since, before that."""
    last: dict[str, StateArray] = field(default_factory=dict)
    """The checksums of the check before."""


class ReplicaDivergence(Rule[ReplicaDivergenceParams, _State]):
    """Critical if replicas agreed before; never requests a stop."""

    meta = RuleMeta(
        name="replica_divergence",
        version=2,
        family="numerical",
        meaning="Replicas of a data-parallel training have different weights.",
        severity="critical",
        available="maybe",
        inputs=(tensors(CHECKSUMS),),
        capture_hint="checksums of the parameters are captured with more than one rank",
        remedy="Go back to the last checkpoint before it, remove the machine of the deviating rank "
        "and test it. If it happens again, look for code that only some ranks run: a skipped "
        "average, a parameter outside of DDP, weights that change after the broadcast.",
        does_not_see="Buffers (running means of a batch normalisation), optimizer state, and "
        "weights that differ only between two checks. The size of the difference is not known.",
        branches={
            DIVERGED: "Weights that were the same at the first check are different now. A warning "
            "if nothing had changed them before.",
            NEVER: "No weight was ever the same: each rank seems to train on its own. A warning.",
        },
        params=ReplicaDivergenceParams,
        resolve_after_steps=0,
    )
    state_type = _State

    def next_due_ms(self) -> int | None:
        dues = [c.differs_ms for c in self.state.checks if c.differs_ms is not None]
        return min(dues) + HOLD_MS if dues else None

    def on_tensors(self, frame: TensorFrame, at: Moment) -> Outcomes:
        state, rank, sums = self.state, frame.origin.rank, frame.count("checksum")
        kept = [i for i, name in enumerate(frame.rows) if _FLAT not in name]
        if sums is None or not kept or frame.step <= state.decided:
            return
        rows = [frame.rows[i] for i in kept]
        check = next((c for c in state.checks if c.step == frame.step), None)
        if check is None:
            check = _Check(frame.step)
            state.checks = sorted([*state.checks, check], key=lambda c: c.step)
        # A summary in parts: each is compared with the same part.
        key = f"{rows[0]}|{rows[-1]}|{len(rows)}"
        own = np.asarray(sums[kept], np.uint64)
        group = check.groups.setdefault(key, _Group(rows, own, np.zeros(len(rows), bool)))
        if group.rows != rows or rank in group.variant:
            return
        group.add(rank, own)
        if rank not in check.ranks and frame.part == frame.parts - 1:
            check.ranks.append(rank)
        if check.differs_ms is None and group.differ.any():
            check.differs_ms = at.now_ms
        if len(check.ranks) >= at.run.world_size:
            yield from self._decide_until(check.step)
        elif len(state.checks) > KEPT:
            yield from self._decide_until(state.checks[0].step)

    def on_timer(self, at: Moment) -> Outcomes:
        due = [
            c.step
            for c in self.state.checks
            if c.differs_ms is not None and c.differs_ms + HOLD_MS <= at.now_ms
        ]
        yield from self._decide_until(max(due, default=-1))

    def on_event(self, data: RunData, at: Moment) -> Outcomes:
        if isinstance(data, RunEnded) and at.run.ended and self.state.checks:
            yield from self._decide_until(self.state.checks[-1].step)

    def _decide_until(self, step: int) -> Outcomes:
        state = self.state
        while state.checks and state.checks[0].step <= step:
            check = state.checks.pop(0)
            state.decided = check.step
            yield from self._decide(check)

    def _decide(self, check: _Check) -> Outcomes:
        several = {k: g for k, g in check.groups.items() if len(g.variant) > 1}
        if not several:
            return
        diverged: list[_Differing] = []
        unmoved: list[_Differing] = []
        never: list[_Group] = []
        for key, group in several.items():
            differ = group.differ
            before, moved = self._history(key, group)
            if (differ & moved).any():
                diverged.append((group, differ & moved))
            if (differ & before & ~moved).any():
                unmoved.append((group, differ & before & ~moved))
            if differ.all() and not (differ & before).any():
                never.append(group)
        for about, found in ((DIVERGED, diverged), (_UNMOVED, unmoved)):
            if found:
                yield self._diverged(about, check.step, found)
            else:
                yield Clear(check.step, about=about)
        if len(never) == len(several):
            yield self._never(check.step, never)
        else:
            yield Clear(check.step, about=NEVER)

    def _history(
        self, key: str, group: _Group
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """By row, with this check: whether it agreed at the first one, and when it had changed."""
        state, sums, differ = self.state, group.first, group.differ
        alike, last = state.alike.get(key), state.last.get(key)
        state.last[key] = sums
        if alike is None or last is None or not len(alike) == len(last) == len(differ):
            # What does not agree at the first check never has to: replicas that drift between
            # averages may agree by chance later.
            state.alike[key] = ~differ
            state.moved[key] = state.parted[key] = np.zeros(len(differ), bool)
            return ~differ, state.moved[key]
        # Nor has what differs before it has agreed in motion.
        parted = state.parted[key] | (differ & alike & ~state.moved[key])
        moved = state.moved[key] | (alike & ~differ & ~parted & (sums != last))
        state.parted[key], state.moved[key] = parted, moved
        return alike, moved

    def _diverged(self, about: str, step: int, diverged: list[_Differing]) -> Finding:
        group, differ = diverged[0]
        where = np.flatnonzero(differ)
        diverging = sorted({rank for each, _ in diverged for rank in each.diverging_ranks()})
        first, ranks = group.rows[int(where[0])], sorted(group.variant)
        more = sum(int(d.sum()) for _, d in diverged) - 1
        if diverging:
            who = (
                f"rank {diverging[0]}"
                if len(diverging) == 1
                else f"{len(diverging)} ranks, first rank {diverging[0]},"
            )
            verb = "has" if len(diverging) == 1 else "have"
            what = f"{who} {verb} other weights than the majority of {len(ranks)} replicas"
        else:
            what = f"the replicas on ranks {_list(ranks)} have different weights"
        sure = about == DIVERGED
        return Finding(
            about=about,
            branch=DIVERGED,
            severity=None if sure else "warning",
            subject=Subject(kind="rank", name=f"rank {diverging[0]}")
            if diverging
            else Subject(kind="tensor", name=first, collection="weights"),
            reason=f"{what} at step {step}, and agreed before"
            f"{'' if sure else ', but only until they first changed'}: {first}"
            f"{f' and {more} more tensors' if more else ''}",
            first_step=step,
            first_rank=diverging[0] if diverging else ranks[0],
            remedy=None
            if sure
            else "If each rank is meant to have its own weights (local SGD, experts), switch this "
            "rule off. Otherwise check that gradients are averaged across ranks, and that frozen "
            "weights were not changed on one of them.",
            evidence=self._evidence(
                group, diverging, more + 1, named(group.rows, where[1:].tolist())
            ),
        )

    def _never(self, step: int, groups: list[_Group]) -> Finding:
        group = groups[0]
        ranks = sorted(group.variant)
        return Finding(
            about=NEVER,
            branch=NEVER,
            severity="warning",
            subject=Subject(kind="run", name="replicas"),
            reason=f"ranks {_list(ranks)} have no weight in common at step {step}, nor before: "
            "each seems to train on its own",
            first_step=step,
            first_rank=ranks[0],
            remedy="Wrap the model in DistributedDataParallel, or average gradients or weights. If "
            "each rank is meant to have its own weights, switch this rule off.",
            evidence=self._evidence(group, [], len(group.rows), tuple(group.rows[1:33])),
        )

    def _evidence(
        self, group: _Group, diverging: list[int], rows: int, also: tuple[str, ...]
    ) -> Evidence:
        return Evidence(
            facts=(
                fact("replicas", len(group.variant)),
                fact("different_weights", len(set(group.variant.values()))),
                fact("tensors", rows),
                *((fact("diverging_ranks", _list(diverging)),) if diverging else ()),
            ),
            followed=max(0, rows - 1),
            also=also,
            explanation="by checksums of the bits of each parameter after this step"
            + (
                ""
                if diverging
                else "; two replicas, or no majority: which one is right is not known"
            ),
        )


def _list(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown}, …" if len(ranks) > 8 else shown
