"""What a language model reads in one step, and how the targets of its loss stand to that.

The ids that embeddings are given in the forward pass are kept until its backward call, and of each
self-attention over as many places is noted whether a place may look at the next one: as the mask of
`scaled_dot_product_attention` says, or the probabilities that a softmax over the places gives. The
loss compares its targets with the ids at the places at which these differ from those after them. A
sample of a few rows is compared; nothing is read before it is on the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import torch
from torch import nn

from tocsin.emitter.statistics.async_copy import HostCopy
from tocsin.emitter.statistics.readable import readable, types

ROWS: Final = 8
PLACES: Final = 2048
MAX_IDS: Final = 6
MAX_ATTENTIONS: Final = 128
"""Attentions of a step that are noted; of one with more nothing is reported."""

MIN_PLACES: Final = 4
MIN_COMPARED: Final = 32
CLOSED: Final = -1e4
"""What masks add where nobody may look is below that."""

NEXT: Final = 0.9

_WHOLE: Final = types("int64", "int32")
_MASKS: Final = types("bool", "float32", "bfloat16", "float16", "float64")

Seen: TypeAlias = torch.Tensor | bool
"""Whether each place may look at the next one, [rows or 1, places - 1], or all of them alike."""


@dataclass(frozen=True, slots=True)
class TokenTargets:
    """How the targets stand to the ids; shares are of the places compared."""

    compared: int
    same: float
    following: float
    ahead: tuple[float, ...] | None
    """At how many places each attention may look at the next one; None: it is not known."""


@dataclass(slots=True)
class _Attentions:
    seen: list[tuple[Seen, bool]] = field(default_factory=list)
    """Each with whether a softmax proves it."""

    unknown: bool = False


class StepTokens:
    """The token ids of one forward pass."""

    def __init__(self, recurrent: Sequence[nn.Module] = ()) -> None:
        """`recurrent` are such layers of the model: beside one of them attention may look at what
        another part of the model has read.
        """
        self._recurrent: Final = len(recurrent) > 0
        only = recurrent[0] if len(recurrent) == 1 else None
        self._one_way: Final = isinstance(only, nn.RNNBase) and not only.bidirectional
        self._ids: Final[list[torch.Tensor]] = []
        self._attentions: Final[dict[int, _Attentions]] = {}

    def embedded(self, given: object) -> None:
        """An embedding was given these ids: `[rows, places]` or `[places, rows]`, of int64 or
        int32. What has another shape or type is left out.
        """
        ids = readable(given, _WHOLE)
        if ids is None or ids.dim() != 2 or max(ids.shape) < MIN_PLACES or not ids.numel():
            return
        if len(self._ids) < MAX_IDS and not any(ids is other for other in self._ids):
            self._ids.append(ids)
            for places in ids.shape:
                self._attentions.setdefault(places, _Attentions())

    def attended(self, query: object, key: object, mask: object, *, is_causal: bool) -> None:
        """`scaled_dot_product_attention` was called: query and key `[B, H, T, D]` or `[B, T, D]`,
        and a mask that is broadcast to `[B, H, T, T]`. Attention to other places is left out.
        """
        if not isinstance(query, torch.Tensor) or not isinstance(key, torch.Tensor):
            return
        if query.dim() not in (3, 4) or query.shape[-2] != key.shape[-2]:
            return
        of = self._attentions.get(query.shape[-2])
        if of is None:
            return
        if mask is None or is_causal:
            self._note(of, query.shape[-2], not is_causal, softmax=False)
            return
        held = readable(mask, _MASKS)
        if held is None or held.dim() < 2 or held.shape[-1] != query.shape[-2]:
            of.unknown = True
            return
        allowed = _next_places(held, query.shape[-2])
        if allowed is not None:
            allowed = allowed.clone() if allowed.dtype is torch.bool else allowed > CLOSED
        self._note(of, query.shape[-2], allowed, softmax=False)

    def softmaxed(self, result: object) -> None:
        """A softmax over the last dimension has put this out: `[..., T, T]` with 2 to 4 dimensions.
        What has another shape is left out.
        """
        if not isinstance(result, torch.Tensor) or result.dim() not in (2, 3, 4):
            return
        places = result.shape[-1]
        of = self._attentions.get(places)
        if of is None or result.shape[-2] != places:
            return
        held = readable(result)
        shares = None if held is None else _next_places(held, places)
        self._note(of, places, None if shares is None else shares > 0, softmax=True)

    def _note(self, of: _Attentions, places: int, seen: Seen | None, *, softmax: bool) -> None:
        if isinstance(seen, torch.Tensor) and seen.shape[0] > 1:
            ids = next(ids for ids in self._ids if places in ids.shape)
            rows = ids.shape[0] if ids.shape[1] == places else ids.shape[1]
            heads = seen.shape[0] // rows
            seen = None if seen.shape[0] % rows else seen[::heads][:: -(-rows // ROWS)].clone()
        if seen is None or len(of.seen) >= MAX_ATTENTIONS:
            of.unknown = True
            return
        of.seen.append((seen, softmax))

    def compare(self, target: torch.Tensor, classes: int, ignored: int) -> PendingTargets | None:
        """How class indices stand to what was read; None: they are no sequences of its length.

        Args:
            target: class indices of any shape, in the order of the ids `[rows, places]`; or one
                fewer in each row.
            classes: how many there are.
            ignored: the index that the loss leaves out.
        """
        found = []
        for ids in self._ids:
            # Samples first, or places first.
            for part, turned in ((ids, False), (ids.T, True)):
                rows, places = part.shape
                per_row = target.numel() // rows
                if per_row * rows != target.numel() or per_row not in (places, places - 1):
                    continue
                if places < MIN_PLACES or target.device != ids.device:
                    continue
                wanted = (
                    target.reshape(per_row, rows).T if turned else target.reshape(rows, per_row)
                )
                found.append(self._compare(part, wanted, classes, ignored))
        return PendingTargets(found) if found else None

    def _compare(
        self, ids: torch.Tensor, wanted: torch.Tensor, classes: int, ignored: int
    ) -> _Compared:
        rows, places = ids.shape
        apart = -(-rows // ROWS)
        some = ids[::apart, : PLACES + 1]
        here, following = some[:, :-1], some[:, 1:]
        wanted = wanted[::apart, : here.shape[1]]
        counted = (wanted != ignored) & (wanted >= 0) & (here != following)
        sums = [counted.sum(), (counted & (wanted == here)).sum()]
        sums.append((counted & (wanted == following)).sum())
        fixed: list[bool | None] = []
        of = self._attentions[places]
        # Where there are as many classes as places, a softmax may be one over the classes.
        known = not of.unknown and not (
            classes == places and any(softmax for _, softmax in of.seen)
        )
        for seen, _ in of.seen if known else ():
            if isinstance(seen, bool):
                fixed.append(seen)
                continue
            if seen.shape[0] not in (1, counted.shape[0]) or seen.device != ids.device:
                known = False
                break
            sums.append((counted & seen).sum())
            fixed.append(None)
        one_way = self._one_way and known and not of.seen
        known = one_way or (known and not self._recurrent)
        return _Compared(
            torch.stack(sums).to(torch.float32), [False] if one_way else fixed, known=known
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Compared:
    sums: torch.Tensor
    fixed: list[bool | None]
    known: bool

    def read(self, numbers: Iterable[float]) -> TokenTargets | None:
        count, same, following, *open_at = numbers
        if count < MIN_COMPARED:
            return None
        measured = iter(open_at)
        ahead = tuple(
            next(measured) / count if always is None else float(always) for always in self.fixed
        )
        known = self.known and bool(ahead)
        return TokenTargets(int(count), same / count, following / count, ahead if known else None)


class PendingTargets:
    """A comparison on the host, or on its way."""

    def __init__(self, found: list[_Compared]) -> None:
        self._found: Final = found
        packed = torch.cat([each.sums for each in found])
        self._packed = packed if packed.is_cpu else HostCopy(packed)

    @property
    def ready(self) -> bool:
        """Whether it is on the host; never waits."""
        return not isinstance(self._packed, HostCopy) or self._packed.ready()

    def result(self) -> TokenTargets | None:
        """That with the ids which prove most: those whose next ones are the targets, else those
        that are the targets. None: there was too little to compare. Once it is ready.
        """
        held = self._packed
        numbers = held.values() if isinstance(held, HostCopy) else held.double().numpy()
        read, at = [], 0
        for each in self._found:
            behind = at + each.sums.numel()
            one = each.read(float(number) for number in numbers[at:behind])
            at = behind
            if one is not None:
                read.append(one)
        return max(read, key=lambda one: (one.following >= NEXT, one.same), default=None)


def _next_places(square: torch.Tensor, places: int) -> torch.Tensor | None:
    """What […, places or 1, places] shows of each place and the one behind it."""
    if square.dim() == 4:
        square = square[:, 0]
    elif square.dim() == 2:
        square = square[None]
    if square.dim() != 3 or square.shape[-2] not in (1, places):
        return None
    if square.shape[-2] == 1:
        return square[:, 0, 1 : PLACES + 1]
    return square.diagonal(1, -2, -1)[:, :PLACES]
