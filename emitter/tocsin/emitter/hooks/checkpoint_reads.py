"""Which files were loaded before a training's first step: from which checkpoint it goes on.

Sits in `torch.load`, through which the Hugging Face Trainer, Accelerate and Lightning read theirs,
too. Loading by other means is not seen.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Final

import torch

from tocsin.emitter.probes.checkpoint_files import target_path
from tocsin.emitter.process.transparent_frames import transparent

if TYPE_CHECKING:
    from tocsin.emitter.hooks.loop_state import LoopState

MAX_FILES: Final = 16
"""Files that are remembered, the last ones."""

MAX_OF_FOLDER: Final = 4
"""Of these in one folder: a data set of files must not push the checkpoint out."""

_LONGEST: Final = 4096


class CheckpointReads:
    """Notices what this process loads."""

    def __init__(self, loop: LoopState) -> None:
        self._loop: Final = loop
        self._paths: dict[str, None] = {}

    def install(self) -> None:
        """Put the hook into torch."""
        original = torch.load

        @transparent
        @functools.wraps(original)
        def load(*args: object, **kwargs: object) -> object:
            if self._loop.capture is None:
                source = args[0] if args else kwargs.get("f")
                self._loop.isolation.run("checkpoints", self._note, source)
            return original(*args, **kwargs)

        torch.load = load
        torch.serialization.load = load

    def drain(self) -> tuple[str, ...]:
        """The files since the last call, the last one loaded at the end."""
        paths, self._paths = tuple(self._paths), {}
        return paths

    def _note(self, source: object) -> None:
        path = target_path(source)
        if path is None:
            return
        # A link to the newest one, as many keep it, and what it is called itself.
        for name in (os.path.realpath(path), str(path)):
            if len(name) > _LONGEST:
                continue
            self._paths.pop(name, None)
            beside = [one for one in self._paths if os.path.dirname(one) == os.path.dirname(name)]
            if len(beside) >= MAX_OF_FOLDER:
                del self._paths[beside[0]]
            elif len(self._paths) >= MAX_FILES:
                del self._paths[next(iter(self._paths))]
            self._paths[name] = None
