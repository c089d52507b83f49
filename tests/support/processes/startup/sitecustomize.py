"""On PYTHONPATH of the trainings that tests start: PyTorch's compiler is imported when it is used.

The first step of any optimizer imports `torch._dynamo`, only to say that a part of it is not to be
compiled: some 3.5 CPU seconds in each training, as many as all the rest of its start. As long as
nothing else has imported the compiler there is nobody to be told, so it is left out until then.
What stays without this: `tests/matrix`, the trainings that compile, and `make first-ten-minutes`.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_COMPILER = "torch._dynamo"
_MARKER = "torch._compile"
_OPTIMIZER = "torch.optim.optimizer"
_MARK = "__dynamo_disable"

_marked: list[Any] = []
"""Functions that stand for themselves made known to the compiler, until it is there."""


class _Watcher:
    """A finder that finds nothing itself: it sees what is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == _COMPILER:
            for function in _marked:
                vars(function).pop(_MARK, None)
            _marked.clear()
        if name != _MARKER and name != _OPTIMIZER:
            return None
        from _frozen_importlib_external import PathFinder

        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            _follow(spec.loader, _mark_late if name == _MARKER else _break_late)
        return spec


def _follow(loader: Any, change: Callable[[Any], None]) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        execute(module)
        change(module)

    loader.exec_module = exec_module


def _mark_late(module: Any) -> None:
    """What `_disable_dynamo` returns looks at an attribute before it imports the compiler."""
    disable = module._disable_dynamo

    def late(fn: Any = None, recursive: bool = True) -> Any:
        if fn is None:
            return lambda fn: late(fn, recursive)
        if _COMPILER not in sys.modules:
            setattr(fn, _MARK, fn)
            _marked.append(fn)
        return disable(fn, recursive)

    module._disable_dynamo = late


def _break_late(module: Any) -> None:
    """`Optimizer.step` imports the compiler to break its graph there, twice."""
    decorate = module._use_grad_for_differentiable

    def late(func: Any) -> Any:
        import functools

        import torch

        decorated = decorate(func)

        @functools.wraps(func)
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _COMPILER in sys.modules:
                return decorated(self, *args, **kwargs)
            with torch.set_grad_enabled(self.defaults["differentiable"]):
                return func(self, *args, **kwargs)

        return step

    module._use_grad_for_differentiable = late


# To tocsin it is no module of a user's: with one, the launcher would not fork its helper.
del __file__

if "torch" not in sys.modules:
    sys.meta_path.insert(0, _Watcher())
