"""Which thread may read gradients in front of and behind a backward call.

Torch replaces the tensor in `.grad` without Python's lock, in a backward call and while it frees
the one that was there. Another thread that reads `.grad` at that moment gets memory that is free
already, and the process ends with a segmentation fault (seen with three trainings on threads). So
gradients are read only on the thread that computes them. Where a loop makes each step on another
thread, one after the other, the graph of its loss shows that it is the same training.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Final

import torch


class GradientThread:
    """The thread of the training, as far as its gradients are concerned."""

    __slots__ = ("here", "lock", "several")

    def __init__(self) -> None:
        self.here = 0
        """Its number; 0: not known yet."""
        self.several = False
        """Whether other threads call backward for something else: for good, once it is so."""
        self.lock = threading.RLock()
        """Held while gradients are read that may be of anything in this process. Reentrant, as a
        handler of a signal may call backward in the middle of that."""

    def reset(self) -> None:
        """Another training begins."""
        self.here = 0

    def in_child(self) -> None:
        """This process was forked off: the other threads of its parent are not in it."""
        self.here, self.several, self.lock = 0, False, threading.RLock()

    def is_another(self) -> None:
        """This thread is about to call backward, and for something else: it waits until nobody
        reads, and from then on gradients that may be its own are not read elsewhere.
        """
        if not self.several:
            with self.lock:
                self.several = True


gradient_thread: Final = GradientThread()
"""That of this process."""


def leaves(loss: object, *, max_nodes: int) -> Iterator[torch.Tensor]:
    """The tensors, of any shape, in which this loss's backward call leaves a gradient, as far as so
    many nodes of its graph lead to them.
    """
    grad_fn = loss.grad_fn if isinstance(loss, torch.Tensor) else None
    waiting = [] if grad_fn is None else [grad_fn]
    seen = set(waiting)
    while waiting and len(seen) < max_nodes:
        node = waiting.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            yield variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
