"""On PYTHONPATH of the trainings that tests start: they start and end in half the processor time.

The first step of any optimizer imports `torch._dynamo`, only to say that a part of it is not to be
compiled, and so does DDP: some 3.5 CPU seconds in each training, as many as all the rest of its
start. As long as nothing else has imported the compiler there is nobody to be told, so it is left
out until then.
What stays without this: `tests/matrix`, the trainings that compile, and `make first-ten-minutes`.

While PyTorch is imported, and when the process ends, the garbage collector would walk through a
million objects that stay: half a CPU second, which is saved, too.
"""

from __future__ import annotations

import atexit
import gc
import sys
from _frozen_importlib_external import PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_TORCH = "torch"
_COMPILER = "torch._dynamo"
_MARKER = "torch._compile"
_OPTIMIZER = "torch.optim.optimizer"
_PARALLEL = "torch.nn.parallel.distributed"
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
        wrap = _WRAPS.get(name)
        if wrap is None:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            wrap(spec.loader)
        return spec


def _around_import(change: Callable[[Any], Iterator[None]]) -> Callable[[Any], None]:
    """What a loader does once more when it executes a module: until `yield` before, then after."""

    def wrap(loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # Another may have wrapped it since, and have put back what it is by itself.
            vars(loader).pop("exec_module", None)
            for _ in change(module):
                execute(module)

        loader.exec_module = exec_module

    return wrap


@_around_import
def _uncollected(module: Any) -> Iterator[None]:
    collects = gc.isenabled()
    gc.disable()
    yield
    if collects:
        gc.enable()


@_around_import
def _mark_late(module: Any) -> Iterator[None]:
    """What `_disable_dynamo` returns looks at an attribute before it imports the compiler."""
    yield
    disable = module._disable_dynamo

    def late(fn: Any = None, recursive: bool = True) -> Any:
        if fn is None:
            return lambda fn: late(fn, recursive)
        if _COMPILER not in sys.modules:
            setattr(fn, _MARK, fn)
            _marked.append(fn)
        return disable(fn, recursive)

    module._disable_dynamo = late


@_around_import
def _break_late(module: Any) -> Iterator[None]:
    """`Optimizer.step` imports the compiler to break its graph there, twice."""
    yield
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


@_around_import
def _ask_late(module: Any) -> Iterator[None]:
    """Each DDP asks the compiler whether it is to have its gradients reduced in Python."""
    yield
    init = module.DistributedDataParallel.__init__

    def late(self: Any, *args: Any, **kwargs: Any) -> None:
        import torch

        if _COMPILER in sys.modules:
            init(self, *args, **kwargs)
            return
        torch._dynamo = answer = _Compiler()
        try:
            init(self, *args, **kwargs)
        finally:
            if torch._dynamo is answer:
                del torch._dynamo

    module.DistributedDataParallel.__init__ = late


class _Compiler:
    """What DDP is answered: what the compiler answers by default."""

    class utils:
        get_optimize_ddp_mode = staticmethod(lambda: "ddp_optimizer")


_WRAPS = {
    _TORCH: _uncollected,
    _MARKER: _mark_late,
    _OPTIMIZER: _break_late,
    _PARALLEL: _ask_late,
}

# To tocsin it is no module of a user's: with one, the launcher would not fork its helper.
del __file__


def _leave() -> None:
    if _COMPILER not in sys.modules:  # a part of it reports what is not collected
        gc.freeze()


atexit.register(_leave)
if _TORCH not in sys.modules:
    # Behind the hook of the product, which asks those behind it for torch.
    sys.meta_path.insert(sys.meta_path.index(PathFinder), _Watcher())
