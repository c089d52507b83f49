"""Events as TensorBoard reads them: scalars, histograms, text. Pure.

The messages are those of tensorboard/compat/proto: event.proto, summary.proto, tensor.proto.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tocsin.store.export.tfrecord import data, double, doubles, record, single, whole

_MARKUP: Final = re.compile(r"([\\`*_{}\[\]()#+\-.!|<>&~:])")
_DT_STRING: Final = 7

QUANTILES: Final = (("p05", 0.05), ("p25", 0.25), ("p50", 0.50), ("p75", 0.75), ("p95", 0.95))
"""Statistics of a tensor that are quantiles, and which."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """What is known of how the values of a tensor are distributed.

    Attributes:
        quantiles: as many as `QUANTILES`, ascending.
        count: of its finite values.
    """

    least: float
    quantiles: Sequence[float]
    largest: float
    count: float
    mean: float
    std: float


def version_record() -> bytes:
    """The first record of a file."""
    return record(double(1, 0.0) + data(3, b"brain.Event:2"))


def scalar_record(tag: str, value: float, *, step: int, at_s: float) -> bytes:
    """One number at a step; `at_s` is Unix time in seconds."""
    return _event(data(1, tag.encode()) + single(2, value), step, at_s)


def histogram_record(tag: str, found: Distribution, *, step: int, at_s: float) -> bytes:
    """A distribution at a step: between two quantiles as many values as there are between them."""
    edges = [found.least, *found.quantiles, found.largest]
    shares = [0.0, *(share for _, share in QUANTILES), 1.0]
    limits: list[float] = [edges[0]]
    weights: list[float] = [0.0]
    for place in range(1, len(edges)):
        weight = (shares[place] - shares[place - 1]) * found.count
        if edges[place] > limits[-1]:
            limits.append(edges[place])
            weights.append(weight)
        else:
            # Equal quantiles: many values are the same one.
            weights[-1] += weight
    message = (
        double(1, found.least)
        + double(2, found.largest)
        + double(3, found.count)
        + double(4, found.mean * found.count)
        + double(5, (found.std**2 + found.mean**2) * found.count)
        + doubles(6, limits)
        + doubles(7, weights)
    )
    return _event(data(1, tag.encode()) + data(5, message), step, at_s)


def text_record(tag: str, text: str, *, step: int, at_s: float) -> bytes:
    """Text at a step. TensorBoard takes it for Markdown: see `plain`."""
    shape = data(2, whole(1, 1))
    tensor = whole(1, _DT_STRING) + data(2, shape) + data(8, text.encode())
    metadata = data(1, data(1, b"text"))
    return _event(data(1, tag.encode()) + data(8, tensor) + data(9, metadata), step, at_s)


def plain(text: str) -> str:
    """Text of a run as Markdown that shows just this text."""
    return _MARKUP.sub(r"\\\1", text)


def usable(found: Distribution) -> bool:
    """Whether all of it is finite and in order, as far as floats of a summary are."""
    numbers = (found.least, *found.quantiles, found.largest, found.mean, found.std)
    return found.count > 0 and all(math.isfinite(number) for number in numbers)


def _event(value: bytes, step: int, at_s: float) -> bytes:
    return record(double(1, at_s) + whole(2, step) + data(5, data(1, value)))
