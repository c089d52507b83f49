"""Step scalars of a run as records, made for tests of what reads telemetry."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from support.records.issues import NOW_MS, TOPICS, incarnation
from tocsin.bus.port import Outgoing, Partition, Record
from tocsin.schemas.records.frames import Mode, RecordOrigin, StepFrame
from tocsin.schemas.records.wire import meta_of
from tocsin.schemas.topics import telemetry_partition


def written_steps(
    run: str,
    values: Mapping[int, float],
    *,
    training: int = 0,
    rank: int = 0,
    mode: Mode = "train",
    column: str = "loss",
) -> Outgoing:
    """One frame with one column: step -> value."""
    frame = StepFrame(
        origin=RecordOrigin(run_id=run, incarnation=incarnation(run, training), rank=rank),
        steps=np.array(list(values), np.uint64),
        at_us=np.zeros(len(values), np.uint64),
        columns=(column,),
        values=np.array([list(values.values())], np.float32).T,
        mode=mode,
    )
    place = Partition(TOPICS.telemetry, telemetry_partition(run))
    return Outgoing(place, run.encode(), frame.encode(), meta_of(frame, rank=rank).headers())


def steps(
    run: str,
    values: Mapping[int, float],
    *,
    at_ms: int = NOW_MS,
    offset: int = 0,
    training: int = 0,
    rank: int = 0,
    mode: Mode = "train",
    column: str = "loss",
) -> Record:
    """The same as a reader gets it."""
    made = written_steps(run, values, training=training, rank=rank, mode=mode, column=column)
    return Record(made.partition, offset, at_ms, made.key, made.value, made.headers)
