"""What is done to torch when a process imports it: called by the hook, or by `start()`.

Imports only what is cheap; the rest follows when a training begins.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from tocsin.emitter.process.environment import RUN_ID


def torch_loaded(torch: ModuleType, *, late: bool = False) -> None:
    """Put the hooks into torch, once per process. `torch` has just been executed; if `late`, some
    time ago.
    """
    from tocsin.emitter.hooks import torch_patches

    torch_patches.install(late=late)
    if os.environ.get(RUN_ID) and torch.distributed.is_available():
        from tocsin.emitter.stop import side_group

        side_group.wrap_init_process_group(torch.distributed)


def agent_loaded(module: ModuleType) -> None:
    """torchrun's agent class was imported: this process may be an agent."""
    from tocsin.emitter.stop import torchrun

    torchrun.guard_agents(module)


def when_torch_is_there() -> None:
    """Call `torch_loaded` now if torch is imported, else once it is."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch_loaded(torch, late=True)
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


class _Waiting:
    """A finder that only waits for torch, as the hook's does in a launched job."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                self._follow(spec)
                return spec
        return None

    def _follow(self, spec: ModuleSpec) -> None:
        loader = spec.loader
        if loader is None or not hasattr(loader, "__dict__"):
            return
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            execute(module)
            try:
                torch_loaded(module)
            # An emitter hook's isolation: `import torch` must work as without us.
            except Exception as error:
                with contextlib.suppress(Exception):  # stderr may be closed, or None
                    sys.stderr.write(f"tocsin: this training is not watched: {error!r}\n")

        loader.exec_module = exec_module  # type: ignore[method-assign]
        if self in sys.meta_path:
            sys.meta_path.remove(self)
