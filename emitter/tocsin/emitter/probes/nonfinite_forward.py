"""Where on the way to a loss that is not finite the first bad number was.

What a forward pass keeps for its backward pass is looked through once, in forward order, in front
of the backward call of a loss that is known not to be finite: on the CPU alone, where that is known
at once. The first operation with a bad number is named, by the module whose parameters it, or the
last one before it, has used; or what went into it: a weight, or what was computed from none, a
batch. At most `MAX_SEARCHES_PER_STEP` times between two steps, `MAX_SEARCHES` times in a training,
and for `LIMIT_S` each time.

What hooks of saved tensors have packed is never read: under activation checkpointing that would
run the forward pass again. The first such tensor ends the look, since what is behind it may not
be the first bad one.

It is sent as a row of `activations`, `weights` or `inputs` of the step, with the count `order`, in
front of the step's scalars, once it is known whether a step was made: `SkippedSteps`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import torch
from torch.autograd.graph import Node

from tocsin.emitter.statistics.readable import is_readable
from tocsin.emitter.statistics.tables import Table

MAX_SEARCHES_PER_STEP: Final = 3
MAX_SEARCHES: Final = 20
LIMIT_S: Final = 1.0
MAX_NODES: Final = 50_000

_SAVED: Final = "_saved_"
_RAW: Final = "_raw_saved_"
_OWN: Final = frozenset({"_saved_running_mean", "_saved_running_var"})
"""Buffers of a module: no batch has brought them."""


@dataclass(frozen=True, slots=True)
class BadValue:
    """A tensor that is not finite. `order` is that of its operation among those of the pass."""

    collection: Literal["activations", "inputs", "weights"]
    name: str
    numel: int
    nans: int
    infs: int
    order: int
    state: int = 0
    """Of a weight: numbers of its optimizer's state that are not finite."""

    def table(self) -> Table:
        """One row, without statistics."""
        counts = [self.numel, self.nans, self.infs, self.order]
        columns: tuple[str, ...] = ("numel", "nans", "infs", "order")
        if self.collection == "weights":
            counts, columns = [*counts, self.state], (*columns, "state_nonfinite")
        return Table(
            self.collection,
            (self.name,),
            np.zeros((1, 0), np.float32),
            np.array([counts], np.uint64),
            (),
            columns,
        )


def first_bad_value(
    loss: torch.Tensor,
    names: Mapping[int, str],
    state_of: Callable[[torch.Tensor], Iterable[object]] = lambda parameter: (),
) -> BadValue | None:
    """The first bad number on the way to this loss; None: it is not seen.

    The loss is a tensor with its graph, of any shape.
    Takes up to `LIMIT_S` seconds of the thread's time, and reads only what is on the CPU. `names`
    are those of parameters, by their id; `state_of` is what an optimizer keeps of one.
    """
    until = time.thread_time() + LIMIT_S
    module = ""
    produced: dict[Node, str] = {}
    with torch.no_grad():
        for order, node in enumerate(_in_forward_order(loss)):
            if time.thread_time() > until:
                return None
            own = ""
            for name, parameter in _parameters_of(node, names):
                own = name.rpartition(".")[0] or name
                nans, infs = _bad(parameter)
                if nans or infs:
                    state = sum(map(_bad_state, state_of(parameter)))
                    return BadValue("weights", name, parameter.numel(), nans, infs, order, state)
            module = own or module
            produced[node] = place = _place(node, own, module)
            found = None
            saved = _saved(node)
            if saved is None:
                return None
            for attribute, tensor in saved:
                nans, infs = _bad(tensor)
                if not nans and not infs:
                    continue
                if tensor.grad_fn is not None:
                    maker = produced.get(tensor.grad_fn, place)
                    return BadValue("activations", maker, tensor.numel(), nans, infs, order)
                if tensor.requires_grad or attribute in _OWN:
                    return None  # nothing that has a name, or that a batch has brought
                if nans:
                    word = "target" if attribute == f"{_SAVED}target" else "input"
                    name = f"{word} of {place}"
                    found = BadValue("inputs", name, tensor.numel(), nans, infs, order)
            if found is not None:
                return found
    return None


def _in_forward_order(loss: torch.Tensor) -> list[Node]:
    """The operations behind a loss, without those that only take a parameter's gradient."""
    if loss.grad_fn is None:
        return []
    seen: set[Node] = {loss.grad_fn}
    waiting = [loss.grad_fn]
    while waiting and len(seen) < MAX_NODES:
        for following, _ in waiting.pop().next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    computed = [node for node in seen if not hasattr(node, "variable")]
    return sorted(computed, key=lambda node: node._sequence_nr())


def _saved(node: Node) -> list[tuple[str, torch.Tensor]] | None:
    """What an operation has kept, inputs and results, as far as it may be read. None: reading it
    would call somebody's hook.
    """
    found = []
    for raw_attribute in dir(node):
        if not raw_attribute.startswith(_RAW):
            continue
        attribute = _SAVED + raw_attribute.removeprefix(_RAW)
        try:
            raw = getattr(node, raw_attribute)
            if isinstance(raw, tuple):
                continue
            # A version of PyTorch that does not tell whether there is one counts as one.
            if getattr(raw, "unpack_hook", raw) is not None:
                return None
            value = getattr(node, attribute)
        except RuntimeError:
            continue  # freed, or changed in place since
        if is_readable(value) and value.device.type == "cpu" and value.numel():
            found.append((attribute, value))
    return found


def _bad(tensor: torch.Tensor) -> tuple[int, int]:
    """How many numbers are NaN, and how many infinite."""
    if bool(torch.isfinite(tensor.sum(dtype=torch.float64))):
        return 0, 0
    return int(tensor.isnan().sum()), int(tensor.isinf().sum())


def _bad_state(value: object) -> int:
    """How many numbers of this, which an optimizer keeps, are not finite."""
    if not is_readable(value) or value.device.type != "cpu" or not value.numel():
        return 0
    return sum(_bad(value))


def _parameters_of(node: Node, names: Mapping[int, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters that an operation uses, by name."""
    for following, _ in node.next_functions:
        # A Linear's weight comes by a transposition.
        for behind in (following, *_behind(following)):
            variable = getattr(behind, "variable", None)
            name = names.get(id(variable))
            if name is not None and is_readable(variable) and variable.device.type == "cpu":
                yield name, variable


def _behind(node: Node | None) -> Iterator[Node]:
    if node is not None and type(node).__name__.startswith("TBackward"):
        yield from (following for following, _ in node.next_functions if following is not None)


def _place(node: Node, own: str, module: str) -> str:
    """An operation in words: its module, or its name and the module before it."""
    operation = re.sub(r"Backward\d*$", "", type(node).__name__)
    operation = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", operation).lower()
    return own or (f"{operation} after {module}" if module else operation)
