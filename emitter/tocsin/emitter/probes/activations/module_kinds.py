"""Which modules are looked at, by their type, and what for."""

from __future__ import annotations

import math
import re
import weakref
from dataclasses import dataclass
from enum import Enum
from typing import Final

from torch import nn

from tocsin.emitter.model import discovery
from tocsin.emitter.plan.collections import Selection
from tocsin.emitter.probes.activations.routers import experts_of

MAX_MODULES: Final = 1000
"""That are looked at, the first ones of the model."""

GRADIENT_FLOOR: Final = 1e-7
"""An input is out of the linear range where the gradient is smaller."""

TANH_LIMIT: Final = math.atanh(math.sqrt(1 - GRADIENT_FLOOR))  # 8.752
SIGMOID_LIMIT: Final = math.log((1 + math.sqrt(1 - 4 * GRADIENT_FLOOR)) / 2 / GRADIENT_FLOOR)
"""16.118: where s(x) (1 - s(x)) is the floor."""


class Kind(Enum):
    """What a module is looked at for."""

    RELU = "which of its units are dead"
    PLAIN = "statistics of its output"
    SATURATING = "how much of its input is out of the linear range"
    BOUNDED = "how much of its output is at a bound"
    SOFTMAX = "how sure its rows are"
    ATTENTION = "how its queries meet its keys"
    ROUTER = "how many tokens each expert gets"
    HEAD = "how large the logits are together"


_BY_TYPE: Final[tuple[tuple[type[nn.Module], Kind], ...]] = (
    (nn.ReLU, Kind.RELU),
    (nn.ReLU6, Kind.RELU),  # in front of Hardtanh, which it is a kind of
    (nn.LeakyReLU, Kind.PLAIN),
    (nn.PReLU, Kind.PLAIN),
    (nn.ELU, Kind.PLAIN),
    (nn.SELU, Kind.PLAIN),
    (nn.CELU, Kind.PLAIN),
    (nn.GELU, Kind.PLAIN),
    (nn.SiLU, Kind.PLAIN),
    (nn.Mish, Kind.PLAIN),
    (nn.Hardswish, Kind.PLAIN),
    (nn.Softplus, Kind.PLAIN),
    (nn.Tanh, Kind.SATURATING),
    (nn.Sigmoid, Kind.SATURATING),
    (nn.Hardtanh, Kind.BOUNDED),
    (nn.Hardsigmoid, Kind.BOUNDED),
    (nn.Softmax, Kind.SOFTMAX),
    (nn.MultiheadAttention, Kind.ATTENTION),
)
TYPES: Final = tuple(kind for kind, _ in _BY_TYPE)
"""The types of activations, whose calls torch.compile must find watched from the beginning."""

_BY_NAME: Final = re.compile(r"(GELU|SiLU|Swish|Mish)(Activation|Tanh)?$")
"""Activations that libraries define for themselves (`NewGELUActivation`, `QuickGELU`)."""

_CHANNELS_FIRST: Final = (
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
)


@dataclass(frozen=True, slots=True)
class Known:
    """A module of the model that is looked at."""

    module: weakref.ref[nn.Module]
    name: str
    kind: Kind
    channels_first: bool = False
    experts: int = 0
    top: int = 1
    picked: bool = False
    """Whether only a pattern, a type or a name of a collection has it looked at."""


@dataclass(frozen=True, slots=True)
class Found:
    """The modules of a model: those that are looked at, all names, and the embeddings."""

    known: dict[int, Known]
    names: dict[int, str]
    embeddings: tuple[tuple[str, weakref.ref[nn.Module]], ...]
    is_compiled: bool

    def modules(self) -> list[nn.Module]:
        """The captured modules that still exist."""
        return [module for k in self.known.values() if (module := k.module()) is not None]


def kind_of(module: nn.Module) -> Kind | None:
    """What a module of this type is looked at for; None: not at all."""
    for kind, what in _BY_TYPE:
        if isinstance(module, kind):
            return what
    if _BY_NAME.search(type(module).__name__) and not list(module.children()):
        return Kind.PLAIN
    return None


def scan(root: nn.Module, plan: Selection | None = None) -> Found:
    """Look through a model, in the order in which its modules were made.

    A plan that names modules, their types or patterns is asked for each module; what it selects
    is looked at whatever its type is.
    """
    everything = plan is None or plan.everything
    head = output_head(root)
    known: dict[int, Known] = {}
    names: dict[int, str] = {}
    embeddings: list[tuple[str, weakref.ref[nn.Module]]] = []
    modules = list(root.named_modules())
    parents = {id(child): parent for _, parent in modules for child in parent.children()}
    channels_first = False
    for path, module in modules:
        name = discovery.clean(path, root) or type(module).__name__
        names[id(module)] = name
        wanted = everything or (plan is not None and plan.selects(name, type(module).__name__))
        if wanted and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            embeddings.append((name, weakref.ref(module)))
        kind = kind_of(module)
        if kind is None and module.__dict__.get("_parameters"):
            channels_first = isinstance(module, _CHANNELS_FIRST)
        experts, top = 0, 1
        if module is head and everything:
            kind = Kind.HEAD
        elif kind is None and (routing := experts_of(module, parents.get(id(module)))) is not None:
            kind, (experts, top) = Kind.ROUTER, routing
        picked = kind is None and plan is not None and plan.picks(name, type(module).__name__)
        if picked:
            kind = Kind.PLAIN
        if kind is not None and wanted and len(known) < MAX_MODULES:
            reference = weakref.ref(module)
            known[id(module)] = Known(reference, name, kind, channels_first, experts, top, picked)
    return Found(known, names, tuple(embeddings), is_compiled(root))


def output_head(root: nn.Module) -> nn.Module | None:
    """The layer that puts out logits: the one that shares its weight with an embedding, else the
    last Linear of the model if it puts out as many numbers as an embedding has rows, or if none
    puts out more. None: there is no such layer.
    """
    linear = [module for module in root.modules() if isinstance(module, nn.Linear)]
    tables = [module for module in root.modules() if isinstance(module, nn.Embedding)]
    shared = {id(discovery.own_tensor(table, "weight")) for table in tables} - {id(None)}
    for module in linear:
        if id(discovery.own_tensor(module, "weight")) in shared:
            return module
    if linear and linear[-1].out_features > 1:
        width = linear[-1].out_features
        widest = max(module.out_features for module in linear)
        as_many = any(width == table.num_embeddings for table in tables)
        return linear[-1] if as_many or width == widest else None
    return None


def is_compiled(root: nn.Module) -> bool:
    """Whether torch.compile has a part of this model, or all of it."""
    return any(map(compiled_itself, root.modules()))


def compiled_itself(module: nn.Module) -> bool:
    """Whether torch.compile has this very module."""
    return (
        "_orig_mod" in module.__dict__.get("_modules", {})
        or module.__dict__.get("_compiled_call_impl") is not None
    )


def saturation(module: nn.Module) -> tuple[float, float]:
    """The bounds of the linear range: of the input (SATURATING) or of the output (BOUNDED)."""
    if isinstance(module, nn.Hardtanh):
        return float(module.min_val), float(module.max_val)
    if isinstance(module, nn.Hardsigmoid):
        return 0.0, 1.0
    limit = TANH_LIMIT if isinstance(module, nn.Tanh) else SIGMOID_LIMIT
    return -limit, limit
