"""The data loader: its settings, and how long the training waits for batches."""

from __future__ import annotations

from typing import Final

import numpy as np

from tocsin.console.charts import histogram, value_text
from tocsin.console.report.numbers import RunNumbers
from tocsin.console.report.section import Figure, Section, Table, not_captured
from tocsin.console.report.sections.shared import remedies, reported, statistics_table, worst
from tocsin.schemas.records.runs import DataLoaderSeen, RunStarted
from tocsin.schemas.text import plain_line, share_text

KEY: Final = "data_loader"
_TITLE: Final = "Data loader"
_WAIT: Final = "waiting for data"
_STARVES_PERCENT: Final = 20.0
_FEW: Final = 0.7
_MANY: Final = 2.0


def data_loader(numbers: RunNumbers) -> Section:
    """Workers against cores (70 to 200 %, as in the reference), pinned memory, prefetch, waits."""
    loaders = [event for event in numbers.events() if isinstance(event, DataLoaderSeen)]
    times = numbers.step_times()
    waits = None if times is None else times.parts.get(_WAIT)
    if not loaders and waits is None:
        return not_captured(
            KEY, _TITLE, "No data loader was seen.",
            "Data loaders of PyTorch are captured by themselves; with another one, time it: "
            '`with run.phase("data"): …`.',
        )  # fmt: skip
    issues = numbers.found_by("dataloader")
    findings, notes, figures, charts, tables = [], [], [], [], []
    starves = False
    if times is not None and waits is not None:
        share = 100 * float(waits.sum()) / (float(times.own_s.sum()) or 1.0)
        starves = share > _STARVES_PERCENT
        figures += [
            Figure("share of the step time spent waiting for data", share, "percent"),
            Figure("median wait for a batch", float(np.median(waits)), "s"),
        ]
        findings.append(
            f"The training waits for its batches for {share_text(share)} % of the step time, "
            f"{value_text(float(np.median(waits)), 's')} in the median."
        )
        charts.append(histogram(waits, title="Wait for a batch", unit="s", name="steps"))
        caption = "Wait for the batch of a step"
        tables.append(statistics_table(("",), [(("wait",), waits, "s")], caption))
    train = [one for one in loaders if one.mode == "train"]
    if train:
        notes = _notes(train[-1], starves=starves, ranks=_neighbours(numbers, train))
    if loaders:
        tables.append(_settings(loaders))
    findings.append(reported(issues))
    advice = remedies(issues) or " ".join(notes)
    return Section(
        key=KEY, title=_TITLE, finding=" ".join(filter(None, findings)) or "See the settings.",
        advice=advice, status=worst(issues) if issues else ("info" if notes else "good"),
        figures=figures, charts=charts, tables=tables,
    )  # fmt: skip


def _neighbours(numbers: RunNumbers, loaders: list[DataLoaderSeen]) -> int:
    """How many ranks have such a loader on the node of the last one: they share its cores."""
    nodes = {
        event.rank: event.node
        for event in numbers.events()
        if isinstance(event, RunStarted) and event.role == "trainer"
    }
    node = nodes.get(loaders[-1].rank, "")
    return len({one.rank for one in loaders if nodes.get(one.rank, "") == node})


def _notes(loader: DataLoaderSeen, *, starves: bool, ranks: int) -> list[str]:
    notes = []
    workers = loader.workers * ranks
    if loader.cores is not None and workers > _MANY * loader.cores:
        notes.append(
            f"{workers:,} workers share {loader.cores:,} cores: use fewer than twice as many."
        )
    if starves and loader.workers == 0:
        notes.append("The training process loads its batches itself: set num_workers.")
    elif starves and loader.cores is not None and workers < _FEW * loader.cores:
        notes.append(f"{workers:,} workers on {loader.cores:,} cores: use more of them.")
    elif starves:
        notes.append("Make a batch cheaper: preprocess in advance, or read larger files.")
    if loader.gpu and not loader.pin_memory:
        notes.append("Set pin_memory=True: copies to the GPU can then overlap with its work.")
    if starves and loader.workers and not loader.persistent_workers:
        notes.append("Set persistent_workers=True: workers are restarted in each epoch.")
    return notes


def _settings(loaders: list[DataLoaderSeen]) -> Table:
    columns = (
        "rank", "mode", "data set", "samples", "batch", "workers", "cores", "pinned", "prefetch",
        "persistent",
    )  # fmt: skip
    rows = dict.fromkeys(
        (
            f"{one.rank:,}", one.mode, plain_line(one.dataset) or "-", _number(one.samples),
            _number(one.batch_size), f"{one.workers:,}", _number(one.cores),
            "yes" if one.pin_memory else "no", _number(one.prefetch_factor),
            "yes" if one.persistent_workers else "no",
        )
        for one in loaders
    )  # fmt: skip
    return Table(columns, list(rows)[:40], "Settings", frozenset({0, 3, 4, 5, 6, 8}))


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
