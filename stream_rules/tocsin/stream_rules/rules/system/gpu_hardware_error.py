"""`gpu_hardware_error`: a GPU reports an error that no program can fix.

Counts are compared with the first ones of the run: earlier errors do not count. A sampler counts
Xids from its own start, and a node agent from its first sample of the run; the first count only
matters if sampling of the node began within 30 s of the run's start. Branches:

- ecc: uncorrectable memory errors (a corrupt value was found but could not be corrected);
- retired_pages: pages of its memory were retired, rows remapped after an uncorrectable error, or a
  remapping has failed;
- xid: the driver has written an error (Xid) into the kernel log, if tocsin may read the log.
  According to NVIDIA's table, Xids 8, 13, 31, 32, 43, 45, 68, 69 and 109 usually come from a
  program (an illegal address, an exception in a kernel, a killed process): they are a warning. So
  are 63 and 92, memory that was repaired in time.

Such an error cannot be undone, so an issue stays open until the run ends; it also covers later
errors of the same GPU and branch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from tocsin.schemas.records.frames import Doubles, SystemFrame
from tocsin.schemas.records.issues import Severity, Subject
from tocsin.schemas.records.runs import RunData, RunStarted
from tocsin.stream_rules.outcomes import Finding, Holds, Moment, Outcomes, fact
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, event, system
from tocsin.stream_rules.signals.gpus import Gpu, gpus_with

Branch = Literal["ecc", "retired_pages", "xid"]

_COUNTS: Final[dict[str, tuple[Branch, str]]] = {
    "ecc_uncorrected_errors": ("ecc", "uncorrectable memory errors"),
    "retired_pages": ("retired_pages", "retired pages"),
    "remapped_rows_uncorrected": ("retired_pages", "rows remapped after uncorrectable errors"),
    "remapping_failed": ("retired_pages", "failed row remappings"),
    "xids": ("xid", "errors in the kernel log (Xid)"),
}

LESSER_XIDS: Final = frozenset({8, 13, 31, 32, 43, 45, 63, 68, 69, 92, 109})
"""Most often a program's own, or put right: a warning."""

FRESH_MS: Final = 30_000
"""A node whose first sample comes within this time of the run's beginning is sampled from then."""

_MEANINGS: Final = {
    13: "an exception in a kernel",
    31: "a kernel used an address that is not its own",
    43: "a kernel of the program was stopped",
    45: "a program was cleaned up after its end",
    48: "an uncorrectable memory error",
    63: "a page or row of its memory was retired",
    64: "a page or row of its memory could not be retired",
    74: "an NVLink error",
    79: "it has fallen off the bus",
    92: "many correctable memory errors",
    94: "a contained memory error",
    95: "an uncontained memory error",
    119: "its controller (GSP) does not answer",
}


class GpuHardwareErrorParams(Params):
    """The rule has no parameters."""


@dataclass(slots=True)
class _Count:
    last: float
    begun: str = ""
    first_ms: int = 0
    more: float = 0.0
    ours: bool = False
    """Whether the GPU has been the job's since it was counted."""


@dataclass(slots=True)
class _State:
    heard_us: dict[str, int] = field(default_factory=dict)
    counts: dict[str, _Count] = field(default_factory=dict)
    begun: bool = False
    """Whether the beginning of the run was seen."""


class GpuHardwareError(Rule[GpuHardwareErrorParams, _State]):
    """One episode for each GPU and branch; it requests no stop, since that fixes no GPU."""

    meta = RuleMeta(
        name="gpu_hardware_error",
        version=1,
        family="system",
        meaning="A GPU has reported an error of its memory or of the device during this run.",
        severity="critical",
        available="later",
        inputs=(
            *(system(f"gpu.*.{name}") for name in _COUNTS),
            system("gpu.*.xid", optional=True),
            system("gpu.*.of_job", optional=True),
            event(RunStarted, optional=True),
        ),
        capture_hint="NVIDIA GPUs are sampled on the node through its driver; Xid errors where the "
        "kernel log may be read",
        remedy="Results since then may be wrong: go back to an earlier checkpoint. Drain the node, "
        "reset the GPU, and have it tested (dcgmi diag) before it is used again.",
        params=GpuHardwareErrorParams,
        branches={
            "ecc": "uncorrectable errors of its memory",
            "retired_pages": "pages retired, rows remapped after an uncorrectable error",
            "xid": "errors that the driver wrote into the kernel log; some are a warning",
        },
        does_not_see="Memory errors that were corrected, and silent ones: see replica_divergence. "
        "Xid errors where the kernel log may not be read.",
        resolve_after_steps=0,
    )
    state_type = _State

    def on_event(self, data: RunData, at: Moment) -> Outcomes:
        self.state.begun |= isinstance(data, RunStarted)
        return ()

    def on_system(self, frame: SystemFrame, at: Moment) -> Outcomes:
        heard_us = self.state.heard_us.get(frame.node)
        if not len(frame.at_us) or (heard_us is not None and int(frame.at_us[0]) <= heard_us):
            return
        # A column that comes later began when its first error did.
        new = heard_us is not None or (
            self.state.begun and at.now_ms - at.run.started_ms <= FRESH_MS
        )
        self.state.heard_us[frame.node] = int(frame.at_us[-1])
        for gpu in gpus_with(frame, *_COUNTS):
            for what, (branch, text) in _COUNTS.items():
                values = gpu.column(what)
                if values is None or not np.isfinite(values).any():
                    continue
                count = self._known(gpu, what, values, from_zero=new and branch == "xid")
                if gpu.is_jobs:
                    count.ours = True
                    yield from self._count(gpu, what, branch, text, count, values, at)

    def _known(self, gpu: Gpu, what: str, values: Doubles, *, from_zero: bool) -> _Count:
        """What was counted so far; of somebody else's GPU as much as there is now."""
        key, counts = f"{gpu.name} {what}", self.state.counts
        finite = values[np.isfinite(values)]
        if not gpu.is_jobs and (key not in counts or not counts[key].ours):
            counts[key] = _Count(float(finite[-1]))
        elif key not in counts:
            counts[key] = _Count(0.0 if from_zero else float(finite[0]))
        return counts[key]

    def _count(
        self,
        gpu: Gpu,
        what: str,
        branch: Branch,
        text: str,
        count: _Count,
        values: Doubles,
        at: Moment,
    ) -> Outcomes:
        known = np.flatnonzero(np.isfinite(values)).tolist()
        rises: list[int] = []
        for i in known:
            value = float(values[i])
            # Another sampler counts from zero, and its first errors are new, too.
            before = 0.0 if value < count.last and branch == "xid" else count.last
            if value > before:
                rises.append(i)
                count.more += value - before
            count.last = value
        if rises:
            if not count.begun:
                count.begun, count.first_ms = f"{at.boot}/{at.seq}", at.now_ms
            yield self._finding(gpu, what, branch, text, count, rises)
        elif count.begun:
            yield Holds(about=f"{branch} {gpu.name}")

    def _finding(
        self, gpu: Gpu, what: str, branch: Branch, text: str, count: _Count, rises: list[int]
    ) -> Finding:
        name = gpu.name if gpu.number != "unknown" else f"a GPU of {gpu.frame.node}"
        facts = [fact(what, count.last), fact("new", count.more)]
        severity: Severity = "critical"
        reason = f"{name} reports {count.more:.0f} new {text} since this run began"
        numbers = gpu.column("xid")
        found = [] if branch != "xid" or numbers is None else numbers[rises].tolist()
        # None is 0, and where the number is not known nothing is reported.
        xids = [int(x) for x in found if math.isfinite(x) and x > 0]
        if xids:
            xid = next((x for x in xids if x not in LESSER_XIDS), xids[-1])
            severity = "warning" if xid in LESSER_XIDS else "critical"
            facts.append(fact("xid", xid))
            reason += f": {xid}"
            reason += f", {_MEANINGS[xid]}" if xid in _MEANINGS else ""
        return Finding(
            about=f"{branch} {gpu.name}",
            branch=branch,
            subject=Subject(kind="device", name=name),
            reason=reason,
            episode=count.begun,
            onset_ms=count.first_ms,
            severity=severity,
            remedy="If the program failed with a CUDA error, check that first; if it happens again "
            "with another program, test the GPU."
            if severity == "warning"
            else None,
            facts=tuple(facts),
            explanation="counted since the first sample of this run",
        )
