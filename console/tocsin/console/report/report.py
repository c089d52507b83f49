"""A report as a value: its verdict, its facts and its sections in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tocsin.console.report.numbers import RunNumbers, Source
from tocsin.console.report.section import Figure, Section, Status
from tocsin.console.report.sections.batch_size import batch_size
from tocsin.console.report.sections.bottlenecks import cpu_bottlenecks, io_bottlenecks
from tocsin.console.report.sections.data_loader import data_loader
from tocsin.console.report.sections.goodput import goodput_section
from tocsin.console.report.sections.gpu_utilization import gpu_utilization
from tocsin.console.report.sections.issues import issues
from tocsin.console.report.sections.load_balancing import load_balancing
from tocsin.console.report.sections.memory import memory
from tocsin.console.report.sections.outliers import outliers
from tocsin.console.report.sections.predictions import predictions
from tocsin.console.report.sections.rules_summary import rules_summary
from tocsin.console.report.sections.step_durations import step_durations
from tocsin.console.report.sections.step_phases import step_phases
from tocsin.console.report.sections.stop import stop
from tocsin.console.report.sections.system_usage import system_usage
from tocsin.console.report.sections.tensors import tensors
from tocsin.console.report.sections.training_curves import training_curves
from tocsin.console.report.sections.trees import trees
from tocsin.console.report.verdict import facts, status_of, verdict
from tocsin.schemas.compute_estimates import NO_PRICES
from tocsin.schemas.configuration.sections import PricesConfig

PERFORMANCE: Final[Sequence[Callable[[RunNumbers], Section]]] = (
    system_usage,
    step_phases,
    rules_summary,
    step_durations,
    gpu_utilization,
    batch_size,
    cpu_bottlenecks,
    io_bottlenecks,
    load_balancing,
    memory,
    outliers,
    data_loader,
)
"""The twelve sections of the reference's profiling report, in its order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that a report says, apart from how it is shown."""

    run_id: str
    incarnation: str
    made_ms: int
    status: Status
    verdict: str
    facts: Sequence[Figure]
    sections: Sequence[Section]


def report_of(run: Source, *, now_ms: int, prices: PricesConfig = NO_PRICES) -> Report:
    """Read the run and judge it. Blocks as reading the run does; raises what that raises."""
    numbers = RunNumbers(run)
    found: list[Section | None] = [
        training_curves(numbers),
        issues(numbers, prices),
        stop(numbers, prices),
        goodput_section(numbers),
        *(section(numbers) for section in PERFORMANCE),
        tensors(numbers),
        predictions(numbers),
        trees(numbers),
    ]
    sections = [section for section in found if section is not None]
    return Report(
        run_id=run.run_id,
        incarnation=run.incarnation,
        made_ms=now_ms,
        status=status_of(numbers),
        verdict=verdict(numbers, sections, prices, now_ms),
        facts=facts(numbers, now_ms),
        sections=sections,
    )
