"""What can be captured: kinds of tensors, modes, columns. Words alone, and cheap to import.

The configuration and the process that trains share them; the latter has no use for pydantic.
"""

from __future__ import annotations

from typing import Final, Literal

Kind = Literal[
    "losses", "gradients", "weights", "biases", "activations", "inputs", "optimizer_state"
]
"""What a collection is made of. Each is a collection of its own name, too."""

KINDS: Final[tuple[Kind, ...]] = (
    "losses",
    "gradients",
    "weights",
    "biases",
    "activations",
    "inputs",
    "optimizer_state",
)

Mode = Literal["train", "eval", "predict", "global"]
"""What a training is doing. `global` is any of the three that a configuration does not name."""

MODES: Final[tuple[Mode, ...]] = ("train", "eval", "predict", "global")

OWN_FRAMES: Final = frozenset(
    (
        *("attention", "checksums", "confusion", "embeddings", "input_channels", "labels"),
        *("local_gradients", "logits", "no_gradient", "not_optimized", "routers", "tensors"),
        *("tokens", "untrained", "updates"),
    )
)
"""Collections that come with others and have no schedule: no custom one may have their name."""

Tier = Literal[0, 1, 2]
"""What is left out first where there is too much: 2, then 1; 0 is not left out."""

TIER_1: Final = frozenset(
    {"biases", "checksums", "gradients", "local_gradients", "losses", "updates", "weights"}
)
"""Collections that more rules read, and sooner, than any other."""

_RARE: Final = frozenset(
    {
        *("confusion", "input_channels", "labels", "no_gradient", "not_optimized", "tokens"),
        "untrained",
    }
)
"""Small tables that come now and then, each of which tells what no other does."""


def tier_of(collection: str) -> Tier:
    """The tier of the summaries of a collection, for a worker that cannot keep up."""
    if collection in _RARE:
        return 0
    return 1 if collection in TIER_1 else 2


_COUNTS: Final = ("numel", "zeros", "nans", "infs")
_STATISTICS: Final = ("min", "max", "mean", "std", "l1", "l2", "absmax")
_QUANTILES: Final = ("p05", "p25", "p50", "p75", "p95")
_LOW_PRECISION: Final = ("underflow", "overflow")


def columns_of(kind: Kind) -> tuple[str, ...]:
    """The columns that a summary of that kind can have; none for losses, which are scalars."""
    if kind == "losses":
        return ()
    columns = (*_COUNTS, *_STATISTICS)
    match kind:
        case "activations":
            return (*columns, "dead", "saturated", "entropy")
        case "gradients":
            return (*columns, *_QUANTILES, *_LOW_PRECISION)
    return (*columns, *_QUANTILES)


def modes_of(kind: Kind) -> tuple[Mode, ...]:
    """The modes in which there is something to capture of that kind.

    Parameters and what belongs to them change with training steps alone.
    """
    if kind in ("losses", "activations", "inputs"):
        return ("train", "eval", "predict")
    return ("train",)
