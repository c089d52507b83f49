"""Which tensors have numbers that may be read here and now.

Tensors come by that have none: those of tracers and compilers, of `vmap` and `grad`, on meta,
quantised, nested, or in parts on several ranks. And some have a graph that is the user's own:
`backward(create_graph=True)` leaves gradients that require gradients. All that reads what a forward
or backward pass hands around asks here first, so that no probe meets a kind that it does not know.
"""

from __future__ import annotations

from typing import Final, TypeGuard

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def types(*names: str) -> frozenset[torch.dtype]:
    """The types of these names that this PyTorch has."""
    found = (getattr(torch, name, None) for name in names)
    return frozenset(dtype for dtype in found if dtype is not None)


FLOATS: Final = types("float32", "bfloat16", "float16", "float64")
"""Real numbers that PyTorch calculates with: it cannot compare or add those of float8."""

NUMBERS: Final = FLOATS | types(
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")
)
"""Those, and whole ones: inputs, labels, tokens."""

_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)


def is_readable(thing: object, of: frozenset[torch.dtype] = FLOATS) -> TypeGuard[torch.Tensor]:
    """Whether this is a dense tensor, of any shape and one of these types, to be read now."""
    if type(thing) not in _PLAIN and not _is_harmless(thing):
        return False
    assert isinstance(thing, torch.Tensor)
    return (
        thing.dtype in of
        and thing.layout is torch.strided
        and not thing.is_meta
        and not thing.is_nested
        and not torch._C._functorch.is_functorch_wrapped_tensor(thing)
    )


def readable(thing: object, of: frozenset[torch.dtype] = FLOATS) -> torch.Tensor | None:
    """The tensor itself, or a view of the same shape without a graph and without a user's class.

    None if it is not a dense tensor of one of these types, or cannot be read now.
    """
    if not is_readable(thing, of):
        return None
    tensor: torch.Tensor = thing
    if type(tensor) not in _PLAIN:
        tensor = tensor.as_subclass(torch.Tensor)  # what it does with its operations is its own
    return tensor.detach() if tensor.requires_grad else tensor


def _is_harmless(thing: object) -> bool:
    """Whether it is a tensor of a class of its own that holds its numbers itself."""
    return (
        isinstance(thing, torch.Tensor)
        and not is_traceable_wrapper_subclass(thing)
        and not hasattr(thing, "to_local")  # a part of it is here
        and not hasattr(thing, "fake_mode")  # a compiler's
    )
