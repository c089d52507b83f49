"""Numbers that a run sends: tensor summaries, step scalars, system samples.

Each is a frozen value with `encode()` and `decode()`; the frame layout is in
`tocsin.schemas.records.frame_codec`. Columns are found by name, never by position; one frame has
one set of columns and no missing cells.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from json.encoder import encode_basestring
from typing import Annotated, ClassVar, Final, Self, TypedDict

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, FailFast, Field, model_validator

from tocsin.schemas.errors import MalformedRecord
from tocsin.schemas.records.collections import Mode as Mode
from tocsin.schemas.records.fields import (
    MAX_INT,
    Incarnation,
    Many,
    Positive,
    RunId,
    Step,
    Whole,
)
from tocsin.schemas.records.frame_codec import Array, FrameHeader, decode_frame, encode_frame

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Counts = npt.NDArray[np.uint64]

COUNT_COLUMNS: Final = ("numel", "zeros", "nans", "infs")
"""Columns of a tensor summary that are exact counts (uint64)."""

STATISTIC_COLUMNS: Final = ("min", "max", "mean", "std", "l1", "l2", "absmax")
"""Columns of a tensor summary that are float32, over the finite values of the tensor."""

MAX_FRAME_BYTES: Final = 900_000
"""A summary is split into parts of at most this many encoded bytes."""


_FEW: Final = 32


def _place(name: str, columns: tuple[str, ...], places: dict[str, int]) -> int | None:
    """Where a column stands; `places` is the frame's own, filled once it has more than a few.

    Rules ask for each of them in turn, and a frame may have tens of thousands.
    """
    if len(columns) <= _FEW:
        return columns.index(name) if name in columns else None
    if not places:
        places.update((column, i) for i, column in enumerate(columns))
    return places.get(name)


def _distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) != len(names):
        raise ValueError("a column is there twice")
    return names


Columns = Annotated[tuple[str, ...], FailFast(), AfterValidator(_distinct)]
Micros = Annotated[
    Whole, Field(description="the sender's clock, Unix microseconds", examples=[1795258012250000])
]


class TelemetryHeader(FrameHeader):
    """What each telemetry frame's header contains: the run, the training and the rank."""

    run_id: RunId
    incarnation: Incarnation
    rank: Whole
    world_size: Positive


class TensorHeader(TelemetryHeader):
    """The header of a `TensorFrame`; blocks `values` float32[rows, columns] and `counts`
    uint64[rows, count_columns].
    """

    step: Step
    mode: Mode
    collection: str = Field(max_length=64, examples=["gradients", "weights"])
    every: Positive = Field(
        description="interval between summaries at that time, in steps", examples=[10]
    )
    part: Whole = Field(description="number of this part of the step's frame, from 0")
    parts: Positive
    at_us: Micros
    rows: Many[str] = Field(
        description="names of the tensors", examples=[["blocks.0.mlp.weight", "blocks.0.mlp.bias"]]
    )
    columns: Columns = Field(
        description="statistics over the finite values", examples=[list(STATISTIC_COLUMNS)]
    )
    count_columns: Columns = Field(examples=[list(COUNT_COLUMNS)])

    @model_validator(mode="after")
    def _one_of_its_parts(self) -> Self:
        if self.part >= self.parts:
            raise ValueError(f"part {self.part} of {self.parts}, which count from 0")
        return self


class StepHeader(TelemetryHeader):
    """The header of a `StepFrame`; blocks `steps` and `at_us` uint64[steps], `values`
    float32[steps, columns].
    """

    mode: Mode
    columns: Columns = Field(examples=[["loss", "gradient_norm", "lr.0", "step_time_s"]])


class SystemHeader(TelemetryHeader):
    """The header of a `SystemFrame`; blocks `at_us` uint64[samples], `values` float64[samples,
    columns].
    """

    node: str = Field(max_length=255, description="host name", examples=["node-17"])
    columns: Columns = Field(
        description="names that include their unit", examples=[["cpu.percent", "memory.used_bytes"]]
    )


class Who(TypedDict):
    """The fields that each event of a rank begins with."""

    run_id: str
    incarnation: str
    rank: int
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordOrigin:
    """The rank of an incarnation of a run that a record comes from."""

    run_id: str
    incarnation: str
    rank: int = 0
    world_size: int = 1

    @property
    def fields(self) -> Who:
        """As frames and events name it."""
        return {
            "run_id": self.run_id,
            "incarnation": self.incarnation,
            "rank": self.rank,
            "world_size": self.world_size,
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorFrame:
    """Summaries of the tensors of one collection at one step of one rank.

    `values[i, j]` is `columns[j]` of tensor `rows[i]`, over its finite values; `counts[i, j]`
    likewise for `count_columns`. Rows are in backward order for gradients (the first to be
    computed first) and in forward order elsewhere. Columns of the emitter: STATISTIC_COLUMNS and,
    from a sample, the quantiles `p05 p25 p50 p75 p95`; `update_l2` (the norm of a step's change) in
    the collection `updates`; for tensors of low precision, in a second frame of the same step,
    `underflow` (share of the numbers that are not zero below the type's smallest normal) and
    `overflow` (share above 0.9 of its largest); the count `checksum` in `checksums`. `every` is the
    interval in steps that was in force; `at_us` the sender's clock (Unix, microseconds).

    In other modes than train `step` is the last one of training. Several batches of an evaluation
    have a frame each, of the same step and collection; `every` is an interval in batches.

    Activations are of a sample, by type of the module, and a step has one frame for each set of
    columns: `dead` (share of the units of a ReLU that are active in less than 1 % of it), or
    `saturated` (share of values outside of the linear range; of a softmax, of rows whose largest
    value is above 0.999, with their mean `entropy` in nats), or neither; the count `order` is the
    place in the forward pass. With them come `attention` (`qk_bound`, a bound of the logits from
    the longest query and key; of some heads and queries `logit_max`, `entropy` in nats and its
    share of the largest possible one, `entropy_share`), `routers` (`max_over_mean` of the load,
    `router_z`, the mean square of the log-sum-exp; the counts `expert.0` … are tokens), `logits`
    (`log_z` and `log_z_max`, the log-sum-exp of a token) and `embeddings` (`row_norm_mean`,
    `row_norm_max`, and as a count `row_of_max`, which row that is).

    Two collections hold names of parameters, and counts alone: `no_gradient`, those to which no
    gradient has arrived for `steps` looks in a row, and `longest` for so many before; `had`,
    whether one has come before; of the `watched` looks those in which its module was `called` with
    gradients on, or only without (`silent_calls`); its `place` in the optimizer, and how many
    tensors are `trainable`. And `not_optimized`, those with a gradient that no optimizer has:
    whether they are `inside` of the model that is trained, and in its `last` layer; how many
    `orphans` of the optimizer belong to no module.

    `untrained` has frozen weights in front of the first layer that trains whose values are those of
    an initialisation: `std`, `absmax`, `kurtosis` (the fourth moment, 3 of a normal distribution)
    and the `bound` of a uniform one; whether it is a `normal` one; how many weights of two
    dimensions or more the forward pass used (`matrices`), and how many are `frozen` in front.

    Collections of what a training is fed hold no tensors; each frame has what a sample has shown
    since the one before, at the steps 10, 20 and 50, then every 100 steps, and at the end of an
    evaluation (`mode`):

    - `labels`: a row for each class, by its id; counts `labels`, and with predictions `predictions`
      and `hits` (predicted, and right). No columns.
    - `confusion`: a row for each true class; a count for each predicted class, by its id.
    - `tokens`: a row for each of the 64 most frequent token ids, and `other`; count `count`, column
      `share` (0 to 1).
    - `input_channels`: a row for each channel, `INPUT.CHANNEL`; columns `mean std min max` of the
      finite values, counts `numel` (values looked at) and `nonfinite`.
    """

    type: ClassVar[str] = "tensors"
    version: ClassVar[int] = 1

    origin: RecordOrigin
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
    _places: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    _count_places: dict[str, int] = field(default_factory=dict, init=False, repr=False)

    def column(self, name: str) -> Floats | None:
        """One statistic of all rows, float32[rows], or None if it was not captured."""
        place = _place(name, self.columns, self._places)
        return None if place is None else self.values[:, place]

    def count(self, name: str) -> Counts | None:
        """One count of all rows, uint64[rows], or None if it was not captured."""
        place = _place(name, self.count_columns, self._count_places)
        return None if place is None else self.counts[:, place]

    def encode(self) -> bytes:
        """The value of the bus record; raises ValueError if an array does not fit (a bug)."""
        rows = len(self.rows)
        arrays: dict[str, Array] = {"values": self.values, "counts": self.counts}
        _floats(arrays, "values", (rows, len(self.columns)), ValueError)
        _counts(arrays, "counts", (rows, len(self.count_columns)), ValueError)
        header = TensorHeader(
            **self.origin.fields,
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
        return encode_frame(header, arrays)

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """Raises MalformedRecord, and nothing else."""
        header, arrays = decode_frame(value, TensorHeader)
        rows = len(header.rows)
        return cls(
            origin=_origin(header),
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
        row_bytes = 4 * len(self.columns) + 8 * len(self.count_columns)
        fixed = len(self._rows(0, 0, 0, 1).encode()) + 64
        # A character takes at most six bytes in JSON, and this sum is quick: most frames end here.
        if fixed + sum(6 * len(name) + row_bytes + 3 for name in self.rows) <= max_bytes:
            return (self,)
        cuts, size = [0], fixed
        for i, name in enumerate(self.rows):
            more = len(encode_basestring(name).encode()) + 1 + row_bytes
            if size + more > max_bytes and i > cuts[-1]:
                cuts.append(i)
                size = fixed
            size += more
        if len(cuts) == 1:
            return (self,)
        cuts.append(len(self.rows))
        parts = len(cuts) - 1
        return tuple(self._rows(a, b, part, parts) for part, (a, b) in enumerate(pairwise(cuts)))

    def _rows(self, start: int, stop: int, part: int, parts: int) -> Self:
        return replace(
            self,
            part=part,
            parts=parts,
            rows=self.rows[start:stop],
            values=self.values[start:stop],
            counts=self.counts[start:stop],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepFrame:
    """Scalars of one or many steps of one rank: losses, learning rates, gradient norm, step time.

    `values[i, j]` is `columns[j]` at step `steps[i]`; `at_us[i]` the sender's clock at the end of
    that step (Unix, microseconds). Columns of the emitter: `loss`, `gradient_norm` (L2 over all
    parameters as the optimizer saw them; before they were clipped, where they were, and
    `gradient_norm_clipped` after it), `gradient_nonfinite` (tensors with NaN or Inf), `lr.0` … (per
    parameter group), `step_time_s`. A user's own scalars are `log.NAME`.

    Where not all gradients were read at a step, `gradient_norm_sampled` stands in place of
    `gradient_norm`: estimated from a block of each, good to see a jump. Of steps of less than some
    milliseconds there may be neither, nor `gradient_nonfinite`.

    Where the step's time went, seconds on the clock of the training thread: `forward_s`,
    `backward_s`, `optimizer_s`, `data_wait_s` (with a data loader), and where there were some
    `checkpoint_s`, `evaluation_s`. On a GPU, each tenth step, what the GPU itself took:
    `forward_device_s`, `backward_device_s`, `optimizer_device_s`. What exactly belongs to each:
    `tocsin.emitter.probes.step_phases` and `tocsin.emitter.probes.cuda_timing`.

    Under a GradScaler: `scaler_skipped`, how many steps it has skipped since the last one that was
    made (each ten of them say so in a row of the step that does not come), and `scaler_scale`, its
    scale, from a GPU as of some steps before.

    `steps_skipped`: how often since the last step the loop itself has thrown gradients away. Where
    a skipped batch, of the loop's or of a GradScaler's, had a loss that is not finite, a row of the
    step that does not come says at once `nonfinite_skipped`, how many of them there were in a row;
    the fifth one says `loss` instead.

    `loss.NAME` is a loss that the user named, or that of another optimizer than the main one
    (`loss.discriminator`), which has `gradient_norm.NAME` and `lr.NAME`, too: means over its steps
    since the main one's last, the rate its newest.

    Said when it is known or changes: `gradients_uncleared` and `optimizer_renewed`, for how many
    steps in a row gradients were not cleared or the optimizer was a new one; `gradients_discarded`,
    of how many micro-batches of each step they were cleared too early, for `steps_discarding` steps
    in a row; `trainable_tensors` and how many of them are `without_gradient`; `schedule_steps`, how
    often the learning-rate schedules were stepped, and `epochs` of the training's data loaders.

    With several ranks: `local_gradient_norm`, of this rank's own gradients before they were
    averaged, and where the model is in parts on the ranks (FSDP2, tensor and pipeline parallel)
    `gradient_norm_local_part` in place of `gradient_norm`: the norm of what is this rank's of them.
    The root of the sum of the squares over all ranks is the norm. (A part that several ranks hold
    is shared between them.)
    """

    type: ClassVar[str] = "steps"
    version: ClassVar[int] = 1

    origin: RecordOrigin
    steps: Counts
    at_us: Counts
    columns: tuple[str, ...]
    values: Floats
    mode: Mode = "train"
    _places: dict[str, int] = field(default_factory=dict, init=False, repr=False)

    @property
    def is_logged(self) -> bool:
        """Whether there is nothing in it but what the user has logged: at steps of the user's own
        count, perhaps, which says nothing about those of the training."""
        return bool(self.columns) and all(name.startswith("log.") for name in self.columns)

    def column(self, name: str) -> Floats | None:
        """One scalar over the steps, float32[steps], or None if it is not in this frame."""
        place = _place(name, self.columns, self._places)
        return None if place is None else self.values[:, place]

    def encode(self) -> bytes:
        """The value of the bus record; raises ValueError if an array does not fit (a bug)."""
        n = self.steps.size
        arrays: dict[str, Array] = {
            "steps": self.steps,
            "at_us": self.at_us,
            "values": self.values,
        }
        _wholes(arrays, "steps", (n,), ValueError)
        _wholes(arrays, "at_us", (n,), ValueError)
        _floats(arrays, "values", (n, len(self.columns)), ValueError)
        header = StepHeader(**self.origin.fields, mode=self.mode, columns=self.columns)
        return encode_frame(header, arrays)

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """Raises MalformedRecord, and nothing else."""
        header, arrays = decode_frame(value, StepHeader)
        n = arrays["steps"].shape[0] if "steps" in arrays and arrays["steps"].ndim == 1 else -1
        return cls(
            origin=_origin(header),
            mode=header.mode,
            steps=_wholes(arrays, "steps", (n,)),
            at_us=_wholes(arrays, "at_us", (n,)),
            columns=header.columns,
            values=_floats(arrays, "values", (n, len(header.columns))),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SystemFrame:
    """System samples of one node.

    `values[i, j]` is `columns[j]` at `at_us[i]` (Unix, microseconds); float64.

    Columns carry their unit: `cpu.percent`, `memory.used_bytes`, `gpu.0.utilization_percent`,
    `disk.free_bytes`, …; docs/reference/captured-data.md lists them. What a node lacks is left out.
    """

    type: ClassVar[str] = "system"
    version: ClassVar[int] = 1

    origin: RecordOrigin
    node: str
    at_us: Counts
    columns: tuple[str, ...]
    values: Doubles = field(repr=False)
    _places: dict[str, int] = field(default_factory=dict, init=False, repr=False)

    def column(self, name: str) -> Doubles | None:
        """One quantity over the samples, float64[samples], or None if it is not in this frame."""
        place = _place(name, self.columns, self._places)
        return None if place is None else self.values[:, place]

    def encode(self) -> bytes:
        """The value of the bus record; raises ValueError if an array does not fit (a bug)."""
        n = self.at_us.size
        arrays: dict[str, Array] = {"at_us": self.at_us, "values": self.values}
        _wholes(arrays, "at_us", (n,), ValueError)
        _block(arrays, "values", (n, len(self.columns)), np.float64, ValueError)
        header = SystemHeader(**self.origin.fields, node=self.node, columns=self.columns)
        return encode_frame(header, arrays)

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """Raises MalformedRecord, and nothing else."""
        header, arrays = decode_frame(value, SystemHeader)
        n = arrays["at_us"].shape[0] if "at_us" in arrays and arrays["at_us"].ndim == 1 else -1
        values = _block(arrays, "values", (n, len(header.columns)), np.float64)
        return cls(
            origin=_origin(header),
            node=header.node,
            at_us=_wholes(arrays, "at_us", (n,)),
            columns=header.columns,
            values=values.astype(np.float64, copy=False),
        )


Frame = TensorFrame | StepFrame | SystemFrame


def _origin(header: TelemetryHeader) -> RecordOrigin:
    return RecordOrigin(
        run_id=header.run_id,
        incarnation=header.incarnation,
        rank=header.rank,
        world_size=header.world_size,
    )


def _block(
    arrays: Mapping[str, Array],
    name: str,
    shape: tuple[int, ...],
    dtype: type,
    error: type[Exception] = MalformedRecord,
) -> Array:
    array = arrays.get(name)
    if array is None:
        raise error(f"frame has no array {name!r}")
    if array.shape != shape or array.dtype != np.dtype(dtype):
        raise error(
            f"frame array {name!r}: {array.dtype}{list(array.shape)}, "
            f"expected {np.dtype(dtype)}{list(shape)}"
        )
    return array


def _floats(
    arrays: Mapping[str, Array],
    name: str,
    shape: tuple[int, ...],
    error: type[Exception] = MalformedRecord,
) -> Floats:
    return _block(arrays, name, shape, np.float32, error).astype(np.float32, copy=False)


def _counts(
    arrays: Mapping[str, Array],
    name: str,
    shape: tuple[int, ...],
    error: type[Exception] = MalformedRecord,
) -> Counts:
    return _block(arrays, name, shape, np.uint64, error).astype(np.uint64, copy=False)


def _wholes(
    arrays: Mapping[str, Array],
    name: str,
    shape: tuple[int, ...],
    error: type[Exception] = MalformedRecord,
) -> Counts:
    """Counts of what headers and events have as `Whole`: issues could not name a larger one."""
    counts = _counts(arrays, name, shape, error)
    if counts.size and (largest := int(counts.max())) > MAX_INT:
        raise error(f"frame array {name!r}: {largest}, expected at most {MAX_INT}")
    return counts
