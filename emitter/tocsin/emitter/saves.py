"""Where checkpoints are written: `torch.save`, and Lightning's call above it.

Lightning gives `torch.save` a buffer, and writes that to a file itself.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from tocsin.emitter.torch_hooks import Hooks

PACKAGES: Final = ("lightning.fabric", "lightning_fabric")
"""Lightning's, by the name of each of its distributions."""


class Saves:
    """Notices what this process saves."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks: Final = hooks
        self._known: Final[set[type]] = set()

    def install(self) -> None:
        """Put the hook into torch."""
        original = torch.save

        @functools.wraps(original)
        def save(obj: object, f: object, *args: object, **kwargs: object) -> object:
            return self._write(f, lambda: original(obj, f, *args, **kwargs))

        torch.save = save
        torch.serialization.save = save

    def follow_lightning(self) -> None:
        """Put the hook into Lightning, if it was imported."""
        for package in PACKAGES:
            module = sys.modules.get(f"{package}.plugins.io.torch_io")
            writer = getattr(module, "TorchCheckpointIO", None)
            if isinstance(writer, type) and writer not in self._known:
                self._known.add(writer)
                self._wrap(writer)

    def _wrap(self, writer: type) -> None:
        original: Callable[..., object] = getattr(writer, "save_checkpoint")  # noqa: B009 (mypy)
        write = self._write

        @functools.wraps(original)
        def save(
            io: object, checkpoint: object, path: object, *args: object, **kwargs: object
        ) -> object:
            return write(path, lambda: original(io, checkpoint, path, *args, **kwargs))

        setattr(writer, "save_checkpoint", save)  # noqa: B010 (mypy)

    def _write(self, target: object, write: Callable[[], object]) -> object:
        capture = self._hooks.capture
        if capture is None:
            return write()
        training, began = capture.training, time.monotonic()
        step = training.last_step
        training.phases.append("checkpoint")
        try:
            result = write()
        finally:
            if "checkpoint" in training.phases:
                training.phases.remove("checkpoint")
        duration_s = time.monotonic() - began
        self._hooks.wall.call("checkpoints", capture.saved, target, step, duration_s)
        return result
