"""Numbers that a run sends: tensor summaries, step scalars, system samples.

Each is a frozen value with `encode()` and `decode()`; the frame layout is in
`tocsin.schemas.frames`. Columns are found by name, never by position; one frame has one set of
columns and no missing cells.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, Final, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field

from tocsin.schemas.errors import MalformedRecord
from tocsin.schemas.frames import Array, FrameHeader, decode_frame, encode_frame

Mode = Literal["train", "eval", "predict", "global"]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Counts = npt.NDArray[np.uint64]

COUNT_COLUMNS: Final = ("numel", "zeros", "nans", "infs")
"""Columns of a tensor summary that are exact counts (uint64)."""

STATISTIC_COLUMNS: Final = ("min", "max", "mean", "std", "l1", "l2", "absmax")
"""Columns of a tensor summary that are float32, over the finite values of the tensor."""

MAX_FRAME_BYTES: Final = 900_000
"""A summary is split into parts of at most this many encoded bytes."""


class _Header(FrameHeader):
    model_config = ConfigDict(frozen=True, extra="ignore")

    run_id: str = Field(max_length=200)
    incarnation: str = Field(max_length=64)
    rank: int = Field(ge=0)
    world_size: int = Field(ge=1)


class _TensorHeader(_Header):
    step: int = Field(ge=0)
    mode: Mode
    collection: str = Field(max_length=64)
    every: int = Field(ge=1)
    part: int = Field(ge=0)
    parts: int = Field(ge=1)
    at_us: int = Field(ge=0)
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    count_columns: tuple[str, ...]


class _StepHeader(_Header):
    mode: Mode
    columns: tuple[str, ...]


class _SystemHeader(_Header):
    node: str = Field(max_length=255)
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speaker:
    """Which rank of which incarnation of which run says it."""

    run_id: str
    incarnation: str
    rank: int = 0
    world_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorFrame:
    """Summaries of the tensors of one collection at one step of one rank.

    `values[i, j]` is `columns[j]` of tensor `rows[i]`, over its finite values; `counts[i, j]`
    likewise for `count_columns`. Rows stand in backward order for gradients (the first to be
    computed first) and in forward order elsewhere. `every` is the interval in steps that was in
    force; `at_us` the sender's clock (Unix, microseconds).
    """

    type: ClassVar[str] = "tensors"
    version: ClassVar[int] = 1

    speaker: Speaker
    step: int
    collection: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: Floats
    count_columns: tuple[str, ...]
    counts: Counts
    at_us: int = 0
    mode: Mode = "train"
    every: int = 1
    part: int = 0
    parts: int = 1

    def column(self, name: str) -> Floats | None:
        """One statistic of all rows, float32[rows], or None if it was not captured."""
        return self.values[:, self.columns.index(name)] if name in self.columns else None

    def count(self, name: str) -> Counts | None:
        """One count of all rows, uint64[rows], or None if it was not captured."""
        return (
            self.counts[:, self.count_columns.index(name)] if name in self.count_columns else None
        )

    def encode(self) -> bytes:
        """The value of the bus record."""
        header = _TensorHeader(
            **_speaker_fields(self.speaker),
            step=self.step,
            mode=self.mode,
            collection=self.collection,
            every=self.every,
            part=self.part,
            parts=self.parts,
            at_us=self.at_us,
            rows=self.rows,
            columns=self.columns,
            count_columns=self.count_columns,
        )
        return encode_frame(header, {"values": self.values, "counts": self.counts})

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """Raises MalformedRecord, and nothing else."""
        header, arrays = decode_frame(value, _TensorHeader)
        rows = len(header.rows)
        return cls(
            speaker=_speaker(header),
            step=header.step,
            mode=header.mode,
            collection=header.collection,
            every=header.every,
            part=header.part,
            parts=header.parts,
            at_us=header.at_us,
            rows=header.rows,
            columns=header.columns,
            values=_floats(arrays, "values", (rows, len(header.columns))),
            count_columns=header.count_columns,
            counts=_counts(arrays, "counts", (rows, len(header.count_columns))),
        )

    def split(self, max_bytes: int = MAX_FRAME_BYTES) -> tuple[Self, ...]:
        """This frame, or parts of it of at most `max_bytes` each (but at least one row)."""
        row_bytes = 4 * len(self.columns) + 8 * len(self.count_columns) + 4
        sizes = [row_bytes + len(name.encode()) for name in self.rows]
        cuts, size = [0], 2048
        for i, more in enumerate(sizes):
            if size + more > max_bytes and i > cuts[-1]:
                cuts.append(i)
                size = 2048
            size += more
        if len(cuts) == 1:
            return (self,)
        cuts.append(len(self.rows))
        return tuple(
            type(self)(
                speaker=self.speaker,
                step=self.step,
                mode=self.mode,
                collection=self.collection,
                every=self.every,
                at_us=self.at_us,
                part=part,
                parts=len(cuts) - 1,
                rows=self.rows[a:b],
                columns=self.columns,
                values=self.values[a:b],
                count_columns=self.count_columns,
                counts=self.counts[a:b],
            )
            for part, (a, b) in enumerate(pairwise(cuts))
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepFrame:
    """Scalars of one or many steps of one rank: losses, learning rates, gradient norm, step time.

    `values[i, j]` is `columns[j]` at step `steps[i]`; `at_us[i]` the sender's clock at the end of
    that step (Unix, microseconds). Columns of the emitter: `loss`, `gradient_norm` (L2 over all
    parameters as the optimizer saw them), `gradient_nonfinite` (tensors with NaN or Inf), `lr.0` …
    (per parameter group), `step_time_s`. A user's own scalars are `log.NAME`.
    """

    type: ClassVar[str] = "steps"
    version: ClassVar[int] = 1

    speaker: Speaker
    steps: Counts
    at_us: Counts
    columns: tuple[str, ...]
    values: Floats
    mode: Mode = "train"

    def column(self, name: str) -> Floats | None:
        """One scalar over the steps, float32[steps], or None if it is not in this frame."""
        return self.values[:, self.columns.index(name)] if name in self.columns else None

    def encode(self) -> bytes:
        """The value of the bus record."""
        header = _StepHeader(**_speaker_fields(self.speaker), mode=self.mode, columns=self.columns)
        return encode_frame(
            header, {"steps": self.steps, "at_us": self.at_us, "values": self.values}
        )

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """Raises MalformedRecord, and nothing else."""
        header, arrays = decode_frame(value, _StepHeader)
        n = arrays["steps"].shape[0] if "steps" in arrays and arrays["steps"].ndim == 1 else -1
        return cls(
            speaker=_speaker(header),
            mode=header.mode,
            steps=_counts(arrays, "steps", (n,)),
            at_us=_counts(arrays, "at_us", (n,)),
            columns=header.columns,
            values=_floats(arrays, "values", (n, len(header.columns))),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SystemFrame:
    """System samples of one node.

    `values[i, j]` is `columns[j]` at `at_us[i]` (Unix, microseconds); float64.

    Columns carry their unit: `cpu.percent`, `memory.used_bytes`, `gpu.0.utilization_percent`,
    `disk.free_bytes`, …
    """

    type: ClassVar[str] = "system"
    version: ClassVar[int] = 1

    speaker: Speaker
    node: str
    at_us: Counts
    columns: tuple[str, ...]
    values: Doubles = field(repr=False)

    def column(self, name: str) -> Doubles | None:
        """One quantity over the samples, float64[samples], or None if it is not in this frame."""
        return self.values[:, self.columns.index(name)] if name in self.columns else None

    def encode(self) -> bytes:
        """The value of the bus record."""
        header = _SystemHeader(
            **_speaker_fields(self.speaker), node=self.node, columns=self.columns
        )
        return encode_frame(header, {"at_us": self.at_us, "values": self.values})

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """Raises MalformedRecord, and nothing else."""
        header, arrays = decode_frame(value, _SystemHeader)
        n = arrays["at_us"].shape[0] if "at_us" in arrays and arrays["at_us"].ndim == 1 else -1
        values = _block(arrays, "values", (n, len(header.columns)), np.float64)
        return cls(
            speaker=_speaker(header),
            node=header.node,
            at_us=_counts(arrays, "at_us", (n,)),
            columns=header.columns,
            values=values.astype(np.float64, copy=False),
        )


Frame = TensorFrame | StepFrame | SystemFrame


def _speaker_fields(speaker: Speaker) -> dict[str, Any]:
    return {
        "run_id": speaker.run_id,
        "incarnation": speaker.incarnation,
        "rank": speaker.rank,
        "world_size": speaker.world_size,
    }


def _speaker(header: _Header) -> Speaker:
    return Speaker(
        run_id=header.run_id,
        incarnation=header.incarnation,
        rank=header.rank,
        world_size=header.world_size,
    )


def _block(arrays: dict[str, Array], name: str, shape: tuple[int, ...], dtype: type) -> Array:
    array = arrays.get(name)
    if array is None:
        raise MalformedRecord(f"frame has no array {name!r}")
    if array.shape != shape or array.dtype != np.dtype(dtype):
        raise MalformedRecord(
            f"frame array {name!r}: {array.dtype}{list(array.shape)}, "
            f"expected {np.dtype(dtype)}{list(shape)}"
        )
    return array


def _floats(arrays: dict[str, Array], name: str, shape: tuple[int, ...]) -> Floats:
    return _block(arrays, name, shape, np.float32).astype(np.float32, copy=False)


def _counts(arrays: dict[str, Array], name: str, shape: tuple[int, ...]) -> Counts:
    return _block(arrays, name, shape, np.uint64).astype(np.uint64, copy=False)
