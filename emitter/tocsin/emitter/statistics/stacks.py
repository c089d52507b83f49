"""Flat tensors of the same type and size as the rows of one, for a few launches on a GPU.

A launch costs some µs however small the tensor is. Most tensors of a model share their size with
others: a transformer of 148 tensors has ten sizes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import torch

TOGETHER: Final = 1 << 24
"""Elements that are copied into one stack at most; a tensor with more stays where it is."""


class Stack(NamedTuple):
    """Some of the tensors, or parts of them."""

    at: list[int]
    """Which, in the order of the rows. A tensor in parts is in several stacks."""

    rows: torch.Tensor
    """`[len(at), n]`, `n` > 0."""


def stacks(tensors: Sequence[torch.Tensor], *, chunk: int = sys.maxsize) -> Iterator[Stack]:
    """All numbers of tensors `[n]` on one device, a copy where there are several of a size.

    Tensors of more than `chunk` elements are in parts. Empty ones are in none.
    """
    groups: dict[tuple[torch.dtype, int], tuple[list[int], list[torch.Tensor]]] = {}
    for i, tensor in enumerate(tensors):
        if tensor.numel() == 0:
            continue
        for part in (tensor,) if tensor.numel() <= chunk else tensor.split(chunk):
            at, parts = groups.setdefault((part.dtype, part.numel()), ([], []))
            at.append(i)
            parts.append(part)
    for (dtype, numel), (at, parts) in groups.items():
        most = max(1, TOGETHER // numel)
        for first in range(0, len(at), most):
            yield Stack(at[first : first + most], _stack(dtype, parts[first : first + most]))


def _stack(dtype: torch.dtype, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0][None]
    if dtype.itemsize == 1 and dtype.is_floating_point:
        # float8 has hardly any operations.
        return torch.stack([part.view(torch.uint8) for part in parts]).view(dtype)
    return torch.stack(list(parts))
