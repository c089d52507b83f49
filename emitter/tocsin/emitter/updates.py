"""How far one optimizer step moves each weight: its norm before and after, on a sample.

Before a step that is to be summarised up to 16,384 numbers of each tensor are copied (whole where
it is smaller, else 16 blocks of 1,024 in equal distance), after it the change is measured, and the
copy is gone. All copies together hold at most 2 % of the parameters, or 262,144 numbers where that
is more; if they would not fit, the tensors take turns. Nothing is written to a weight.

It is measured, not derived from what the optimizer remembers: for plain SGD a step is the rate
times the gradient, for Adam a formula of its momenta, but what becomes of it in the weight is less
where it is rounded away, and that is what is looked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from tocsin.emitter.host_copy import HostCopy
from tocsin.emitter.summaries import dense
from tocsin.emitter.tables import Table
from tocsin.schemas.telemetry import Counts, Floats

BLOCKS: Final = 16
BLOCK: Final = 1024
LEAST: Final = 1 << 18
SHARE: Final = 0.02

UPDATE_COLUMNS: Final = ("l2", "update_l2")
"""Of a whole tensor, as estimated from the sample."""


@dataclass(slots=True, eq=False)
class Updates:
    """The norms of one step: on the host, or on their way."""

    names: list[str]
    numel: list[int]
    factors: list[float]
    packed: torch.Tensor | HostCopy

    @property
    def ready(self) -> bool:
        """Whether they are on the host; never waits."""
        return not isinstance(self.packed, HostCopy) or self.packed.ready()

    def tables(self) -> Iterator[Table]:
        """The one of the norms."""
        yield Table("updates", *self.rows(), UPDATE_COLUMNS, ("numel",))

    def rows(self) -> tuple[tuple[str, ...], Floats, Counts]:
        """Names, UPDATE_COLUMNS, and `numel`, of the tensors whose norms are finite."""
        packed = self.packed
        flat = packed.values() if isinstance(packed, HostCopy) else packed.numpy()
        norms = flat.astype(np.float64).reshape(2, -1).T * np.asarray(self.factors)[:, None]
        good = np.flatnonzero(np.isfinite(norms).all(axis=1))
        counts = np.asarray(self.numel, np.uint64)[good].reshape(-1, 1)
        return tuple(self.names[i] for i in good), norms[good].astype(np.float32), counts


class UpdateProbe:
    """Measures the change of weights in single steps."""

    def __init__(self) -> None:
        self._next = 0
        self._names: list[str] = []
        self._parameters: list[torch.Tensor] = []
        self._before: list[torch.Tensor] = []
        self._numel: list[int] = []

    def before(self, parameters: Sequence[tuple[str, torch.Tensor]]) -> None:
        """The step is about to happen: copy samples of the parameters that have gradients."""
        self.forget()
        moving = [(name, p) for name, p in parameters if p.grad is not None]
        if not moving:
            return
        left = max(LEAST, int(SHARE * sum(p.numel() for _, p in moving)))
        start = self._next % len(moving)
        with torch.no_grad():
            for i in range(len(moving)):
                name, parameter = moving[(start + i) % len(moving)]
                flat = dense(parameter)
                if flat is None or flat.numel() == 0 or flat.dtype.itemsize == 1:
                    continue
                view = _sample(flat)
                if view.numel() > left:
                    break
                left -= view.numel()
                self._next = start + i + 1
                self._names.append(name)
                self._numel.append(flat.numel())
                self._parameters.append(parameter)
                self._before.append(_wide(view, copy=True))

    def after(self) -> Updates | None:
        """The step has happened: what it has changed. The copies are gone."""
        names, numel, factors, now, before = [], [], [], [], []
        with torch.no_grad():
            for i, parameter in enumerate(self._parameters):
                # Read anew: a layout may force a copy, and a step may put other memory there.
                flat = dense(parameter)
                if flat is None or flat.numel() != self._numel[i]:
                    continue
                view = _sample(flat)
                names.append(self._names[i])
                numel.append(flat.numel())
                factors.append((flat.numel() / view.numel()) ** 0.5)
                now.append(_wide(view, copy=False))
                before.append(self._before[i])
            self.forget()
            if not names:
                return None
            home = now[0].device
            size = torch._foreach_norm(now)
            change = torch._foreach_norm(torch._foreach_sub(now, before))
            packed = torch.stack([norm.to(home, torch.float32) for norm in (*size, *change)])
        return Updates(names, numel, factors, packed if home.type == "cpu" else HostCopy(packed))

    def forget(self) -> None:
        """The step was skipped."""
        self._names, self._parameters, self._before, self._numel = [], [], [], []


def _sample(flat: torch.Tensor) -> torch.Tensor:
    n = flat.numel()
    if n <= BLOCKS * BLOCK:
        return flat
    apart = n // BLOCKS
    return flat[: apart * BLOCKS].view(BLOCKS, apart)[:, :BLOCK]


def _wide(view: torch.Tensor, *, copy: bool) -> torch.Tensor:
    if view.dtype in (torch.float32, torch.float64):
        return view.clone() if copy else view
    wide: torch.Tensor = view.to(torch.float32, copy=True)
    return wide
