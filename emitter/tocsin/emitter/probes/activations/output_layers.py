"""The two ends of a language model: the logits that it puts out, the embeddings that it reads."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Final

import torch
from torch import nn

from tocsin.emitter.model.discovery import own_tensor
from tocsin.emitter.probes.activations.readings import Reading
from tocsin.emitter.probes.activations.samples import rows_of
from tocsin.emitter.statistics.reductions import lengths

MAX_TOKENS: Final = 256
FEWEST_TOKENS: Final = 32
MAX_LOGITS: Final = 1 << 18
MAX_ROWS: Final = 65_536


def logits(name: str, output: torch.Tensor) -> Reading | None:
    """The log of the sum of the logits' exponentials, of up to 256 tokens; None without logits.

    Args:
        output: `[..., vocabulary]`. More than 1,000 logits for each token: fewer tokens, at least
            32.
    """
    if output.dim() < 2 or output.numel() == 0:
        return None
    tokens = min(MAX_TOKENS, max(FEWEST_TOKENS, MAX_LOGITS // output.shape[-1]))
    rows = rows_of(output, tokens)
    log_z = rows.logsumexp(dim=-1)
    return Reading(
        "logits",
        name,
        columns=("log_z", "log_z_max"),
        values=(log_z.mean(), log_z.max()),
        count_columns=("numel",),
        counts=(float(rows.shape[0]),),
    )


def embeddings(tables: Iterable[tuple[str, weakref.ref[nn.Module]]]) -> Iterable[Reading]:
    """The L2 norms of the rows of each embedding's weight `[rows, width]`, of up to 65,536 in equal
    distance.

    Of a weight that is spread over ranks, the rows of this one.
    """
    for name, reference in tables:
        module = reference()
        weight = None if module is None else own_tensor(module, "weight")
        if weight is None or weight.dim() != 2:
            continue
        local = getattr(weight, "to_local", None)
        values = (weight if local is None else local()).detach()
        if values.is_meta or not values.is_floating_point() or values.numel() == 0:
            continue
        apart = -(-values.shape[0] // MAX_ROWS)
        found = lengths(values[::apart])
        longest = found.max(dim=0)
        yield Reading(
            "embeddings",
            name,
            columns=("row_norm_mean", "row_norm_max"),
            values=(found.mean(), longest.values),
            count_columns=("numel", "row_of_max"),
            counts=(float(found.numel()), longest.indices * apart),
        )
