"""Made runs with system samples, for the rules that watch nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tocsin.schemas.configuration.sections import RuleEntry
from tocsin.schemas.records.frames import StepFrame, SystemFrame
from tocsin.schemas.records.runs import RunData
from tocsin.stream_rules.engine.configured_rules import RuleSpec, rule_specs
from tocsin.stream_rules.outcomes import Moment, Outcome
from tocsin.stream_rules.rule import AnyRule
from tocsin.stream_rules.testing import RunBuilder, issues_of

GIB = float(1 << 30)
Samples = npt.NDArray[np.float64] | Sequence[float]
Columns = Mapping[str, "Samples | float"]


def run_of(
    columns: Columns,
    *,
    node: str = "node",
    every_s: float = 0.5,
    steps: bool = True,
    frame: int | None = None,
) -> RunBuilder:
    """Samples as a sampler packs them: ten in a frame; of hours fifty, to be quick."""
    run = RunBuilder()
    run.started()
    if steps:
        run.steps([0], loss=1.0)
    add_samples(run, columns, node=node, every_s=every_s, frame=frame)
    return run


def add_samples(
    run: RunBuilder,
    columns: Columns,
    *,
    node: str = "node",
    every_s: float = 0.5,
    frame: int | None = None,
) -> None:
    """More samples of a run; a single number is that of each sample."""
    length = max((len(c) for c in columns.values() if not isinstance(c, float)), default=1)
    frame = frame or (10 if length <= 2000 else 50)
    table = {name: np.broadcast_to(np.asarray(c, float), (length,)) for name, c in columns.items()}
    for i in range(0, length, frame):
        part = {name: column[i : i + frame] for name, column in table.items()}
        run.system(part, node=node, every_s=every_s)


def told(run: RunBuilder, specs: tuple[RuleSpec, ...]) -> list[tuple[str, str]]:
    """Severity and state of what is said, but that it goes on."""
    issues = issues_of(run.records, specs=specs)
    return [(issue.severity, issue.state) for issue in issues if issue.state != "ongoing"]


def gpu(
    percent: Samples | float,
    *,
    number: int = 0,
    memory_percent: Samples | float = 50.0,
    of_job: Samples | float | None = None,
) -> dict[str, Samples | float]:
    """The columns of one GPU of 80 GB."""
    memory = 0.8e9 * np.asarray(memory_percent, float)
    found: dict[str, Samples | float] = {
        f"gpu.{number}.utilization_percent": percent,
        f"gpu.{number}.memory_used_bytes": memory if memory.ndim else float(memory),
        f"gpu.{number}.memory_total_bytes": 80e9,
    }
    if of_job is not None:
        found[f"gpu.{number}.of_job"] = of_job
    return found


def sagemaker(alias: str) -> tuple[RuleSpec, ...]:
    """The rule of that alias alone, as SageMaker Debugger documents it."""
    entry = RuleEntry(name=alias, use=alias, preset="sagemaker")
    return rule_specs([entry], defaults="none")


def restarted(specs: tuple[RuleSpec, ...]) -> tuple[RuleSpec, ...]:
    """The same rules, each saved and taken back after each record."""
    return tuple(replace(spec, rule=_restarting(spec.rule)) for spec in specs)


def _restarting(rule: type[AnyRule]) -> type[AnyRule]:
    class Restarting(rule):  # type: ignore[misc, valid-type]  # a class of the moment
        """Begins anew behind each record."""

        def _again(self, outcomes: Iterable[Outcome]) -> list[Outcome]:
            found = list(outcomes)
            saved = self.snapshot()
            self.state: Any = self.state_type()
            self.restore(saved)
            return found

        def on_steps(self, frame: StepFrame, at: Moment) -> list[Outcome]:
            return self._again(super().on_steps(frame, at))

        def on_system(self, frame: SystemFrame, at: Moment) -> list[Outcome]:
            return self._again(super().on_system(frame, at))

        def on_event(self, data: RunData, at: Moment) -> list[Outcome]:
            return self._again(super().on_event(data, at))

    return Restarting
