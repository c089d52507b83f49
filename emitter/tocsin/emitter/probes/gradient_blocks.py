"""A block of each gradient, each step another: cheap enough to be read at every step of a CPU.

Reading all gradients is bound by memory: their exact norm costs 1 % of a step of a small GPT. A
block of at most 8,192 neighbours of each tensor costs a tenth of it. A NaN in a block is seen at
once; one outside of the blocks is in the next step's loss, or found when its block comes round.
The blocks' squares, scaled up, estimate the norm of the gradients: good enough to see it jump.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch

from tocsin.emitter.statistics.arrays import BLOCK, block
from tocsin.emitter.statistics.reductions import dense, norms

_JUMP: Final = 4.0
_LEARNED: Final = 10
_MEMORY: Final = 0.1


class Blocks(NamedTuple):
    """The result of one step's blocks: the estimated norm, and how many blocks are not finite."""

    norm: float
    bad: int
    complete: bool = True
    """Whether none was left out because it is on another device."""

    @property
    def estimate(self) -> float | None:
        """The norm of all gradients; None: only some of them could be read, or are finite."""
        return self.norm if self.complete and not self.bad else None


class BlockReader:
    """Reads one block of each gradient; the next one at the next call."""

    def __init__(self) -> None:
        self._turn = 0
        self._usual = 0.0
        self._seen = 0

    def read(self, gradients: Sequence[torch.Tensor]) -> Blocks:
        """Read the blocks of gradients on the CPU, of any shape, type and layout; unreadable ones
        count as zero.

        Those on other devices are left out: nobody waits for them here.
        """
        turn = self._turn
        self._turn = turn + 1
        # An overflow must not warn, nor raise where the user has asked NumPy for that.
        with np.errstate(all="ignore"):
            return self._read(gradients, turn)

    def _read(self, gradients: Sequence[torch.Tensor], turn: int) -> Blocks:
        square, bad, complete, dot = 0.0, 0, True, np.dot
        for gradient in gradients:
            if type(gradient) is torch.Tensor and gradient.dtype is torch.float32:
                try:
                    values = gradient.numpy().ravel("K")
                except (TypeError, RuntimeError) as error:
                    # A sparse one, or one on another device; else one that was computed with
                    # `create_graph=True`, or whose sign is noted beside it.
                    unusual = gradient.requires_grad or gradient.is_neg()
                    if isinstance(error, RuntimeError) and not unusual:
                        raise
                    if _is_elsewhere(gradient):
                        complete = False
                        continue
                    found = _square(gradient, turn)
                else:
                    n = values.size
                    if n > BLOCK:
                        values = values[block(turn, n)]
                        found = float(dot(values, values)) * (n / values.size)
                    else:
                        found = float(dot(values, values))
            elif _is_elsewhere(gradient):
                complete = False
                continue
            else:
                found = _square(gradient, turn)
            if found - found != 0.0:  # NaN or an infinity
                bad += 1
            else:
                square += found
        return Blocks(math.sqrt(square), bad, complete)

    def jumped(self, norm: float) -> bool:
        """Whether the estimated norm is far over what it used to be; it enters that memory."""
        usual = self._usual
        jumped = self._seen >= _LEARNED and norm > _JUMP * usual
        self._seen += 1
        # A jump enters too, but slowly: where it lasts it is the new usual after some steps.
        self._usual = usual + max(_MEMORY, 1 / self._seen) * (norm - usual)
        return jumped


def _is_elsewhere(gradient: torch.Tensor) -> bool:
    """Whether it has its numbers on another device."""
    return not (gradient.is_cpu or gradient.is_meta)


def _square(gradient: torch.Tensor, turn: int) -> float:
    """The estimated square of a gradient that NumPy cannot read where it lies."""
    flat = dense(gradient)
    if flat is None or flat.numel() == 0:
        return 0.0
    n = flat.numel()
    part = flat[block(turn, n)]
    square: float = float(norms([part])[0]) ** 2 * (n / part.numel())
    return square
