"""Where checkpoints are written, and the hooks there.

- `torch.save`;
- safetensors, below `save_file` and `save_model`;
- `torch.distributed.checkpoint.save`, and `async_save`, whose write ends later on another thread;
- Lightning's writer, which gives `torch.save` a buffer and writes that to a file itself;
- the Hugging Face Trainer's checkpoints and `save_pretrained`, and Accelerate's `save_state`: the
  folder is what a training goes on from, so the files in it are not told one by one.

What frameworks have is hooked when a training begins, if they were imported by then. Each write of
a file or folder is marked as the phase `checkpoint`, its begin at once: a write that hangs shows.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, TypeAlias

import torch

from tocsin.emitter.probes.checkpoint_files import target_path
from tocsin.emitter.process.transparent_frames import transparent
from tocsin.emitter.stop import saving

if TYPE_CHECKING:
    from tocsin.emitter.capture.capture import Capture
    from tocsin.emitter.hooks.loop_state import LoopState

Arguments: TypeAlias = "Sequence[object]"
Named: TypeAlias = "Mapping[str, object]"
Target: TypeAlias = "Callable[[Arguments, Named, object], object]"
"""What a call writes to, from its arguments and, afterwards, what it has returned (before: None).
None: it is not known yet."""


def _argument(place: int, name: str) -> Target:
    def target(args: Arguments, kwargs: Named, result: object) -> object:
        return args[place] if len(args) > place else kwargs.get(name)

    return target


def _trainer_folder(args: Arguments, kwargs: Named, result: object) -> object:
    """Of the Hugging Face Trainer; args[0] is it."""
    folder = getattr(getattr(args[0], "args", None), "output_dir", None)
    step = getattr(getattr(args[0], "state", None), "global_step", None)
    return os.path.join(folder, f"checkpoint-{step}") if isinstance(folder, str) else None


def _state_folder(args: Arguments, kwargs: Named, result: object) -> object:
    """Of Accelerate, which may number its folders itself and returns the name."""
    return result if result is not None else _argument(1, "output_dir")(args, kwargs, None)


def _distributed(args: Arguments, kwargs: Named, result: object) -> object:
    writer = kwargs.get("storage_writer")
    return kwargs.get("checkpoint_id") or getattr(writer, "path", None)


METHODS: Final[tuple[tuple[str, str, str, Target], ...]] = (
    (
        "lightning.fabric.plugins.io.torch_io",
        "TorchCheckpointIO",
        "save_checkpoint",
        _argument(2, "path"),
    ),
    (
        "lightning_fabric.plugins.io.torch_io",
        "TorchCheckpointIO",
        "save_checkpoint",
        _argument(2, "path"),
    ),
    ("transformers.trainer", "Trainer", "_save_checkpoint", _trainer_folder),
    (
        "transformers.modeling_utils",
        "PreTrainedModel",
        "save_pretrained",
        _argument(1, "save_directory"),
    ),
    ("accelerate.accelerator", "Accelerator", "save_state", _state_folder),
)
"""Module, class, method, and where it writes to."""

FUNCTIONS: Final[tuple[tuple[str, str, Target], ...]] = (
    # What `save_file` and `save_model` call, however they were imported.
    ("safetensors.torch", "serialize_file", _argument(1, "filename")),
    ("torch.distributed.checkpoint", "save", _distributed),
    ("torch.distributed.checkpoint", "async_save", _distributed),
)


class CheckpointWrites:
    """Notices what this process saves."""

    def __init__(self, loop: LoopState) -> None:
        self._loop: Final = loop
        self._known: Final[set[object]] = set()
        self._inside: Final = threading.local()

    def install(self) -> None:
        """Put the hook into torch."""
        save = self._wrapped(torch.save, _argument(1, "f"))
        torch.save = save
        torch.serialization.save = save

    def follow_frameworks(self) -> None:
        """Put hooks into what was imported."""
        for module_name, class_name, method, target in METHODS:
            kind = getattr(sys.modules.get(module_name), class_name, None)
            if isinstance(kind, type) and (kind, method) not in self._known:
                self._known.add((kind, method))
                setattr(kind, method, self._wrapped(getattr(kind, method), target))
        for module_name, name, target in FUNCTIONS:
            module = sys.modules.get(module_name)
            if module is not None and (module_name, name) not in self._known:
                self._known.add((module_name, name))
                setattr(module, name, self._wrapped(getattr(module, name), target))

    def _wrapped(self, original: Callable[..., object], target: Target) -> Callable[..., object]:
        @transparent
        @functools.wraps(original)
        def save(*args: object, **kwargs: object) -> object:
            capture = self._loop.capture
            if capture is None or getattr(self._inside, "now", False):
                return original(*args, **kwargs)
            return self._write(capture, original, target, args, kwargs)

        return save

    def _write(
        self,
        capture: Capture,
        original: Callable[..., object],
        target: Target,
        args: Arguments,
        kwargs: Named,
    ) -> object:
        isolation = self._loop.isolation
        place = isolation.run("checkpoints", _path, target, args, kwargs, None)
        if place is False:  # a buffer, a pipe: no checkpoint, and what it is part of may be one
            return original(*args, **kwargs)
        training = capture.training
        step = training.last_step
        isolation.run("checkpoints", training.phase, "checkpoint", "begin")
        isolation.run("checkpoints", saving.writes.start)
        self._inside.now = True
        began, whole = time.perf_counter(), False
        try:
            result = original(*args, **kwargs)
            whole = True
        finally:
            if not whole:
                isolation.run("checkpoints", saving.writes.end)
            ended = time.perf_counter()
            self._inside.now = False
            if self._loop.hook_probes.on_its_thread:
                isolation.run("phases", self._loop.hook_probes.phases.wrote, began, ended)
            isolation.run("checkpoints", training.phase, "checkpoint", "end", ended - began)
        written = isolation.run("checkpoints", target, args, kwargs, result)
        # Of a write that ends later, too: the weights may be others by then.
        finite = isolation.run("checkpoints", capture.is_finite, step)
        wrote = self._loop.hook_probes.checkpoints.wrote
        later = getattr(result, "upload_completion", result)
        if not isinstance(later, Future):
            isolation.run("checkpoints", saving.writes.end, _name(written))
            took = ended - began
            isolation.run("checkpoints", wrote, training, written, step, took, finite=finite)
            return result

        def when_done(write: Future[object]) -> None:
            isolation.run("checkpoints", saving.writes.end, _name(written))
            if not write.cancelled() and write.exception() is None:
                took = time.perf_counter() - began
                isolation.run("checkpoints", wrote, training, written, step, took, finite=finite)

        later.add_done_callback(when_done)
        return result


def _name(written: object) -> str:
    """The path of what was written; empty if it has none."""
    path = target_path(written)
    return "" if path is None else str(path)


def _path(target: Target, args: Arguments, kwargs: Named, result: object) -> bool:
    """Whether a call writes to the file system, or may do so."""
    place = target(args, kwargs, result)
    return place is None or target_path(place) is not None
