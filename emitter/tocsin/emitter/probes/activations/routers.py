"""Routers of a mixture of experts: how many tokens each expert gets.

A router is a layer that puts out one number for each expert: a Linear beside as many experts, or a
layer of a type that is called a router or a gate (as `MixtralTopKRouter` is). Of its output the
logits are read, and which experts are chosen: as it returns them, else the largest logits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import torch
from torch import nn

from tocsin.emitter.model.discovery import own_tensor
from tocsin.emitter.probes.activations.readings import Reading
from tocsin.emitter.probes.activations.samples import rows_of

MAX_EXPERTS: Final = 1024
MAX_TOKENS: Final = 4096
IDS: Final = (torch.int64, torch.int32)

_TYPE: Final = re.compile(r"(Router|Gate|Gating|TopKGate)$")
_COUNTS: Final = ("num_experts", "n_routed_experts", "num_local_experts", "n_experts", "experts")
_CHOSEN: Final = ("top_k", "num_experts_per_tok", "topk", "moe_top_k", "k")


def experts_of(module: nn.Module, parent: nn.Module | None) -> tuple[int, int] | None:
    """How many experts a router has, and how many a token gets; None: it is no router."""
    if isinstance(module, nn.Linear):
        experts = _number(parent, _COUNTS) if parent is not None else None
        # In front of a softmax over a choice of one there is nothing to choose.
        if experts is None or experts != module.out_features or experts < 2:
            return None
    elif _TYPE.search(type(module).__name__):
        experts = _number(module, _COUNTS)
        weight = own_tensor(module, "weight")
        if experts is None and weight is not None and weight.dim() == 2:
            experts = weight.shape[0]
        if experts is None or experts < 2:
            return None
    else:
        return None
    if experts > MAX_EXPERTS:
        return None
    top = _number(module, _CHOSEN)
    if top is None and parent is not None:
        top = _number(parent, _CHOSEN)
    return experts, min(experts, top or 1)


def _number(module: nn.Module, names: Sequence[str]) -> int | None:
    """A number that a module has under one of these names; of a list of modules, how many."""
    own = module.__dict__
    for name in names:
        value = own.get(name)
        if value is None:
            value = own.get("_modules", {}).get(name)
        if isinstance(value, nn.ModuleList | nn.ModuleDict):
            return len(value)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def tensors_of(output: object, experts: int) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """The logits `[..., experts]` in a router's output, and the first tensor of integers in it, if
    there is one: of the chosen experts `[..., top]`, or a mask of all. None: it has no logits.
    """
    parts = output if isinstance(output, tuple | list) else (output,)
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    logits = next(
        (t for t in tensors if t.is_floating_point() and t.shape[-1:] == (experts,)), None
    )
    if logits is None:
        return None
    chosen = next((t for t in tensors if t.dtype in IDS and t.dim()), None)
    return logits, chosen


def read(
    name: str, logits: torch.Tensor, chosen: torch.Tensor | None, *, experts: int, top: int
) -> Reading | None:
    """The load of each expert, of up to 4,096 tokens; None for other shapes.

    `router_z` is the router's z-loss (ST-MoE, Zoph et al. 2022): the mean square of the log of the
    sum of the logits' exponentials.

    Args:
        logits: `[..., experts]`.
        chosen: numbers of the chosen experts, `[..., top]`. Ignored if it has probabilities or a
            mask of all experts.
    """
    if logits.shape[-1] != experts or logits.numel() == 0:
        return None
    if chosen is not None and (
        chosen.dtype not in IDS or (chosen.dim() > 0 and chosen.shape[-1] == experts != top)
    ):
        chosen = None
    if chosen is not None:
        width = chosen.shape[-1] if chosen.dim() > 1 else 1
        if width != top or chosen.numel() != logits.numel() // experts * top:
            return None
    rows = rows_of(logits, MAX_TOKENS)
    if chosen is None:
        chosen = rows.topk(top, dim=-1).indices
    else:
        chosen = chosen.reshape(-1, top)
        chosen = chosen[:: max(1, chosen.shape[0] // MAX_TOKENS)]
    load = torch.zeros(experts, dtype=torch.float64, device=rows.device)
    flat = chosen.reshape(-1).long()
    # A number that no expert has (a token that was dropped) would end the user's CUDA context.
    valid = (flat >= 0) & (flat < experts)
    load.scatter_add_(0, flat.clamp(0, experts - 1), valid.double())
    z = rows.logsumexp(dim=-1).square().mean()
    return Reading(
        "routers",
        name,
        columns=("max_over_mean", "router_z"),
        values=(load.max() / load.mean(), z),
        count_columns=("numel", *(f"expert.{i}" for i in range(experts))),
        counts=(float(rows.shape[0]), *load.unbind()),
    )
