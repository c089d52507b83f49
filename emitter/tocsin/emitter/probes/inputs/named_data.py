"""The tensors of a batch that the user has named, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from tocsin.schemas.errors import ConfigurationError

MAX_INPUTS: Final = 16
MAX_NAME: Final = 100


@dataclass(frozen=True, slots=True, eq=False)
class NamedData:
    """What `run.data` was given, on any device.

    Attributes:
        inputs: batches `[B, C, ...]` or `[B, ..., C]`, by name.
        labels: class ids `[B, ...]`.
        predictions: class ids shaped like the labels, or scores `[B, K, ...]` of K classes.
        tokens: token ids of any shape.
    """

    inputs: Mapping[str, torch.Tensor]
    labels: torch.Tensor | None
    predictions: torch.Tensor | None
    tokens: torch.Tensor | None


def check_data(inputs: object, labels: object, predictions: object, tokens: object) -> NamedData:
    """The arguments of `Run.data`, checked; see there for their shapes.

    Raises:
        ConfigurationError: what is not, and what was expected.
    """
    several = inputs if isinstance(inputs, Mapping) else {"input": inputs}
    named = {}
    for name, batch in list(several.items())[:MAX_INPUTS]:
        if batch is not None:
            if not isinstance(batch, torch.Tensor):
                raise _wrong("inputs", "a torch.Tensor, or several by name", batch)
            named[str(name)[:MAX_NAME]] = batch
    ids = _ids("labels", labels)
    guesses = None
    if predictions is not None:
        if ids is None:
            raise ConfigurationError("data: predictions need the labels that they are of")
        if not isinstance(predictions, torch.Tensor):
            raise _wrong("predictions", "a torch.Tensor", predictions)
        guesses = _fitting(ids, predictions)
    return NamedData(named, ids, guesses, _ids("tokens", tokens))


def _ids(what: str, tensor: object) -> torch.Tensor | None:
    if tensor is None:
        return None
    if not isinstance(tensor, torch.Tensor) or tensor.is_floating_point() or tensor.is_complex():
        raise _wrong(what, "a torch.Tensor of integers", tensor)
    return tensor


def _fitting(labels: torch.Tensor, predictions: torch.Tensor) -> torch.Tensor:
    """Ids as they are, scores with the classes in dimension 1."""
    shape, wanted = predictions.shape, labels.shape
    if predictions.is_floating_point():
        if shape[:-1] == wanted:
            return predictions.movedim(-1, 1) if labels.dim() > 1 else predictions
        if len(shape) == len(wanted) + 1 and (shape[:1] + shape[2:]) == wanted:
            return predictions
    elif shape == wanted:
        return predictions
    raise ConfigurationError(
        f"data: expected predictions as class ids of the shape {tuple(wanted)} of the labels, or "
        f"as scores with one dimension more; found {tuple(shape)} of {predictions.dtype}"
    )


def _wrong(what: str, expected: str, found: object) -> ConfigurationError:
    kind = found.dtype if isinstance(found, torch.Tensor) else type(found).__name__
    return ConfigurationError(f"data: expected {what} as {expected}, found {kind}")
