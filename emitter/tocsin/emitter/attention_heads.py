"""Attention: how large its logits can be, and how far its heads look around.

The fused kernels show neither logits nor probabilities. The bound needs only the lengths of queries
and keys; for a few heads of one sample of the batch the logits of some queries are computed again.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import nn

from tocsin.emitter.activation_readings import Reading
from tocsin.emitter.activation_samples import thinned

HEADS: Final = 4
QUERIES: Final = 64
MOST_LOGITS: Final = 1 << 20
"""That are computed again: with very long sequences fewer queries."""

MOST_LENGTHS: Final = 1 << 16
"""Queries and keys (each of one head and one place) whose lengths are taken."""

COLUMNS: Final = ("qk_bound", "logit_max", "entropy", "entropy_share")


def read(
    name: str,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Reading | None:
    """What attention over these says: [batch, heads, places, width], or without heads.

    Queries may have more heads than keys (grouped queries). None: it is of no such shape.
    """
    if query.dim() == 3:
        query, key = query.unsqueeze(1), key.unsqueeze(1)
        mask = mask.unsqueeze(1) if mask is not None and mask.dim() == 3 else mask
    if query.dim() != 4 or key.dim() != 4 or not query.numel() or not key.numel():
        return None
    if query.shape[1] % key.shape[1] or query.shape[-1] != key.shape[-1]:
        return None
    query, key = query.detach(), key.detach()
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    bound = _longest(query) * _longest(key) * abs(factor)
    logits, asked = _logits(query, key, mask, is_causal=is_causal, factor=factor)
    allowed = torch.isfinite(logits).sum(dim=-1)
    seen = allowed >= 2
    probabilities = logits.softmax(dim=-1)
    entropy = torch.special.entr(probabilities).sum(dim=-1)
    several = seen.sum()
    entropy = torch.where(seen, entropy, 0.0)
    share = torch.where(seen, entropy / allowed.clamp(min=2).log(), 0.0)
    return Reading(
        "attention",
        name,
        columns=COLUMNS,
        values=(bound, logits.max(), entropy.sum() / several, share.sum() / several),
        count_columns=("numel",),
        counts=(float(asked),),
    )


def _longest(vectors: torch.Tensor) -> torch.Tensor:
    some = thinned(vectors, MOST_LENGTHS, whole=1)
    return torch.linalg.vector_norm(some, dim=-1, dtype=torch.float32).max()


def _logits(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    is_causal: bool,
    factor: float,
) -> tuple[torch.Tensor, int]:
    """Logits [heads, queries, keys] of the first sample; -inf where a query may not look."""
    heads = min(HEADS, query.shape[1])
    chosen = [i * query.shape[1] // heads for i in range(heads)]
    grouped = query.shape[1] // key.shape[1]
    places, keys = query.shape[2], key.shape[2]
    most = max(1, min(QUERIES, MOST_LOGITS // (heads * keys)))
    # The last of each stretch: the first queries of a causal attention have nothing to look at.
    asked = min(most, places)
    at = (torch.arange(asked, device=query.device) + 1) * places // asked - 1
    some = torch.stack([query[0, head].index_select(0, at) for head in chosen]).float()
    against = torch.stack([key[0, head // grouped] for head in chosen]).float()
    with torch.autocast(query.device.type, enabled=False):
        logits = (some @ against.transpose(1, 2)) * factor
    if is_causal:
        later = torch.arange(keys, device=query.device)[None, :] > at[:, None]
        logits = logits.masked_fill(later, -math.inf)
    if mask is not None:
        whole = mask.detach().expand(query.shape[0], query.shape[1], places, keys)
        part = torch.stack([whole[0, head].index_select(0, at) for head in chosen])
        if part.dtype is torch.bool:
            logits = logits.masked_fill(~part, -math.inf)
        else:
            # A mask of large negative numbers stands for -inf.
            closed = part <= torch.finfo(part.dtype).min / 2
            logits = (logits + part.float()).masked_fill(closed, -math.inf)
    return logits, logits.numel()


def read_module(
    name: str, module: nn.MultiheadAttention, query: torch.Tensor, key: torch.Tensor
) -> Reading | None:
    """The same of a MultiheadAttention that computes its probabilities itself (`need_weights`):
    its projections are made again for the first sample. Masks are not taken into account.
    """
    weight = module.in_proj_weight
    if weight is None or query.dim() != 3 or key.dim() != 3:
        return None
    if not module.batch_first:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    width, heads = module.embed_dim, module.num_heads
    bias = module.in_proj_bias
    projected = [
        nn.functional.linear(
            part[:1].detach().float(),
            weight[i * width : (i + 1) * width].detach().float(),
            None if bias is None else bias[i * width : (i + 1) * width].detach().float(),
        )
        .unflatten(-1, (heads, -1))
        .transpose(1, 2)
        for i, part in enumerate((query, key))
    ]
    return read(name, projected[0], projected[1])
