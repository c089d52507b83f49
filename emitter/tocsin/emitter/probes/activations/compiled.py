"""Activations of compiled models: an operation of ours in the graph, which reads when it is due.

torch.compile goes through the calls that we watch when it makes a graph. There each puts one
operation with no result into it, which is a call back into this process: a few µs at each step, and
the statistics are taken as in a model that is not compiled, at the steps at which they are due.
Nothing is guarded on that, nothing is a break, and nothing that the model computes hangs on it.

Which module it is is asked once, of the compiler, as the graph is made: a number stands in the
graph. Where one graph serves several modules (blocks that are compiled one by one), the number is
that of the first, and the calls of a step tell them apart.

It must be there before the first graph is: put in later, each graph would be made again. And
nothing is put into graphs that CUDA graphs may record, for a recording does not call back.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Final, TypeVar

import torch
from torch import nn

from tocsin.emitter.model import discovery
from tocsin.emitter.probes.activations.module_kinds import Kind, compiled_itself, kind_of, scan
from tocsin.emitter.process.environment import RUN_ID
from tocsin.emitter.process.transparent_frames import transparent
from tocsin.emitter.training.context import current

_F = TypeVar("_F", bound=Callable[..., object])

CUDA_GRAPH_MODES: Final = ("reduce-overhead", "max-autotune")
MAX_SLOTS: Final = 10_000
IN_GRAPHS: Final = hasattr(torch.compiler, "is_exporting")
"""Whether an export is known from a compilation (torch 2.7); nothing of ours may be in one."""

NONE: Final = -1


class Slots:
    """The places in the graphs of this process where something is read."""

    def __init__(self) -> None:
        self.modules: Final[list[weakref.ref[nn.Module]]] = []
        self.late = False
        """Whether there were graphs before we were here."""
        self.cuda_graphs = False
        """Whether a model was compiled for CUDA graphs."""
        self.compiling = False
        """Whether anything was compiled since."""
        self.wanted: Final[weakref.WeakSet[nn.Module]] = weakref.WeakSet()
        """Modules that are looked at for what they are in their model, not for their type."""

    def module(self, slot: int) -> nn.Module | None:
        """Whose place this is, if it is still alive."""
        return self.modules[slot]() if 0 <= slot < len(self.modules) else None

    def acquire(self, *, whatever: bool) -> int:
        """A number for the module whose call is traced now; NONE: nothing is to be in the graph.

        Called while a graph is made, by the compiler, which takes the answer for a constant.
        `whatever`: the module may be of any type.
        """
        if not (current.session is not None or os.environ.get(RUN_ID)) or self.cuda_graphs:
            return NONE
        module = _traced_module(sys._getframe(1))
        if module is None or len(self.modules) >= MAX_SLOTS:
            return NONE
        if not whatever and module not in self.wanted and kind_of(module) is None:
            return NONE
        self.modules.append(weakref.ref(module))
        return len(self.modules) - 1


slots: Final = Slots()
"""Those of this process."""


def _traced_module(frame: FrameType | None) -> nn.Module | None:
    """The innermost module whose code is traced: the compiler's own frames know it."""
    seen: object = None
    while frame is not None:
        tracer = frame.f_locals.get("self")
        traced = getattr(tracer, "symbolic_locals", None)
        code = getattr(tracer, "f_code", None)
        if tracer is not seen and isinstance(traced, dict) and code is not None:
            seen = tracer
            module = _value(traced.get(code.co_varnames[0])) if code.co_varnames else None
            if isinstance(module, nn.Module):
                return module
        frame = frame.f_back
    return None


def _value(variable: object) -> object:
    """What a variable of the compiler stands for."""
    cache = getattr(variable, "_cache", None)
    for holder in (variable, getattr(cache, "vt", None), cache):
        value = getattr(holder, "value", None)
        if isinstance(value, nn.Module):
            return value
    return None


def _constant(function: _F) -> _F:
    """Have the compiler call a function while it traces, and keep the answer for good: what
    `torch.compiler.assume_constant_result` does, which would import the compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant
def acquire_slot(whatever: bool) -> int:
    """`slots.acquire`, for the compiler: one answer for good. Never raises."""
    try:
        return slots.acquire(whatever=whatever)
    # The emitter's isolation: what is raised here would end the user's compilation.
    except Exception:
        return NONE


def trace_output(result: object, args: tuple[object, ...], slot: int) -> None:
    """Put the operation into the graph that is made: traced, never run.

    `result` is what a module returned, a tensor of any shape or a tuple of such; of a tuple the
    first and the last are read. `args` is what the module was called with.
    """
    if is_attention(slot):
        # If it does not return its weights, it calls an attention function, which is traced.
        if isinstance(result, tuple) and isinstance(result[-1], torch.Tensor) and args:
            key = args[1] if len(args) > 1 else args[0]
            if isinstance(args[0], torch.Tensor) and isinstance(key, torch.Tensor):
                torch.ops.tocsin.observe(args[0], key, slot)
    elif isinstance(result, tuple):
        if len(result) > 1 and isinstance(result[0], torch.Tensor):
            last = result[-1]
            chosen = last if isinstance(last, torch.Tensor) else None
            torch.ops.tocsin.observe(result[0], chosen, slot)
    elif isinstance(result, torch.Tensor):
        first = args[0] if args else None
        # The input shows whether a unit is saturated.
        before = first if isinstance(first, torch.Tensor) and takes_input(slot) else None
        torch.ops.tocsin.observe(result, before, slot)


def trace_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    slot: int,
) -> None:
    """Put the operation into the graph that is made: traced, never run.

    Args:
        query: `[B, H, Q, D]`, or `[B, Q, D]`.
        key: `[B, G, K, D]`, or `[B, K, D]`.
        args: what `scaled_dot_product_attention` was called with behind query, key and value.
        kwargs: what it was called with by name.
        slot: the number of the place in the graph.
    """
    mask = args[0] if args else kwargs.get("attn_mask")
    causal = args[2] if len(args) > 2 else kwargs.get("is_causal", False)
    scale = kwargs.get("scale")
    torch.ops.tocsin.observe_attention(query, key, mask, causal, scale, slot)


@_constant
def takes_input(slot: int) -> bool:
    """Whether the module is read by its input."""
    return _kind(slot) is Kind.SATURATING


@_constant
def is_attention(slot: int) -> bool:
    """Whether the module is read by its query and key."""
    return _kind(slot) is Kind.ATTENTION


def _kind(slot: int) -> Kind | None:
    module = slots.module(slot)
    return None if module is None else kind_of(module)


OnCall = Callable[[int, torch.Tensor, "torch.Tensor | None"], None]
OnAttention = Callable[
    [int, torch.Tensor, torch.Tensor, "torch.Tensor | None", bool, "float | None"], None
]

_library: Final[list[torch.library.Library]] = []


def define(on_call: OnCall, on_attention: OnAttention) -> None:
    """Make the operations `tocsin::observe` and `tocsin::observe_attention`, once.

    Args:
        on_call: called with a slot, the output of its module (any shape), and what belongs to that:
            the input, or the chosen experts of a router. Of an attention: with its query and key.
        on_attention: called with a slot, query `[B, H, Q, D]`, key `[B, G, K, D]`, mask,
            `is_causal` and `scale` of an attention.
    """
    if _library:
        return
    library = torch.library.Library("tocsin", "FRAGMENT")
    library.define("observe(Tensor x, Tensor? y, int slot) -> ()")
    library.define(
        "observe_attention(Tensor q, Tensor k, Tensor? mask, bool is_causal, float? scale, "
        "int slot) -> ()"
    )

    def trace_output(x: torch.Tensor, y: torch.Tensor | None, slot: int) -> None:
        on_call(slot, x, y)

    def trace_attention(
        q: torch.Tensor,
        k: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,
        scale: float | None,
        slot: int,
    ) -> None:
        on_attention(slot, q, k, mask, is_causal, scale)

    for name, function in (("observe", trace_output), ("observe_attention", trace_attention)):
        library.impl(name, function, "CompositeExplicitAutograd")
        library.impl(name, _nothing, "Meta")
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        # Without a result it would be taken out as dead code.
        torch.fx.node.has_side_effect(getattr(torch.ops.tocsin, name).default)
    _library.append(library)


def _nothing(*args: object) -> None:
    return None


def is_late() -> bool:
    """Whether there is a compiled model in this process of which graphs were made already."""
    return _had_graphs() and any(map(compiled_itself, discovery.find().modules))


def _had_graphs() -> bool:
    utilities = sys.modules.get("torch._dynamo.utils")
    counters: Mapping[str, Mapping[str, int]] = getattr(utilities, "counters", {})
    return bool(counters.get("stats", {}).get("unique_graphs"))


def follow_compile(keep: Callable[[Iterable[nn.Module]], None]) -> None:
    """In front of each torch.compile, watch what is in the model, and see what it is made for."""
    original = torch.compile

    @transparent
    @functools.wraps(original)
    def compile(*args: object, **kwargs: object) -> object:
        if not torch.compiler.is_dynamo_compiling():
            current.isolation.run("activations", _about_to_compile, keep, args, kwargs)
        return original(*args, **kwargs)

    torch.compile = compile


def catch_up(keep: Callable[[Iterable[nn.Module]], None]) -> None:
    """Watch what is in models of which torch.compile will make graphs when they are called."""
    if "torch._dynamo" not in sys.modules:
        return
    modules: list[nn.Module] = []
    for module in discovery.find().modules:
        if "_modules" in module.__dict__ and compiled_itself(module):
            modules += scan(module).modules()
    if modules or _has_compiled():
        slots.wanted.update(modules)
        keep(modules)


def _has_compiled() -> bool:
    """Whether torch.compile was called in this process, of a function perhaps.

    That the compiler was imported is no sign: the first step of an optimizer imports it.
    """
    frames = sys.modules.get("torch._dynamo.eval_frame")
    backends = getattr(frames, "cached_backends", None)
    # Functions that are never to be compiled are listed too, without a backend.
    return not isinstance(backends, dict) or any(each is not None for each in backends.values())


def _about_to_compile(
    keep: Callable[[Iterable[nn.Module]], None],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> None:
    if not (current.session is not None or os.environ.get(RUN_ID)):
        return
    slots.compiling = True
    options = kwargs.get("options")
    graphs = isinstance(options, Mapping) and options.get("triton.cudagraphs")
    if (graphs or kwargs.get("mode") in CUDA_GRAPH_MODES) and torch.cuda.is_available():
        slots.cuda_graphs = True
    model = args[0] if args else kwargs.get("model")
    # Module.compile() hands over its own method.
    model = getattr(model, "__self__", model)
    modules = []
    if isinstance(model, nn.Module):
        modules = scan(model).modules()
        slots.wanted.update(modules)
    keep(modules)
