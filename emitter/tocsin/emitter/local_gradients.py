"""This rank's own gradients, before the ranks are averaged: which of them are not finite."""

from __future__ import annotations

import math
import weakref

import numpy as np
import torch

from tocsin.schemas.telemetry import COUNT_COLUMNS, STATISTIC_COLUMNS, Counts, Floats


class LocalGradients:
    """Parameters whose gradient on this rank, before ranks are averaged, is not finite."""

    def __init__(self) -> None:
        self._bad: dict[int, tuple[Floats, Counts]] = {}
        self._norms: dict[int, torch.Tensor] = {}
        self._watched: dict[int, weakref.ref[torch.Tensor]] = {}

    def is_new(self, parameter: torch.Tensor) -> bool:
        """Whether this parameter was not watched yet; it is from now on.

        Nothing is written on the parameter itself: it would be pickled with it.
        """
        known = self._watched.get(id(parameter))
        if known is not None and known() is parameter:
            return False
        self._watched[id(parameter)] = weakref.ref(parameter)
        return True

    def look(self, parameter: torch.Tensor) -> None:
        """The gradient of this parameter is complete on this rank."""
        from tocsin.emitter.summaries import dense, exact_row, norms

        if parameter.grad is None:
            return
        with torch.no_grad():
            gradient = dense(parameter.grad)
            if gradient is None or gradient.numel() == 0:
                return
            norm = norms([gradient])
            if gradient.device.type != "cpu":
                self._norms[id(parameter)] = norm
            elif not math.isfinite(float(norm)):
                values, counts = exact_row(gradient)
                if counts[2] + counts[3]:
                    self._bad[id(parameter)] = (values.astype(np.float32), counts)

    def take(self, names: dict[int, str]) -> list[tuple[str, Floats, Counts]]:
        """The bad ones as rows; none is left.

        On a GPU one copy of the norms waits for this step's backward, and counts are lower bounds.
        """
        found = [(names.get(i, "?"), *row) for i, row in self._bad.items()]
        if self._norms:
            ids = list(self._norms)
            norms = torch.cat([self._norms[i] for i in ids]).cpu().numpy()
            for i, norm in zip(ids, norms, strict=True):
                if not np.isfinite(norm):
                    counts = np.zeros(len(COUNT_COLUMNS), np.uint64)
                    counts[COUNT_COLUMNS.index("nans" if np.isnan(norm) else "infs")] = 1
                    row = np.zeros(len(STATISTIC_COLUMNS), np.float32)
                    found.append((names.get(i, "?"), row, counts))
        self.clear()
        return found

    def clear(self) -> None:
        """Forget them: the step was skipped."""
        self._bad.clear()
        self._norms.clear()
