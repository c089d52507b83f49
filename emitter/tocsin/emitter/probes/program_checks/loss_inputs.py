"""What loss functions are given: whether scores are logits, probabilities or something else.

A sample of the scores and targets of a few calls, in the first steps and rarely after them, and
the name of the operation that made the scores, which autograd knows. Rules judge it
(`loss_input_mismatch`, `collapsed_predictions`, `target_leak`). In a compiled graph a loss is not
seen.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import torch

from tocsin.emitter.probes.program_checks.token_targets import PendingTargets, StepTokens
from tocsin.emitter.probes.spacing import Spacing
from tocsin.emitter.statistics.async_copy import HostCopy, is_recording
from tocsin.emitter.statistics.readable import NUMBERS, is_readable, readable
from tocsin.schemas.records.events import clip
from tocsin.schemas.records.program_facts import LossInputsSeen

if TYPE_CHECKING:
    from tocsin.emitter.training.training import Training

OF_CLASSES: Final = ("cross_entropy", "nll_loss")
OF_PROBABILITIES: Final = ("binary_cross_entropy", "binary_cross_entropy_with_logits")
OF_NUMBERS: Final = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
IGNORED: Final = -100
FUNCTIONS: Final = (*OF_CLASSES, *OF_PROBABILITIES, *OF_NUMBERS)

AT: Final = (0, 1, 2, 3, 4, 5, 8, 12, 20, 30, 50, 75, 100)
"""Steps that are looked at; then each `APART`-th, and of short ones fewer."""

APART: Final = 200

CALLS: Final = 4
"""Calls of one step that are looked at."""

ROWS: Final = 256
VALUES: Final = 1 << 15
MAX_WAITING: Final = 64

_IN_BETWEEN: Final = frozenset(
    (
        *("alias", "clone", "contiguous", "expand", "flatten", "permute", "reshape", "select"),
        *("slice", "squeeze", "t", "to_copy", "transpose", "unsafe_view", "unsqueeze", "view"),
        "reshape_alias",
    )
)
_HOPS: Final = 12
_RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "sigmoid": (0.0, 1.0),
    "softmax": (0.0, 1.0),
    "hardsigmoid": (0.0, 1.0),
    "tanh": (-1.0, 1.0),
    "relu": (0.0, float("inf")),
    "softplus": (0.0, float("inf")),
    "log_softmax": (-float("inf"), 0.0),
}
_MARGIN: Final = 0.05


class LossInputs:
    """The inputs of loss functions of one training."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Another training begins."""
        self.due = True
        """Whether the losses of this step are looked at."""
        self.wakes = 0
        """The step behind which there is something to do."""
        self._calls = 0
        self.spacing = Spacing(APART)
        self._waiting: deque[_LossSample] = deque(maxlen=MAX_WAITING)

    def see(
        self,
        name: str,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        tokens: StepTokens | None = None,
    ) -> None:
        """A loss function of that name was called in training, in a step that is due, behind a
        forward pass that has read these tokens, where that is known.

        Its scores are `[B, K, ...]` or `[K]` where its targets are classes, else `[B, ...]`; its
        targets are what the function of `torch.nn.functional` takes with them.
        """
        if self._calls >= CALLS or name not in FUNCTIONS or is_recording():
            return
        scores = args[0] if args else kwargs.get("input")
        target = readable(args[1] if len(args) > 1 else kwargs.get("target"), NUMBERS)
        if target is None or not is_readable(scores):
            return
        if scores.numel() < 2 or target.numel() == 0 or scores.device != target.device:
            return
        if not scores.requires_grad:
            return
        self._calls += 1
        with torch.no_grad():
            of_tokens = None
            if tokens is not None and name in OF_CLASSES and not target.is_floating_point():
                ignored = args[4] if len(args) > 4 else kwargs.get("ignore_index")
                ignored = ignored if isinstance(ignored, int) else IGNORED
                classes = scores.shape[min(1, scores.dim() - 1)]
                of_tokens = tokens.compare(target, classes, ignored)
            self._waiting.append(_LossSample(name, scores, target, of_tokens))

    def stepped(self, training: Training, step: int) -> None:
        """A step is over: send what has arrived, and set what is read next."""
        for sample in self._waiting:
            if sample.step is None:
                sample.step = step
        while self._waiting and self._waiting[0].ready:
            sample = self._waiting.popleft()
            training.emit(sample.event(training))
        following = step + 1
        if self.due:
            self.spacing.checked(step)
        apart = self.spacing.steps
        later = next((at for at in AT if at >= following), following + -following % apart)
        self.due, self._calls = later == following, 0
        self.wakes = 0 if self._waiting else max(0, later - 1) if not self.due else following


class _LossSample:
    """A sample of one call, on the host or on its way."""

    def __init__(
        self,
        name: str,
        scores: torch.Tensor,
        target: torch.Tensor,
        tokens: PendingTargets | None = None,
    ) -> None:
        self.step: int | None = None
        self._tokens = tokens
        self._name = name
        self._made_by = made_by(scores)
        self._broadcast = name in OF_NUMBERS and _compares_each_with_each(scores, target)
        scores = scores.detach()
        rows = _classes_last(scores) if name in OF_CLASSES else _samples(scores)
        self._rows, self._width = rows.shape
        self._of_classes = name in OF_CLASSES or (scores.dim() == 2 and 1 < scores.shape[1] <= 1000)
        parts = [rows.amin(), rows.amax()]
        if self._of_classes:
            sums, exps = rows.sum(1), rows.exp().sum(1)
            parts += [sums.amin(), sums.amax(), exps.amin(), exps.amax()]
        nothing = rows.new_full((), -1.0)
        # Not `std`: it warns of one row.
        parts.append(_spread(rows) if self._rows > 1 else nothing)
        self._numbers = target.is_floating_point() and name not in OF_CLASSES
        if self._numbers:
            wanted = _samples(target)
            parts += [wanted.amin(), wanted.amax()]
            parts.append(_spread(wanted) if wanted.shape[0] > 1 else nothing)
            low, high = _RANGES.get(self._made_by, (-float("inf"), float("inf")))
            out = (wanted < low - _MARGIN) | (wanted > high + _MARGIN)
            parts.append(out.to(torch.float32).mean())
        packed = torch.stack(parts)
        self._packed = packed if packed.is_cpu else HostCopy(packed)

    @property
    def ready(self) -> bool:
        """Whether the numbers are on the host and the step is over; never waits."""
        if self.step is None or (self._tokens is not None and not self._tokens.ready):
            return False
        return not isinstance(self._packed, HostCopy) or self._packed.ready()

    def event(self, training: Training) -> LossInputsSeen:
        """As it is reported; once it is ready."""
        held = self._packed
        numbers = held.values() if isinstance(held, HostCopy) else held.double().numpy()
        left = [float(number) for number in numbers]
        low, high = left[0], left[1]
        del left[:2]
        sums: list[float | None] = [None] * 4
        if self._of_classes:
            sums = [*left[:4]]
            del left[:4]
        spread = left.pop(0)
        wanted: list[float | None] = [None] * 4
        if self._numbers:
            wanted = [*left]
        tokens = None if self._tokens is None else self._tokens.result()
        ahead = None if tokens is None else tokens.ahead
        return LossInputsSeen(
            **training.who,
            function=self._name,
            made_by=clip(self._made_by, 100),
            step=self.step or 0,
            rows=self._rows,
            classes=self._width if self._of_classes else 0,
            minimum=low,
            maximum=high,
            row_sum_min=sums[0],
            row_sum_max=sums[1],
            exp_sum_min=sums[2],
            exp_sum_max=sums[3],
            spread=None if spread < 0 else spread,
            target_min=wanted[0],
            target_max=wanted[1],
            target_spread=None if wanted[2] is None or wanted[2] < 0 else wanted[2],
            unreachable=wanted[3] if self._made_by in _RANGES else None,
            broadcast=self._broadcast,
            tokens=0 if tokens is None else tokens.compared,
            targets_are_inputs=None if tokens is None else tokens.same,
            targets_are_next_inputs=None if tokens is None else tokens.following,
            ahead_least=min(ahead) if ahead else None,
            ahead_most=max(ahead) if ahead else None,
        )


def made_by(scores: torch.Tensor) -> str:
    """The operation that made a tensor of any shape, as autograd names it; "" where it does not
    know.
    """
    node = scores.grad_fn
    for _ in range(_HOPS):
        if node is None:
            return ""
        name = _word(node.name())
        if name not in _IN_BETWEEN:
            return name
        following = node.next_functions
        node = following[0][0] if following else None
    return ""


def _word(name: str) -> str:
    """`LogSoftmaxBackward0` as `log_softmax`."""
    bare = re.sub(r"Backward\d*$", "", name.rpartition("::")[2])
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", bare).lower().strip("_")


def _classes_last(scores: torch.Tensor) -> torch.Tensor:
    """[samples, classes] of scores [n, classes, …] or [classes]."""
    if scores.dim() == 1:
        return scores[None].to(torch.float32)
    classes = scores.shape[1]
    wanted = max(2, min(ROWS, VALUES // classes))
    if scores.dim() == 2:
        return scores[:: -(-scores.shape[0] // wanted)].to(torch.float32)
    scores = scores.flatten(2)
    each = max(1, wanted // scores.shape[0])
    places = -(-scores.shape[2] // each)
    scores = scores[:: -(-scores.shape[0] // wanted), :, ::places]
    return scores.transpose(1, 2).reshape(-1, classes)[:wanted].to(torch.float32)


def _samples(numbers: torch.Tensor) -> torch.Tensor:
    """[samples, numbers] of a tensor whose first dimension is the batch."""
    rows = numbers.reshape(numbers.shape[0], -1) if numbers.dim() else numbers.reshape(1, 1)
    rows = rows[:: -(-rows.shape[0] // ROWS)]
    each = max(1, VALUES // rows.shape[0])
    return rows[:, :: -(-rows.shape[1] // each)].to(torch.float32)


def _spread(rows: torch.Tensor) -> torch.Tensor:
    return rows.std(0).mean()


def _compares_each_with_each(scores: torch.Tensor, target: torch.Tensor) -> bool:
    if scores.shape == target.shape:
        return False
    try:
        together = torch.broadcast_shapes(scores.shape, target.shape).numel()
    except RuntimeError:
        return False
    return bool(together > max(scores.numel(), target.numel()))
