"""Which modules are called in the forward pass of a few steps, and what the first of them is given.

The classes of the modules that have parameters, and of those that work differently in training,
are watched from the end of one step until the first backward call of the next: nothing sits on a
module itself. A step in which activations are looked at is left out, and so is a compiled model.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from tocsin.emitter.probes.activations.call_patches import ModuleCallObserver, attention_functions
from tocsin.emitter.probes.activations.compiled import slots
from tocsin.emitter.probes.activations.module_kinds import is_compiled
from tocsin.emitter.probes.activations.watch import activations
from tocsin.emitter.probes.program_checks.token_targets import StepTokens
from tocsin.emitter.probes.program_checks.train_mode import is_switchable
from tocsin.emitter.statistics.async_copy import HostCopy, is_recording
from tocsin.emitter.statistics.readable import readable

PROBE: Final = "module calls"
MAX_MODULES: Final = 10_000
VALUES: Final = 16_384
_READERS: Final = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.RNNBase)


@dataclass(slots=True)
class Seen:
    """How often a module was called: with gradients on, and without."""

    trained: int = 0
    silent: int = 0
    given: tuple[object, ...] | None = None
    """Type and shape, but for the samples, of what it was first given."""


class Calls:
    """What one step's forward pass has called."""

    def __init__(self, owners: dict[int, int]) -> None:
        self._owners: Final = owners
        self.by_module: Final[dict[int, Seen]] = {}
        """In the order of their first calls."""

    def owner(self, parameter: torch.Tensor) -> int | None:
        """The id of the module without children that this parameter, of any shape, belongs to;
        None: to none that is known.

        That one with children was called does not prove that its own parameter was used.
        """
        return self._owners.get(id(parameter))

    def seen_of(self, owner: int) -> Seen:
        """The number of calls of a module."""
        return self.by_module.get(owner, Seen())


class FirstInputs:
    """The sample of what the first layer was given, `[B, ...]`, on its way from a GPU or here."""

    def __init__(self, layer: nn.Module, name: str, given: torch.Tensor) -> None:
        self.kind: Final = type(layer).__name__
        self.name: Final = name
        with torch.no_grad():
            values = _sample(given)
            self.count: Final = values.numel()
            whole = (values == values.round()).all().to(torch.float32)
            apart = values.std(0).mean() if values.shape[0] > 1 else values.new_full((), -1.0)
            packed = torch.stack(
                (values.min(), values.max(), values.mean(), values.std(), apart, whole)
            )
        self._packed = packed if packed.is_cpu else HostCopy(packed)

    @property
    def ready(self) -> bool:
        """Whether the numbers are on the host; never waits."""
        return not isinstance(self._packed, HostCopy) or self._packed.ready()

    def numbers(self) -> list[float]:
        """Smallest, largest, mean, standard deviation, that over samples, whether all are whole;
        only if `ready`.
        """
        held = self._packed
        numbers = held.values() if isinstance(held, HostCopy) else held.double().numpy()
        return [float(number) for number in numbers]


class ModuleCalls(ModuleCallObserver):
    """Watches the calls of a model's modules in steps that are armed."""

    probe = PROBE

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        """Another training begins."""
        self.stop()
        self._root: weakref.ref[nn.Module] | None = None
        self._names: dict[int, str] = {}
        self._owners: dict[int, int] = {}
        self._kinds: tuple[type[nn.Module], ...] = ()
        self._calls: Calls | None = None
        self._embeds = False
        self._recurrent: tuple[weakref.ref[nn.Module], ...] = ()
        self._first_seen = False
        self.tokens: StepTokens | None = None
        """What embeddings were given since `arm`, and how far attention looks."""
        self.first: FirstInputs | None = None
        """What the first layer was given, where that is of interest."""
        self.switched_on = False
        """Whether dropout or the like was called in train mode without gradients, since the last
        backward call: what is called in front of one is a part of the training.
        """

    def arm(self, root: nn.Module | None, *, inputs: bool) -> bool:
        """Watch until the next backward call; whether it is done. `inputs`: what the first layer
        is given is of interest.
        """
        self.stop()
        self._calls = None
        if root is None or activations.armed or activations.patches.for_good or slots.compiling:
            return False
        known = None if self._root is None else self._root()
        if known is not root and not self._scan(root):
            return False
        if not self._kinds:
            return False
        self._calls, self._first_seen, self.first = Calls(self._owners), not inputs, None
        layers = [layer for layer in (ref() for ref in self._recurrent) if layer is not None]
        self.tokens = StepTokens(layers) if self._embeds else None
        self.patches.put_classes(self._kinds)
        if self._embeds:
            self.patches.put_attention()
        self.due = True
        return True

    def drain(self) -> Calls | None:
        """What was called since `arm`; None: nothing was watched."""
        calls, self._calls = self._calls, None
        self.stop()
        return calls

    def stop(self) -> None:
        """Look no more, until armed again."""
        self.tokens = None
        super().stop()

    def on_call(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        """A module was called with `args`: tensors of any shape, or what holds them."""
        calls, name = self._calls, self._names.get(id(module))
        if calls is None or name is None or is_recording():
            return
        if torch._C._get_tracing_state() is not None or torch._C._len_torch_dispatch_stack():
            return
        seen = calls.by_module.get(id(module))
        if seen is None:
            seen = calls.by_module[id(module)] = Seen(given=_shape(args))
        if not torch.is_grad_enabled():
            seen.silent += 1
            if module.training and is_switchable(module):
                self.switched_on = True
            return
        seen.trained += 1
        if self.tokens is not None and isinstance(module, nn.Embedding):
            self.tokens.embedded(args[0] if args else None)
        if self._first_seen or not module.__dict__.get("_parameters"):
            return
        self._first_seen = True
        given = readable(args[0] if args else None)
        if given is None or given.dim() < 2 or given.numel() < 2:
            return
        if isinstance(module, _READERS):
            self.first = FirstInputs(module, name, given)

    def on_attention(
        self,
        owner: nn.Module | None,
        query: object,
        key: object,
        mask: object,
        is_causal: bool,
        scale: float | None,
    ) -> None:
        """`scaled_dot_product_attention` was called: query `[..., Q, D]`, key `[..., K, D]`, and a
        mask that is broadcast to `[..., Q, K]`.
        """
        if self.tokens is not None:
            self.tokens.attended(query, key, mask, is_causal=is_causal)

    def on_softmax(self, result: object) -> None:
        """A softmax over the last dimension was called, and returned this, of any shape."""
        if self.tokens is not None:
            self.tokens.softmaxed(result)

    def _scan(self, root: nn.Module) -> bool:
        modules = list(root.named_modules())
        self._root, self._kinds = weakref.ref(root), ()
        if len(modules) > MAX_MODULES or is_compiled(root):
            return False
        self._names, self._owners = {}, {}
        kinds: dict[type[nn.Module], None] = {}
        for name, module in modules:
            if isinstance(module, torch.jit.ScriptModule):
                return False
            own = [p for p in (module.__dict__.get("_parameters") or {}).values() if p is not None]
            self._names[id(module)] = name or type(module).__name__
            if not module.__dict__.get("_modules"):
                self._owners.update((id(parameter), id(module)) for parameter in own)
            if own or is_switchable(module):
                kinds[type(module)] = None
        self._kinds = tuple(kinds)
        functions = {id(function) for function in attention_functions()}
        # A model that keeps such a function as its own could not be pickled while it is watched.
        held = any(id(value) in functions for _, m in modules for value in m.__dict__.values())
        self._embeds = not held and any(issubclass(kind, nn.Embedding) for kind in kinds)
        recurrent = (m for _, m in modules if isinstance(m, nn.RNNBase | nn.RNNCellBase))
        self._recurrent = tuple(map(weakref.ref, recurrent))
        return True


def _shape(args: tuple[object, ...]) -> tuple[object, ...] | None:
    given = args[0] if args else None
    return (given.dtype, *given.shape[1:]) if isinstance(given, torch.Tensor) else None


def _sample(given: torch.Tensor) -> torch.Tensor:
    """[samples, numbers] of a batch, as float32."""
    samples = min(64, given.shape[0])
    rows = given[:: -(-given.shape[0] // samples)].reshape(-1, given[0].numel())
    each = max(1, VALUES // rows.shape[0])
    apart = -(-rows.shape[1] // each)
    if apart > 1 and given.shape[-1] % apart == 0:
        apart += 1  # not the same column of an image each time
    return rows[:, ::apart].to(torch.float32)
