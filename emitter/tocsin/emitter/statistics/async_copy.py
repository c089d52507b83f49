"""Numbers on their way from a GPU, which nobody waits for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from tocsin.emitter.statistics.driver_objects import DriverObjects


class HostCopy(DriverObjects):
    """A copy of a small tensor of any shape to the host, started now and read later.

    On CUDA it goes into pinned memory behind the work already queued; an event shows when it is
    there. Other devices have no such event: they are copied when first asked, a step later.
    """

    def __init__(self, source: torch.Tensor) -> None:
        super().__init__()
        self._source: torch.Tensor | None = source
        self._event: torch.cuda.Event | None = None
        self._host: torch.Tensor | None = None
        if source.device.type == "cuda":
            # The user may have made another device the default.
            host = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
            host.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(source.device))
            self._host = host
        self._asked = False

    def ready(self) -> bool:
        """Whether it is there; never waits on CUDA. Elsewhere it is there when asked again."""
        if self._event is not None:
            # To ask an event while a CUDA graph is recorded would end the recording.
            return not is_recording() and bool(self._event.query())
        asked, self._asked = self._asked, True
        return asked or self._host is not None

    def values(self) -> npt.NDArray[np.float64]:
        """The copied numbers, float64, in the shape of the source; only if `ready`.

        Waits on devices other than CUDA, which are copied here.
        """
        if self._host is None:
            assert self._source is not None
            self._host = self._source.cpu()
        self._source = None
        numbers: npt.NDArray[np.float64] = self._host.numpy().astype(np.float64)
        return numbers


def by_device(tensors: Sequence[torch.Tensor]) -> dict[torch.device, list[int]]:
    """The indices of the tensors, of any shape, on each device."""
    places: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(i)
    return places


def on_device(number: float | torch.Tensor, home: torch.device) -> torch.Tensor:
    """A number, or a tensor of one element, as a tensor `[1]`, float32, on that device.

    Never waits for it. A copy from the host's memory would: a number of the host is filled in
    instead.
    """
    if isinstance(number, torch.Tensor) and number.device.type != "cpu":
        return number.detach().to(home, torch.float32).reshape(1)
    return torch.full((1,), float(number), dtype=torch.float32, device=home)


def is_recording() -> bool:
    """Whether a CUDA graph is being recorded: what we did would be in it for ever."""
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
