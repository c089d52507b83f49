"""Activations, by type of the module: which sit where in torch, and what a due step's have said.

At due steps, `__call__` of the classes (`module_kinds.TYPES`, routers, the output layer) and
`scaled_dot_product_attention` are patched in torch. The user's modules get no hook: a hook would be
pickled and copied with them. Once torch.compile is used the patches stay, so that what it makes
graphs of does not change.

At a step that is due, and in a module that trains, a sample of the output is looked at. Only the
forward calls before the first backward count. Functions (`torch.relu`, `F.gelu`) are not seen.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable
from typing import Final, ParamSpec, Protocol

import torch
from torch import nn

from tocsin.emitter.plan.collections import Selection
from tocsin.emitter.probes.activations import attention, compiled, output_layers, routers
from tocsin.emitter.probes.activations.call_patches import ModuleCallObserver
from tocsin.emitter.probes.activations.compiled import slots
from tocsin.emitter.probes.activations.dead_units import DeadUnits
from tocsin.emitter.probes.activations.module_kinds import (
    Found,
    Kind,
    Known,
    saturation,
    scan,
)
from tocsin.emitter.probes.activations.readings import Reading, Readings
from tocsin.emitter.probes.activations.samples import (
    certainty,
    share_beyond,
    spread,
)
from tocsin.emitter.process.isolation import Isolation
from tocsin.emitter.statistics.async_copy import is_recording
from tocsin.emitter.statistics.readable import readable
from tocsin.emitter.statistics.tables import Pending
from tocsin.schemas.records.collections import Mode

MAX_READINGS: Final = 2000
PATIENCE: Final = 3
"""Due steps without a reading before no more are asked for."""

LATE: Final = (
    "the model was compiled before tocsin was loaded, so module outputs cannot be captured; call "
    "tocsin.emitter.start() before the first call of the compiled model, or use `tocsin run`"
)
CUDA_GRAPHS: Final = (
    "the model is compiled for CUDA graphs, so module outputs cannot be captured; "
    'torch.compile without mode="reduce-overhead" is supported'
)
COMPILED: Final = "the model is compiled, and no module output was captured"


class Holder(Protocol):
    """Who has steps of training looked at. A batch of an evaluation may take the place of one."""

    def arm_again(self) -> bool:
        """The evaluation gives the place back, in time; whether the step will be looked at."""
        ...

    def postpone(self) -> None:
        """The step was made meanwhile."""
        ...


class Activations(ModuleCallObserver):
    """Which modules there are, and whether this step's are looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        """Another training begins."""
        self.holder: Holder | None = None
        self.due = False
        self.blind = False
        """Whether there are modules that cannot be seen; nothing is looked at any more."""
        self.reason = ""
        """Why, and what to do."""
        self.patches.restore()
        self._found: Found | None = None
        self._root: weakref.ref[nn.Module] | None = None
        self._plan: Selection | None = None
        self._armed = False
        self.mode: Mode = "train"
        """That of what is looked at."""
        self._calls: dict[int, int] = {}
        self._readings = Readings()
        self._later = False
        """Whether a backward call of this step has begun: only what is short is still read."""
        self._dead = DeadUnits()
        self._vain = 0
        self._called = False

    @property
    def armed(self) -> bool:
        """Whether this step is looked at."""
        return self._armed

    @property
    def types(self) -> dict[str, str]:
        """The class of each module that is looked at, by its name."""
        known = () if self._found is None else self._found.known.values()
        return {k.name: type(module).__name__ for k in known if (module := k.module()) is not None}

    @property
    def picked(self) -> frozenset[str]:
        """Names of the modules that only a collection of the user's own has looked at."""
        known = () if self._found is None else self._found.known.values()
        return frozenset(k.name for k in known if k.picked)

    def arm(
        self, root: nn.Module | None, plan: Selection | None = None, *, mode: Mode = "train"
    ) -> bool:
        """Look at the next step; in another mode than train at forward calls in eval(). Whether it
        will be done.

        A plan with patterns, types or names selects the modules that are read, else their types do.
        """
        if root is None or self._vain >= PATIENCE or self.blind:
            return False
        known_root = None if self._root is None else self._root()
        if self._found is None or known_root is not root or self._plan is not plan:
            self._found = scan(root, plan)
            self._dead = DeadUnits()
            self._root, self._plan = weakref.ref(root), plan
        if self._found.is_compiled and slots.late:
            self._give_up(LATE, loud=True)
            self._armed = True
            return False
        self._calls, self._readings, self.mode, self._called = {}, Readings(), mode, False
        self._later = False
        self._dead.start_step()
        # What a graph was made of must not change from step to step.
        if not slots.late and not self._found.is_compiled:
            self.patches.put(self._found.modules())
        self.due = self._armed = True
        return True

    def on_call(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        """A module was called with `args`, and returned `output`: tensors of any shape, or what
        holds them.
        """
        known = self._known(module)
        if known is None or not self._counts(module, compiled=False):
            return
        if self._later:
            self._read_more(known, module, output)
            return
        self._called = True
        first = args[0] if args else None
        if known.kind is Kind.ROUTER:
            parts = routers.tensors_of(output, known.experts)
            scores = None if parts is None else readable(parts[0])
            if parts is not None and scores is not None:
                self._read(known, scores, parts[1])
        elif known.kind is Kind.ATTENTION:
            seen = self._calls.pop(-id(module), 0)
            query, key = readable(first), readable(args[1] if len(args) > 1 else first)
            if not seen and query is not None and key is not None:
                self._read(known, query, key)
        elif (numbers := readable(output)) is not None:
            self._read(known, numbers, first)

    def on_compiled_call(self, slot: int, x: torch.Tensor, y: torch.Tensor | None) -> None:
        """A module was called in a compiled graph. `x` is its output, of any shape; `y` its input,
        or the chosen experts of a router. Of an attention: its query and key, `[B, Q, D]` and
        `[B, K, D]`, or `[Q, B, D]` and `[K, B, D]` without `batch_first`.
        """
        module = slots.module(slot)
        known = None if module is None else self._known(module)
        if known is None or module is None or not self._counts(module, compiled=True):
            return
        numbers = readable(x)
        if numbers is not None:
            self._read(known, numbers, y, slot=slot)

    def on_attention(
        self,
        owner: nn.Module | None,
        query: object,
        key: object,
        mask: object = None,
        is_causal: bool = False,
        scale: float | None = None,
        *,
        slot: int | None = None,
    ) -> None:
        """`scaled_dot_product_attention` was called in this module's forward: query `[B, H, Q, D]`
        or `[B, Q, D]`, key `[B, G, K, D]` or `[B, K, D]`, mask broadcast to `[B, H, Q, K]`. Other
        shapes are ignored.
        """
        query, key = readable(query), readable(key)
        if owner is None or self._found is None or query is None or key is None or self._later:
            return
        name = self._found.names.get(id(owner))
        plan = self._plan
        chosen = (
            plan is None
            or plan.everything
            or (name is not None and plan.selects(name, type(owner).__name__))
        )
        if name is None or not chosen or not self._counts(owner, compiled=slot is not None):
            return
        if isinstance(owner, nn.MultiheadAttention):
            self._calls[-id(owner)] = 1
        with torch.no_grad():
            masked = mask if isinstance(mask, torch.Tensor) else None
            reading = attention.read(name, query, key, masked, is_causal=is_causal, scale=scale)
        self._add(reading, owner, slot)

    def on_compiled_attention(
        self,
        slot: int,
        query: torch.Tensor,
        key: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,
        scale: float | None,
    ) -> None:
        """`scaled_dot_product_attention` was called in a compiled graph: query `[B, H, Q, D]` or
        `[B, Q, D]`, key `[B, G, K, D]` or `[B, K, D]`, mask broadcast to `[B, H, Q, K]`.
        """
        self.on_attention(slots.module(slot), query, key, mask, is_causal, scale, slot=slot)

    def backward_begins(self) -> None:
        """A backward call begins: the micro-batch that is read is over.

        ReLUs that have had too few values for a share of dead units are read in the next ones of
        this step, too.
        """
        self.due = self._dead.short and self.mode == "train"
        self._later, self._calls = True, {}

    def stop(self) -> None:
        """Something was wrong with it: no more of this step."""
        self.due = self._armed = False
        self.patches.restore()
        self._readings = Readings()

    def drain(self) -> Pending | None:
        """What was seen since `arm`; None: nothing, or nothing was due."""
        armed, self._armed, self.due = self._armed, False, False
        self.patches.restore()
        readings, self._readings = self._readings, Readings()
        if not armed or self._found is None or self.blind:
            return None
        if readings.all:
            self._vain = 0
        elif self.mode == "train":  # the batch of an evaluation may never have come
            self._vain += bool(self._found.known)
            # Something was compiled, perhaps not this: then once may be chance.
            patience = 1 if self._found.is_compiled else PATIENCE
            unseen = not self._called and (self._found.is_compiled or slots.compiling)
            if unseen and self._vain >= patience:
                self._give_up(CUDA_GRAPHS if slots.cuda_graphs else COMPILED, loud=False)
        if any(reading.slot is not None for reading in readings.all):
            _name_apart(readings.all, self._found)
        if self.mode == "train":  # an evaluation does not change them
            with torch.no_grad():
                for reading in output_layers.embeddings(self._found.embeddings):
                    readings.add(reading)
        if not readings.all:
            return None
        readings.send_off()
        return readings

    def _known(self, module: nn.Module) -> Known | None:
        known = None if self._found is None else self._found.known.get(id(module))
        return known if known is not None and known.module() is module else None

    def _counts(self, module: nn.Module, *, compiled: bool) -> bool:
        """Whether a call of this module belongs to what is looked at."""
        training = self.mode == "train"
        return (
            module.training is training
            # Inside of a graph the gradient is the graph's own business.
            and (compiled or torch.is_grad_enabled() or not training)
            and len(self._readings.all) < MAX_READINGS
            and torch._C._get_tracing_state() is None
            and not torch._C._len_torch_dispatch_stack()
            and not is_recording()
            # In a graph, or called again inside of a backward call, it is no other micro-batch.
            and not (self._later and (compiled or torch._C._current_graph_task_id() != -1))
        )

    def _read(
        self, known: Known, x: torch.Tensor, y: object = None, *, slot: int | None = None
    ) -> None:
        module = known.module()
        if module is None or x.numel() == 0:
            return
        with torch.no_grad():
            reading = _reading(known, module, x, y if isinstance(y, torch.Tensor) else None)
            self._add(reading, module, slot)
            if reading is not None and known.kind is Kind.RELU:
                self._dead.add(reading, x, self.mode, channels_first=known.channels_first)

    def _read_more(self, known: Known, module: nn.Module, output: object) -> None:
        """A ReLU was called in a later micro-batch of this step."""
        if known.kind is not Kind.RELU or (x := readable(output)) is None:
            return
        reading = self._dead.needs(self._numbered(known.name, module))
        if reading is not None:
            with torch.no_grad():
                self._dead.add(reading, x, self.mode, channels_first=known.channels_first)
            self.due = self._dead.short

    def _add(self, reading: Reading | None, module: nn.Module, slot: int | None) -> None:
        if reading is None:
            return
        if slot is None:
            reading.name = self._numbered(reading.name, module)
        reading.slot = slot
        self._readings.add(reading)

    def _numbered(self, name: str, module: nn.Module) -> str:
        """The name of this call of the module, since `arm` or the last backward call."""
        calls = self._calls[id(module)] = self._calls.get(id(module), 0) + 1
        return name if calls == 1 else f"{name}#{calls}"

    def _give_up(self, reason: str, *, loud: bool) -> None:
        self.blind, self.reason = True, reason
        if loud:
            sys.stderr.write(f"tocsin: {reason}\n")


def _reading(
    known: Known, module: nn.Module, x: torch.Tensor, y: torch.Tensor | None
) -> Reading | None:
    """What one call reports: `x` is the output (of attention the query), `y` what belongs to it."""
    name = known.name
    if known.kind is Kind.ROUTER:
        return routers.read(name, x, y, experts=known.experts, top=known.top)
    if known.kind is Kind.HEAD:
        return output_layers.logits(name, x)
    if known.kind is Kind.ATTENTION:
        assert isinstance(module, nn.MultiheadAttention)
        return None if y is None else attention.read_module(name, module, x, y)
    if known.kind is Kind.SATURATING and (before := readable(y)) is not None:
        share = share_beyond(spread(before), *saturation(module))
        return Reading("activations", name, spread(x), ("saturated",), (share,))
    if known.kind is Kind.BOUNDED:
        sample = spread(x)
        share = share_beyond(sample, *saturation(module))
        return Reading("activations", name, sample, ("saturated",), (share,))
    if known.kind is Kind.SOFTMAX and x.dim() > 1:
        dim = getattr(module, "dim", None)
        values = certainty(x, -1 if dim is None else int(dim))
        return Reading("activations", name, spread(x), ("saturated", "entropy"), values)
    return Reading("activations", name, spread(x))


def _name_apart(readings: list[Reading], found: Found) -> None:
    """Name the readings of one graph for several modules: those that differ by a number in the
    name.
    """
    by_slot: dict[tuple[str, int], list[Reading]] = {}
    for reading in readings:
        if reading.slot is not None:
            by_slot.setdefault((reading.collection, reading.slot), []).append(reading)
    heard = {reading.name for reading in readings}
    for (_, slot), several in by_slot.items():
        if len(several) == 1:
            continue
        first = several[0].name
        module = slots.module(slot)
        alike = re.sub(r"(?<![^.])\d+(?![^.])", "*", first)
        kin = [
            name
            for identity, name in found.names.items()
            if re.sub(r"(?<![^.])\d+(?![^.])", "*", name) == alike
        ]
        following = [n for n in kin[kin.index(first) + 1 :] if n not in heard] if module else []
        for i, reading in enumerate(several[1:]):
            fits = len(following) >= len(several) - 1
            reading.name = following[i] if fits else f"{first}#{i + 2}"
            heard.add(reading.name)


activations: Final = Activations()
"""Those of this process."""


def install(isolation: Isolation) -> None:
    """Put the hooks into torch. `isolation` is the one of this process."""
    slots.late = compiled.is_late()
    if slots.late:
        return
    compiled.define(
        lambda *args: _when_due(isolation, "activations", activations.on_compiled_call, *args),
        lambda *args: _when_due(isolation, "attention", activations.on_compiled_attention, *args),
    )
    compiled.follow_compile(activations.patches.keep)
    compiled.catch_up(activations.patches.keep)


P = ParamSpec("P")


def _when_due(
    isolation: Isolation, probe: str, see: Callable[P, None], *args: P.args, **kwargs: P.kwargs
) -> None:
    if activations.due:
        isolation.run(probe, see, *args, **kwargs)
        if "activations" in isolation.off:
            activations.stop()
