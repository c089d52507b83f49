"""Attention: how large its logits can be, and how far its heads look around.

The fused kernels show neither logits nor probabilities. The bound needs only the lengths of queries
and keys; for a few heads of one sample of the batch the logits of some queries are computed again.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from tocsin.emitter.model.discovery import own_tensor
from tocsin.emitter.model.mesh_names import is_distributed
from tocsin.emitter.probes.activations.readings import Reading
from tocsin.emitter.probes.activations.samples import thinned
from tocsin.emitter.statistics.reductions import lengths

HEADS: Final = 4
QUERIES: Final = 32
MAX_LOGITS: Final = 1 << 20
"""That are computed again: with very long sequences fewer queries."""

MAX_LENGTHS: Final = 1 << 14
"""Queries and keys (each of one head and one place) whose lengths are taken."""

CLOSED: Final = -1e30
"""Stands for -inf where a query may not look: 0 times it is still a number."""

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
    """The bound, the largest logit and the entropy of an attention; None for other shapes.

    The logits are those of `torch.nn.functional.scaled_dot_product_attention`: query times key
    times `scale`, by default 1/√D. The bound is the longest query times the longest key times
    `scale`. The entropy of the softmax is in nats; `entropy_share` is its share of the largest
    possible one, the log of the number of keys that the mask allows.

    Args:
        query: `[B, H, Q, D]`, or `[B, Q, D]`.
        key: `[B, G, K, D]`, or `[B, K, D]`. H is a multiple of G (grouped queries).
        mask: boolean or added to the logits, broadcast to `[B, H, Q, K]`.
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
    logits = _logits(query, key, mask, is_causal=is_causal, factor=factor)
    # A softmax takes CLOSED with ease; exp alone is eight times slower with it.
    entropy = -(logits.softmax(dim=-1) * logits.log_softmax(dim=-1)).sum(dim=-1)
    allowed = (logits > CLOSED / 2).sum(dim=-1)
    several = allowed >= 2
    entropy = torch.where(several, entropy, 0.0)
    share = entropy / allowed.clamp(min=2).log()
    n = several.sum()
    top = logits.max()
    return Reading(
        "attention",
        name,
        columns=COLUMNS,
        values=(
            bound,
            torch.where(top > CLOSED / 2, top, torch.nan),
            entropy.sum() / n,
            share.sum() / n,
        ),
        count_columns=("numel",),
        counts=(float(logits.numel()),),
    )


def _longest(vectors: torch.Tensor) -> torch.Tensor:
    some = thinned(vectors, MAX_LENGTHS, whole=1)
    # In the order of memory it is quicker.
    some = some.permute(*sorted(range(3), key=lambda d: -some.stride(d)), 3)
    return lengths(some).max()


def _logits(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    is_causal: bool,
    factor: float,
) -> torch.Tensor:
    """Logits [heads, queries, keys] of the first sample; CLOSED where a query may not look."""
    places, keys = query.shape[2], key.shape[2]
    heads = min(HEADS, query.shape[1])
    between = query.shape[1] // heads
    most = max(1, min(QUERIES, MAX_LOGITS // (heads * keys)))
    step = -(-places // most)
    # The last of each stretch: the first queries of a causal attention have nothing to look at.
    part = (0, slice(0, heads * between, between), slice((places - 1) % step, None, step))
    of = torch.arange(heads, device=query.device) * between // (query.shape[1] // key.shape[1])
    with torch.autocast(query.device.type, enabled=False):
        logits = query[part].float() @ key[0].index_select(0, of).float().transpose(1, 2)
        logits = logits * factor
    if is_causal:
        at = torch.arange((places - 1) % step, places, step, device=query.device)
        later = torch.arange(keys, device=query.device)[None, :] > at[:, None]
        logits = logits.masked_fill_(later, CLOSED)
    if mask is not None:
        seen = mask.detach().expand(query.shape[0], query.shape[1], places, keys)[part]
        if seen.dtype is torch.bool:
            logits = logits.masked_fill_(~seen, CLOSED)
        else:
            # A mask of very large negative numbers stands for -inf.
            closed = seen <= torch.finfo(seen.dtype).min / 2
            logits = (logits + seen.float()).masked_fill_(closed, CLOSED)
    return logits


def read_module(
    name: str, module: nn.MultiheadAttention, query: torch.Tensor, key: torch.Tensor
) -> Reading | None:
    """`read` for a MultiheadAttention that computes its probabilities itself (`need_weights`).

    It projects the first sample again, and ignores masks. None of weights that are computed.

    Args:
        query: `[B, Q, D]`, or `[Q, B, D]` without `batch_first`.
        key: `[B, K, D]`, or `[K, B, D]` without `batch_first`.
    """
    weight = None if is_parametrized(module) else own_tensor(module, "in_proj_weight")
    if weight is None or is_distributed(weight) or query.dim() != 3 or key.dim() != 3:
        return None  # of a weight that is in parts on the ranks there is no projection here
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
