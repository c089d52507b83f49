"""What the user's own code names of a training: labels, losses by name, and which tensor is what.

Imports no torch: a loop without it has losses, too.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, SupportsFloat

from tocsin.schemas.errors import ConfigurationError

if TYPE_CHECKING:
    from tocsin.emitter.capture.hook_probes import HookProbes
    from tocsin.emitter.probes.inputs.named_data import NamedData
    from tocsin.emitter.probes.losses import Loss
    from tocsin.emitter.training.training import Training


def watching() -> HookProbes | None:
    """Where such things go in a process that has imported torch; None in others."""
    torch_hooks = sys.modules.get("tocsin.emitter.hooks.torch_patches")
    found: HookProbes | None = None if torch_hooks is None else torch_hooks.hooks.hook_probes
    return found


def check_loss(name: object, value: SupportsFloat) -> Loss:
    """The value as it may be kept: a tensor of one element as it is, all else as a number.

    Raises:
        ConfigurationError: the name or the number is not one.
    """
    if not isinstance(name, str) or not 0 < len(name) <= 200:
        raise ConfigurationError(f"loss: expected a name of 1 to 200 characters, found {name!r}")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex() or value.is_meta:
            raise ConfigurationError(
                f"loss: expected {name!r} as one number, found a tensor of {tuple(value.shape)}"
            )
        tensor: Loss = value
        return tensor
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ConfigurationError(f"loss: {name!r} is not a number: {error}") from error


def check_labels(labels: Mapping[str, str] | None) -> dict[str, str]:
    """The labels of a run.

    Raises:
        ConfigurationError: they are no text.
    """
    found = dict(labels or {})
    for key, value in found.items():
        if not isinstance(key, str) or not isinstance(value, str) or not key:
            raise ConfigurationError(f"labels: expected text, found {key!r}: {value!r}")
    return found


def add_loss(hook_probes: HookProbes, training: Training | None, name: str, number: Loss) -> None:
    """Keep a number, or a tensor of one element, for the step in progress; in an evaluation send
    it, as of the last step.
    """
    last = None if training is None else training.last_step
    if training is None or last is None or not training.is_evaluating():
        hook_probes.named.add(name, number)
        return
    hook_probes.named.send(training, training.next_step, "train")
    hook_probes.named.add(name, number)
    hook_probes.named.send(training, last, "eval")


def sample(hook_probes: HookProbes, training: Training | None, data: NamedData) -> None:
    """Look at these tensors, if it is time to."""
    if training is None or not training.is_evaluating():
        hook_probes.data.named("train", data)
    elif "predict" not in training.phases:
        hook_probes.data.named("eval", data)
