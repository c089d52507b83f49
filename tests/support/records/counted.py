"""Frames that hold counts and numbers of their own: labels, confusion, tokens, routers, …"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tocsin.schemas.configuration.sections import RuleEntry
from tocsin.schemas.records.frames import Mode, TensorFrame
from tocsin.stream_rules.engine.configured_rules import RuleSpec, rule_specs
from tocsin.stream_rules.testing import RunBuilder

Table = Sequence[float] | npt.NDArray[np.floating] | npt.NDArray[np.integer]


def add(
    run: RunBuilder,
    step: int,
    collection: str,
    rows: Sequence[str],
    columns: Mapping[str, Table] | None = None,
    counts: Mapping[str, Table] | None = None,
    *,
    rank: int = 0,
    mode: Mode = "train",
    every: int = 100,
) -> None:
    """Append a frame with exactly these columns and counts."""
    numbers = [np.asarray(values, np.float64) for values in (columns or {}).values()]
    whole = [np.asarray(values, np.float64) for values in (counts or {}).values()]
    n = len(rows)
    values = np.column_stack(numbers) if numbers else np.zeros((n, 0))
    counted = np.column_stack(whole) if whole else np.zeros((n, 0))
    run.add(
        TensorFrame(
            origin=run.origin(rank),
            step=step,
            collection=collection,
            rows=tuple(rows),
            columns=tuple(columns or {}),
            values=values.astype(np.float32),
            count_columns=tuple(counts or {}),
            counts=counted.astype(np.uint64),
            at_us=run.now_ms * 1000,
            mode=mode,
            every=every,
        ),
        rank=rank,
    )


def classes(
    run: RunBuilder,
    step: int,
    table: Sequence[Sequence[int]] | npt.NDArray[np.integer],
    *,
    mode: Mode = "train",
    rank: int = 0,
) -> None:
    """Append what the emitter sends of a confusion table: `labels` and `confusion`."""
    counts = np.asarray(table)
    names = [str(i) for i in range(len(counts))]
    add(
        run,
        step,
        "labels",
        names,
        counts={
            "labels": counts.sum(1),
            "predictions": counts.sum(0),
            "hits": counts.diagonal(),
        },
        mode=mode,
        rank=rank,
    )
    columns = {name: counts[:, i] for i, name in enumerate(names)}
    add(run, step, "confusion", names, counts=columns, mode=mode, rank=rank)


def as_sagemaker(rule: str, **params: str) -> tuple[RuleSpec, ...]:
    """The rule alone, as the reference has it."""
    entry = RuleEntry(name=rule, use=rule, preset="sagemaker", params=params)
    return rule_specs([entry], defaults="none")
