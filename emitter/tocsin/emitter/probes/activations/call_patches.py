"""Which calls of torch are watched: `__call__` of classes, and the function of attention.

They are watched from when a due step is armed until it is over: where a step takes a millisecond,
each call that is watched adds 1 to 2 µs, armed or not. Once torch.compile is used they are watched
for good, so that what graphs are made of does not change.

Nothing sits on a module itself. Looked up at each call is what stands behind our own: tracers put
theirs in its place.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterable
from types import FrameType, SimpleNamespace
from typing import ClassVar, Final

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from tocsin.emitter.probes.activations.compiled import (
    IN_GRAPHS,
    NONE,
    acquire_slot,
    trace_attention,
    trace_output,
)
from tocsin.emitter.probes.activations.module_kinds import TYPES
from tocsin.emitter.process.transparent_frames import transparent
from tocsin.emitter.training.context import current

FRAMES: Final = 12
"""Callers of the function of attention among which its module is looked for."""


class ModuleCallObserver:
    """Receives the calls while `due`. A method does nothing unless it is overridden."""

    probe: ClassVar[str] = "activations"
    """Under which `on_call` is isolated."""

    def __init__(self) -> None:
        self.due = False
        self.patches: Final = CallPatches(self)

    def on_call(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        """A module was called with `args` by position, and returned `output`: tensors of any shape,
        or what holds them.
        """

    def on_attention(
        self,
        owner: nn.Module | None,
        query: object,
        key: object,
        mask: object,
        is_causal: bool,
        scale: float | None,
    ) -> None:
        """`scaled_dot_product_attention` was called, in the forward of `owner`, with these tensors:
        query `[..., Q, D]`, key `[..., K, D]`, and a mask that is broadcast to `[..., Q, K]`.
        """

    def on_softmax(self, result: object) -> None:
        """A softmax over the last dimension returned this tensor, of any shape; called after
        `put_attention` alone.
        """

    def stop(self) -> None:
        """Observe no calls until armed again; also called when `on_call` has raised."""
        if self.due:
            self.due = False
            self.patches.restore()

    def called(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        """Run `on_call` isolated. Raises nothing."""
        current.isolation.run(self.probe, self.on_call, module, args, output)
        if self.probe in current.isolation.off:
            current.isolation.run("clean-up", self.stop)

    def traced(self, result: object, args: tuple[object, ...]) -> None:
        """A compiler traces a call."""
        if IN_GRAPHS and not torch.compiler.is_exporting():
            slot = acquire_slot(False)
            if slot != NONE:
                trace_output(result, args, slot)

    def __reduce__(self) -> tuple[type, tuple[object, ...], dict[str, object]]:
        # Who pickles a class by value (cloudpickle, of one in `__main__`) has our call in it: it
        # works without us, and does nothing but the call.
        return SimpleNamespace, (), {"due": False, "traced": operator.is_}


class CallPatches:
    """The patched function calls of this process."""

    def __init__(self, observer: ModuleCallObserver) -> None:
        self.for_good = False
        self._observer: Final = observer
        self._classes: Final[list[type[nn.Module]]] = []
        self._functions: tuple[Callable[..., object], Callable[..., object]] | None = None
        self._softmaxes: Final[list[tuple[object, Callable[..., object] | None, object]]] = []
        self._ours: Final[set[object]] = set()

    def watch(self, kind: type[nn.Module]) -> bool:
        """Watch the calls of a class; False: they are watched already, or are its own affair."""
        if "__call__" in kind.__dict__ or kind.__call__ in self._ours:
            return False
        base = next(
            above
            for above in kind.__mro__[1:]
            if "__call__" in above.__dict__ and above.__dict__["__call__"] not in self._ours
        )
        call = _watched_call(base, self._observer)
        self._ours.add(call)
        kind.__call__ = call
        return True

    def put(self, modules: Iterable[nn.Module]) -> None:
        """Watch these modules' classes and the function of attention, until `restore`."""
        if self.for_good:
            return
        for kind in {type(module) for module in modules}:
            if self.watch(kind):
                self._classes.append(kind)
        self._put_function()

    def _put_function(self) -> None:
        if self._functions is None:
            original = nn.functional.scaled_dot_product_attention
            watched = _watched_attention(original, self._observer)
            self._functions = original, watched
            nn.functional.scaled_dot_product_attention = watched

    def put_attention(self) -> None:
        """Watch the function of attention, and softmaxes, with which others write their own, until
        `restore`.
        """
        self._put_function()
        for home in (nn.functional, torch, torch.Tensor):
            watched = _watched_softmax(home.softmax, self._observer)
            # That of tensors is inherited.
            self._softmaxes.append((home, home.__dict__.get("softmax"), watched))
            home.softmax = watched

    def put_classes(self, kinds: Iterable[type[nn.Module]]) -> bool:
        """Watch the calls of these classes alone, until `restore`; whether there is one. Those of
        activations are left to their own probe, which may be armed meanwhile.
        """
        for kind in kinds:
            if kind not in TYPES and self.watch(kind):
                self._classes.append(kind)
        return bool(self._classes)

    def restore(self) -> None:
        """Take out again what `put` has put in."""
        if self.for_good:
            return
        while self._classes:
            kind = self._classes.pop()
            call = kind.__dict__.get("__call__")
            if call in self._ours:
                del kind.__call__
                self._ours.discard(call)
        while self._softmaxes:
            home, before, ours = self._softmaxes.pop()
            if vars(home).get("softmax") is ours:
                if before is None:
                    del home.softmax  # type: ignore[attr-defined]  # it is there
                else:
                    home.softmax = before  # type: ignore[attr-defined]  # a module has it
        if self._functions is not None:
            original, watched = self._functions
            if nn.functional.scaled_dot_product_attention is watched:
                nn.functional.scaled_dot_product_attention = original
            self._functions = None

    def keep(self, modules: Iterable[nn.Module]) -> None:
        """Watch these modules' classes, those of activations, Linear and the function of attention
        for good.
        """
        if not self.for_good:
            self.restore()
            self.put(())
            self.for_good = True
            for kind in (*TYPES, nn.Linear):
                self.watch(kind)
            if self._functions is not None:
                _let_script(*self._functions)
        for module in modules:
            self.watch(type(module))


def _watched_call(base: type[nn.Module], observer: ModuleCallObserver) -> Callable[..., object]:
    @transparent
    @functools.wraps(nn.Module.__call__)
    def call(self: nn.Module, *args: object, **kwargs: object) -> object:
        # Alive to the end: the compiler's frames name the module by it.
        module = self
        result = base.__call__(self, *args, **kwargs)
        # First of all, so that a compiler sees a constant and nothing that changes.
        if is_dynamo_compiling():
            observer.traced(result, args)
            return result
        if observer.due:
            observer.called(module, args, result)
        return result

    return call


def _watched_attention(
    original: Callable[..., object], observer: ModuleCallObserver
) -> Callable[..., object]:
    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: object,
        **kwargs: object,
    ) -> object:
        result = original(query, key, value, *args, **kwargs)
        if is_dynamo_compiling():
            if IN_GRAPHS and not torch.compiler.is_exporting():
                slot = acquire_slot(True)
                if slot != NONE:
                    trace_attention(query, key, args, kwargs, slot)
            return result
        if observer.due:
            current.isolation.run(
                "attention", _observe_attention, observer, query, key, args, kwargs
            )
        return result

    # So that a model which holds it is pickled with torch's own.
    scaled_dot_product_attention.__module__ = "torch.nn.functional"
    scaled_dot_product_attention.__qualname__ = "scaled_dot_product_attention"
    scaled_dot_product_attention.__doc__ = original.__doc__
    return scaled_dot_product_attention


def attention_functions() -> tuple[object, ...]:
    """The functions in torch's modules that `put_attention` replaces, as they are now."""
    functions = nn.functional
    return functions.scaled_dot_product_attention, functions.softmax, torch.softmax


def _watched_softmax(
    original: Callable[..., object], observer: ModuleCallObserver
) -> Callable[..., object]:
    @transparent
    @functools.wraps(original)
    def softmax(input: object, *args: object, **kwargs: object) -> object:
        result = original(input, *args, **kwargs)
        if not is_dynamo_compiling() and observer.due:
            dim = args[0] if args else kwargs.get("dim")
            current.isolation.run("attention", _observe_softmax, observer, result, dim)
        return result

    return softmax


def _observe_softmax(observer: ModuleCallObserver, result: object, dim: object) -> None:
    if isinstance(result, torch.Tensor) and dim in (-1, result.dim() - 1):
        observer.on_softmax(result)


def _observe_attention(
    observer: ModuleCallObserver,
    query: object,
    key: object,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> None:
    mask = args[0] if args else kwargs.get("attn_mask")
    causal = args[2] if len(args) > 2 else kwargs.get("is_causal", False)
    scale = kwargs.get("scale")
    owner = owner_of(sys._getframe(2))
    observer.on_attention(
        owner, query, key, mask, bool(causal), scale if isinstance(scale, float) else None
    )


def owner_of(frame: FrameType | None) -> nn.Module | None:
    """The innermost module in whose forward this frame is."""
    for _ in range(FRAMES):
        if frame is None:
            return None
        variables = frame.f_code.co_varnames
        # Libraries hand the module to functions, as the first argument.
        if variables and variables[0] in ("self", "module"):
            module = frame.f_locals.get(variables[0])
            if isinstance(module, nn.Module):
                return module
        frame = frame.f_back
    return None


def _let_script(original: object, watched: object) -> None:
    """Tell TorchScript that ours is the operation that it knows."""
    name = torch.jit._builtins._find_builtin(original)
    if name is not None:
        torch.jit._builtins._register_builtin(watched, name)
