"""The accelerators that a rank trains on, by name.

They are found by where its parameters are. Where these are on the CPU although the rank computes on
a GPU (offloading), CUDA is initialised and holds memory on the current device. CUDA is never
initialised here: a job that does not use it must not begin to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

import torch
from torch import nn

_NONE: Final = ("cpu", "meta")


def devices_of(parameters: Iterable[torch.Tensor], root: nn.Module | None) -> dict[str, int]:
    """How many accelerators of each name these parameters, of any shape, are on; none of a training
    on the CPU.
    """
    found = {parameter.device for parameter in parameters if parameter.device.type not in _NONE}
    if isinstance(root, nn.DataParallel):
        found |= {torch.device("cuda", i) for i in root.device_ids}
    if not found and torch.cuda.is_initialized() and torch.cuda.memory_reserved():
        found = {torch.device("cuda", torch.cuda.current_device())}
    return dict(Counter(_name(device) for device in found))


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))[:200]
    return str(device.type)
