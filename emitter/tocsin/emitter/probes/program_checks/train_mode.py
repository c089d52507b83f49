"""Layers that work differently in training, and the mode that they are in: dropout and batch
normalisation.

A training is looked at when the first backward call of a step begins: whether the model is in
`eval()` costs a look at an attribute, and its layers are gone through when that has changed. An
evaluation is known by a loss that is computed without gradients, or by batches of a data loader
that no backward call follows; whether such layers are then called in train mode is seen by
watching their classes from there on, from its second batch.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from tocsin.emitter.probes.activations.call_patches import ModuleCallObserver
from tocsin.emitter.probes.activations.module_kinds import is_compiled
from tocsin.schemas.records.events import clip
from tocsin.schemas.records.program_facts import ModeSeen

if TYPE_CHECKING:
    from tocsin.emitter.training.training import Training

PROBE: Final = "layer modes"
MAX_IN_VAIN: Final = 20
"""Losses and batches without gradients after which no more is looked for."""

MAX_REPORTS: Final = 50


def is_switchable(module: nn.Module) -> bool:
    """Whether it works differently in training."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return bool(module.p > 0)
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return bool(module.track_running_stats)
    return isinstance(module, nn.RNNBase | nn.MultiheadAttention) and module.dropout > 0


class TrainMode(ModuleCallObserver):
    """The train and eval modes of a model's layers."""

    probe = PROBE

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        """Another training begins."""
        self.stop()
        self._training: Training | None = None
        self._root: weakref.ref[nn.Module] | None = None
        self._known: bool | None = None
        self._reported = 0
        self._layers: frozenset[int] = frozenset()
        self.found = False
        """Whether one was called in train mode without gradients since the last backward call: what
        is called in front of one is a part of the training, as the first pass of a checkpointed
        layer, or a momentum encoder.
        """
        self._vain = 0
        self._evaluated: set[str] = set()

    def start(self, training: Training, root: nn.Module | None) -> None:
        """A training begins whose model is `root`."""
        self._training = training
        self._root = None if root is None else weakref.ref(root)

    @property
    def changed(self) -> bool:
        """Whether the model was put into another mode since the last step."""
        root = None if self._root is None else self._root()
        return root is not None and root.training is not self._known

    def backward(self) -> None:
        """The first backward call of a step is about to begin."""
        root = None if self._root is None else self._root()
        if root is None or root.training is self._known:
            return
        self._known = root.training
        layers = _switchable(root)
        self._layers = frozenset(id(module) for _, module in layers)
        inside = [(name, module) for name, module in layers if module.training]
        mode = "train" if root.training or inside else "eval"
        self._report("training", mode, inside if mode == "train" else layers)

    def silent_loss(self, *, evaluating: bool) -> None:
        """A loss was computed without gradients."""
        if evaluating:
            if "eval" not in self._evaluated and self._layers:
                self._evaluated.add("eval")
                root = None if self._root is None else self._root()
                if root is not None:
                    self._report("evaluation", "eval", _switchable(root))
            return
        self._suspect()

    def silent_batch(self) -> None:
        """A data loader gave a batch, and no backward call has followed the one before."""
        self._suspect()

    def called_in_training(self) -> None:
        """Such a layer was called in train mode without gradients, as somebody else has seen."""
        self.found = True

    def _suspect(self) -> None:
        if "train" in self._evaluated or self._vain >= MAX_IN_VAIN or not self._layers:
            return
        root = None if self._root is None else self._root()
        if root is None:
            return
        if self.found:
            self.stop()
            self._evaluated.add("train")
            layers = [pair for pair in _switchable(root) if pair[1].training]
            self.found = False
            if layers:
                self._report("evaluation", "train", layers)
            return
        self._vain += 1
        if self._vain >= MAX_IN_VAIN:
            self.stop()
        elif not self.due and not is_compiled(root):
            kinds = {type(m) for _, m in _switchable(root) if m.training}
            # None, if somebody else watches them just now: then the next batch is in time.
            self.due = self.patches.put_classes(kinds)

    def on_call(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        """A module was called; what it was given and has returned is not read."""
        if module.training and not torch.is_grad_enabled() and id(module) in self._layers:
            self.found = True

    def _report(self, doing: str, mode: str, layers: list[tuple[str, nn.Module]]) -> None:
        training = self._training
        if training is None or not layers or self._reported >= MAX_REPORTS:
            return
        self._reported += 1
        # Dropout first: batch normalisation alone is often put into eval() on purpose.
        name, first = min(layers, key=lambda pair: _normalises(pair[1]))
        evaluation = doing == "evaluation"
        step = max(0, training.next_step - 1) if evaluation else training.next_step
        training.emit(
            ModeSeen(
                **training.who,
                doing="evaluation" if evaluation else "training",
                layers_in="train" if mode == "train" else "eval",
                layers=len(layers),
                first=clip(name, 500),
                kind=clip(type(first).__name__, 100),
                step=step,
            )
        )


def _normalises(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def _switchable(root: nn.Module) -> list[tuple[str, nn.Module]]:
    return [
        (name or type(module).__name__, module)
        for name, module in root.named_modules()
        if is_switchable(module)
    ]
