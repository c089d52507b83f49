"""What an optimizer remembers of each parameter: its momenta and variances as rows.

Whatever tensor of a parameter's own shape stands in `optimizer.state[parameter]` is one row, named
after both: `blocks.0.mlp.weight.exp_avg_sq` (Adam and its kin), `….momentum_buffer` (SGD), or
whatever another optimizer calls it. What is packed into fewer bits (the states of 8-bit
optimizers) or kept in another form (factors, histories) is no row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import torch

from tocsin.emitter.plan.schedule import Due
from tocsin.emitter.probes.probe import NEVER, Probe
from tocsin.emitter.statistics.async_copy import is_recording
from tocsin.emitter.statistics.reductions import dense
from tocsin.emitter.statistics.tensor_rows import TensorRows, Wanted
from tocsin.schemas.records.collections import Kind

if TYPE_CHECKING:
    from tocsin.emitter.model.optimizers import Optimizers, WatchedOptimizer
    from tocsin.emitter.training.training import Training

OPTIMIZER_STATE: Final[Kind] = "optimizer_state"


class OptimizerState(Probe):
    """Reads the state of optimizers; never makes an entry in it.

    What it cannot read is packed into 8 bits, quantised, on the device meta, …
    """

    name = OPTIMIZER_STATE
    of = OPTIMIZER_STATE

    def start(self, training: Training, optimizers: Optimizers) -> None:
        """The first optimizer step of a training is being made."""
        self._schedule, self._optimizers = training.schedule, optimizers

    def read(self, step: int, watched: WatchedOptimizer, due: Due) -> tuple[str, TensorRows] | None:
        """The optimizer has changed its weights: the tables of this step, which may still be on
        their way from a GPU, and the name of the collection that bears their cost."""
        self.reads = NEVER
        plans, optimizer = due.get(OPTIMIZER_STATE, ()), watched.optimizer()
        if not plans or optimizer is None or is_recording():
            return None
        chosen = self._optimizers.chosen
        wanted = [Wanted(plan.name, chosen(watched, plan), plan.columns) for plan in plans]
        with self._schedule.costs(*(plan.name for plan in plans)):
            rows = self.rows(optimizer, watched.parameters, wanted)
        return None if rows is None else (plans[0].name, rows)

    def rows(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[tuple[str, torch.Tensor]],
        wanted: Sequence[Wanted] = (Wanted(OPTIMIZER_STATE),),
    ) -> TensorRows | None:
        """Full rows of what it remembers of these named parameters, of any shape; None if that is
        nothing.

        `names` of what is wanted are those of parameters. On a GPU the rows come later.
        """
        chosen: set[str] | None = set()
        for each in wanted:
            chosen = None if chosen is None or each.names is None else chosen | each.names
        names: list[str] = []
        flat: list[torch.Tensor] = []
        rows_of: dict[str, list[str]] = {}
        for name, parameter in parameters:
            if chosen is not None and name not in chosen:
                continue
            # Not `state[parameter]`: a defaultdict would make an empty one.
            held = optimizer.state.get(parameter)
            if not isinstance(held, Mapping):
                continue
            for key, value in held.items():
                if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
                    continue
                if value.dim() == 0 and key == "step":
                    continue  # the count of a parameter that is one number
                tensor = dense(value) if value.is_floating_point() or value.is_complex() else None
                if tensor is None:
                    self.skipped += 1
                    continue
                row = f"{name}.{key}"
                names.append(row)
                flat.append(tensor)
                rows_of.setdefault(name, []).append(row)
        if not names:
            return None
        of_rows = [
            each._replace(names=frozenset(row for n in each.names for row in rows_of.get(n, ())))
            if each.names is not None
            else each
            for each in wanted
        ]
        return TensorRows(names, flat, of_rows)
