"""Our code is left alone by torch.compile: it is called, and never made a graph of.

Behind a break of a compiled training step the compiler looks at each Python function that is called
next, ours too: it broke them at their clocks, made graphs of what was between, told the user so,
and made them again whenever a flag of ours had changed. So each code object of ours is marked, as
torch marks some of its own. What a compiler inlines on its way through a model is not concerned.

Imports nothing of the compiler.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Final

import torch

from tocsin.emitter.process.transparent_frames import follow_codes

_done: Final[set[str]] = set()


def leave_uncompiled() -> None:
    """Mark what was imported of ours since the last time; cheap where that is nothing."""
    mark = _marker(recursive=False)
    if mark is None:
        return
    follow_codes(mark)
    for name, module in list(sys.modules.items()):
        if name not in _done and name.startswith("tocsin."):
            _done.add(name)
            for code in _codes(module):
                mark(code)


def leave_uncompiled_with_callees(*functions: Callable[..., object]) -> None:
    """Mark these such that what they call is left alone, too: of NumPy's, torch's, Python's."""
    mark = _marker(recursive=True)
    if mark is None:
        return
    for function in functions:
        mark(function.__code__)


@functools.cache
def _marker(*, recursive: bool) -> Callable[[CodeType], object] | None:
    """What marks a code object in this PyTorch; None: nothing does."""
    frames = torch._C._dynamo.eval_frame
    if not hasattr(frames, "set_code_exec_strategy"):  # before torch 2.7
        skip: Callable[[CodeType], object] | None = getattr(frames, "skip_code", None)
        return skip
    actions = frames._FrameAction
    callees = actions.SKIP if recursive else actions.DEFAULT
    how = frames._FrameExecStrategy(actions.SKIP, callees)
    return lambda code: frames.set_code_exec_strategy(code, how)


def _codes(module: ModuleType) -> Iterator[CodeType]:
    """The code of its functions and of its classes' methods, and of what is defined in them."""
    for thing in list(vars(module).values()):
        if isinstance(thing, type) and thing.__module__ == module.__name__:
            for member in list(vars(thing).values()):
                yield from _inside(_function(member))
        elif getattr(thing, "__module__", None) == module.__name__:
            yield from _inside(_function(thing))


def _function(thing: object) -> object:
    """The function behind a property, a static method or a decorator."""
    for name in ("fget", "__func__", "func"):
        thing = getattr(thing, name, thing)
    return getattr(thing, "__wrapped__", thing)


def _inside(function: object) -> Iterator[CodeType]:
    if isinstance(function, FunctionType):
        waiting = [function.__code__]
        while waiting:
            code = waiting.pop()
            yield code
            waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
