"""Weak references to the user's tensors that torch may swap.

`Module.to()` and the like swap the contents of two tensors where a parameter is a DTensor, and of
all where the user has asked for that. Torch refuses a tensor to which there is a weak reference, so
ours are let go for that moment. The tensor keeps its identity.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Final

import torch


class TensorRef:
    """A weak reference to a tensor of any shape. `get()` is the tensor, or None."""

    __slots__ = ("__weakref__", "get")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.get: Callable[[], torch.Tensor | None] = weakref.ref(tensor)


_known: Final[weakref.WeakValueDictionary[int, TensorRef]] = weakref.WeakValueDictionary()
"""All that are in use, by the ids of their tensors."""

Released = Sequence[tuple[TensorRef, torch.Tensor]]
"""References that were let go, and what they were to."""


def ref_to(tensor: torch.Tensor) -> TensorRef:
    """The one reference to this tensor, of any shape."""
    found = _known.get(id(tensor))
    if found is None or found.get() is not tensor:
        found = _known[id(tensor)] = TensorRef(tensor)
    return found


def let_go(*tensors: torch.Tensor) -> Released:
    """Let go of these, of any shape, until they are taken back: the references lead to None."""
    found = [(_known.get(id(tensor)), tensor) for tensor in tensors]
    released = [(ref, tensor) for ref, tensor in found if ref is not None and ref.get() is tensor]
    for ref, _ in released:
        ref.get = _none
    return released


def take_back(released: Released) -> None:
    """The same references lead to the same tensors again."""
    for ref, tensor in released:
        ref.get = weakref.ref(tensor)


def _none() -> None:
    return None
