"""Which weights their gradients could move.

The gradient of a convolution's bias before a normalisation is rounding noise, and so are all
gradients of a task that is solved to the last bit: such a weight stays where it is, and nothing is
wrong. A gradient counts when its root mean square is above `NOISE` times that of the usual tensor:
the upper quartile over the tensors, of now or of the first summaries, whichever is larger; that of
a bias, when it is above `NOISE_OF_LAYER` times that of its layer's weight, too: in 16 bits
(autocast) a normalisation behind it leaves rounding noise of a thousandth of the weight's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from tocsin.schemas.records.frames import TensorFrame
from tocsin.stream_rules.reading.tensor_rows import LowestRankRows, MarkedRows, finite_numel

NOISE: Final = 1e-4
"""In small convolutional networks biases before BatchNorm and InstanceNorm had 1e-9 to 6e-6 of the
usual gradient, and no other tensor less than 7e-4."""

NOISE_OF_LAYER: Final = 1e-2
"""In small networks under bfloat16 autocast biases before BatchNorm had 1e-3 to 2e-3 of the usual
gradient, and moved by nothing at small learning rates."""

_BIAS, _WEIGHT = ".bias", ".weight"
_USUAL: Final = 75
_FIRST: Final = 3


@dataclass(slots=True)
class SignificantGradients:
    """The newest summary of the gradients, seen against the first ones."""

    frames: LowestRankRows = field(default_factory=LowestRankRows)
    first: list[float] = field(default_factory=list)
    moved: MarkedRows | None = None

    def add(self, frame: TensorFrame) -> None:
        """Take a summary of gradients."""
        whole = self.frames.assemble(frame)
        if whole is None or not len(whole.rows):
            return
        norm, finite = whole.column("l2"), finite_numel(whole)
        if norm is None or finite is None:
            return
        with np.errstate(all="ignore"):
            size = np.where(finite > 0, norm / np.sqrt(finite), 0.0)
        usual = float(np.percentile(size, _USUAL))
        if len(self.first) < _FIRST and np.isfinite(usual):
            self.first.append(usual)
        # The largest of the first: a small task is solved within ten steps of LBFGS.
        limit = NOISE * max([usual, *self.first])
        self.moved = MarkedRows(
            whole.rows, size > np.maximum(limit, _layer_bound(whole.rows, size))
        )

    def among(self, names: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Which of the names; none, as long as no summary has come."""
        return np.zeros(len(names), bool) if self.moved is None else self.moved.among(names)


def _layer_bound(rows: tuple[str, ...], size: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """What the gradient of each bias must be above, where that of its layer's weight is here."""
    limits = np.zeros(len(rows))
    biases, weights = _biased_layers(rows)
    bounds = size[weights]
    limits[biases] = np.where(np.isfinite(bounds), NOISE_OF_LAYER * bounds, 0.0)
    return limits


@lru_cache(maxsize=32)
def _biased_layers(rows: tuple[str, ...]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """The places of the biases of layers with a weight, and those of these weights. The same names
    come with each summary of a run."""
    places = {name: i for i, name in enumerate(rows) if _WEIGHT in name}
    pairs: list[tuple[int, int]] = []
    for i, name in enumerate(rows):
        if _BIAS in name:
            layer, _, place = name.rpartition(_BIAS)
            weight = places.get(f"{layer}{_WEIGHT}{place}")
            if weight is not None:
                pairs.append((i, weight))
    biases, weights = np.array(pairs, np.intp).reshape(-1, 2).T
    return biases, weights
