"""The model and its optimizers when a training begins, as `run_started` records them."""

from __future__ import annotations

import numpy as np
import torch

from tocsin.emitter.model import discovery
from tocsin.emitter.model.devices import devices_of
from tocsin.emitter.model.discovery import MAX_GROUPS
from tocsin.emitter.model.optimizers import Optimizers
from tocsin.emitter.process.isolation import Isolation
from tocsin.emitter.training.training import Shape
from tocsin.schemas.records.runs import Group


def shape_of(optimizers: Optimizers, isolation: Isolation) -> Shape:
    """Sizes, learning rates, versions and devices; empty if the main optimizer is gone."""
    watched = optimizers.primary
    optimizer = watched.optimizer()
    if optimizer is None:
        return {}
    return {
        "optimizer": type(optimizer).__name__[:200],
        "optimizers": optimizers.count,
        "groups": tuple(
            Group(
                index=i,
                parameters=len(group["params"]),
                lr=discovery.rate(group, "lr"),
                # Set by the constructor of a schedule (PyTorch's own and timm's).
                initial_lr=discovery.rate(group, "initial_lr"),
            )
            for i, group in enumerate(optimizer.param_groups[:MAX_GROUPS])
        ),
        "tensors": len(watched.parameters),
        "parameters": sum(discovery.numel(parameter) for _, parameter in watched.parameters),
        "versions": {
            "torch": str(torch.__version__),
            "numpy": np.__version__,
            "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        },
        "devices": isolation.run("devices", devices_of, optimizers.parameters(), optimizers.root)
        or {},
    }
