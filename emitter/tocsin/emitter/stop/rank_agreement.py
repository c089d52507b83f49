"""All ranks of one training leave at the same step.

Rounds. Now and then the ranks take the maximum, over all of them, of two numbers: what a rank knows
(nothing, something went wrong, a stop was heard) and "so many edges until the next round". A round
is started at one edge, asynchronously, and its result is taken at the next edge, by all ranks at
the same one, since they count edges alike. Ranks that step together (DDP, FSDP: each backward waits
for all) have all started a round before any of them comes to the next edge, so its result is there
and nobody waits. A round costs 60-80 microseconds on gloo; rounds are `ROUND_S` apart, so that is
about 0.1 % of the time.

A rank sees itself that its loss is NaN, long before anybody has signed a command. From then on all
ranks hold a round at each edge, for `ALERT_EDGES`: once a rank has heard, they leave two edges
later, however short the steps are.

Ranks that do not step together would wait for one another here. They may, for a small share of the
time; beyond it, or when a round fails, the agreement ends for good and each rank leaves at its own
edge.

At exit. A gloo thread that lets go of a tensor needs the interpreter; after its end that aborts the
process (measured: SIGABRT at the exit of a healthy run). So there is one tensor for all rounds, and
`close`, called before the group is destroyed and when the training ends, takes the round under way
to its end; if it has none, its tensor is never freed, and later rounds have another.

The collective runs on a gloo group of its own, made inside the wrapped `init_process_group`, where
all ranks are. A rank without tocsin would never come to `new_group`; so the ranks first look for
each other in the store, for `HERE_S` at most. torch numbers the groups of a rank as they are made,
and ranks whose numbers differ never meet in the user's next group: so whether this one is made is
decided once for all ranks, by the first that has an answer.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Final, ParamSpec, Protocol, TypeVar

from tocsin.emitter.process.identity import rank_of
from tocsin.emitter.process.isolation import from_signal

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

logger = logging.getLogger(__name__)

ROUND_S: Final = 0.07
"""Pause between rounds that the ranks aim at, seconds."""

HERE_S: Final = 10.0
"""How long ranks look for each other before a group is made, seconds."""

GROUP_TIMEOUT_S: Final = 30.0
"""After this long a round has failed, seconds; it bounds what a lost rank holds up at exit."""

PATIENCE_S: Final = 0.5
PATIENCE_SHARE: Final = 0.005
"""A rank waits in rounds for at most `PATIENCE_S` plus this share of the time, before any stop."""

CLOSE_S: Final = 1.0
"""How long the end of a training waits for the last round, seconds."""

HEARD_PATIENCE_S: Final = 5.0
"""Once a stop was heard a rank waits this long for the others, seconds."""

ALERT_EDGES: Final = 256
"""So many edges have a round each after something went wrong."""

CALM_EDGES: Final = 4 * ALERT_EDGES
"""And so many edges after it began, another such time may begin: the rounds cost time."""

_NOTHING, _ALERT, _STOP = 0, 1, 2
_MAX_INTERVAL: Final = 32
_POLL_S: Final = 0.00005
_SETTLE: Final = 8

P = ParamSpec("P")
R = TypeVar("R")


class Round(Protocol):
    """A maximum under way."""

    def done(self) -> bool:
        """Whether the result is there; never waits. Raises RuntimeError: the round has failed."""
        ...

    def result(self) -> tuple[int, int]:
        """The maxima; only once it is done. Raises RuntimeError."""
        ...

    def abandon(self) -> None:
        """It will never be done: keep what it works on for as long as the process lives."""
        ...


class Collective(Protocol):
    """Takes maxima over all ranks."""

    def start(self, known: int, interval: int) -> Round:
        """Begin a round; never waits. Raises RuntimeError: the group is gone."""
        ...


class Agreement:
    """One rank's side of it. Used by the training thread alone."""

    def __init__(
        self, collective: Collective, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._collective: Collective | None = collective
        self._clock = clock
        self._began = clock()
        self._waited_s = 0.0
        self._edges = 0
        self._next_round = 0
        self._round: Round | None = None
        self._last_round_at: float | None = None
        self._edges_since = 0
        self._interval = 1
        self._alerted = False
        self._alert_began = -CALM_EDGES
        self.broken: str | None = None
        self.closed = False

    def alert(self) -> None:
        """Something went wrong here that a stop may follow; never waits."""
        if self._edges - self._alert_began >= CALM_EDGES:
            self._alerted = True

    def close(self) -> None:
        """Let go of the group, after the round under way; waits for that at most `CLOSE_S`."""
        if self.closed:
            return
        self.closed = True
        pending, self._round = self._round, None
        if pending is not None:
            try:
                until = self._clock() + CLOSE_S
                while not pending.done() and self._clock() < until:
                    time.sleep(_POLL_S)
                if not pending.done():
                    pending.abandon()
            except RuntimeError as error:
                logger.debug("the last round failed: %s", error)
        self._collective = None

    def at_edge(self, heard: bool) -> bool:
        """Count an edge; True if all ranks leave at this one. `broken` says why there is no more.

        A rank that has heard may wait here for up to `HEARD_PATIENCE_S`, once.
        """
        edge, self._edges = self._edges, self._edges + 1
        collective = self._collective
        if collective is None:
            return False
        try:
            if self._round is not None:
                if not self._await(self._round, heard):
                    self.broken = "the ranks do not step alike"
                    return False
                known, interval = self._round.result()
                self._round = None
                if known >= _STOP:
                    return True
                if known == _ALERT:
                    self._alerted, self._alert_began = False, edge
                if edge - self._alert_began < ALERT_EDGES:
                    interval = 1
                self._next_round = edge - 1 + max(1, interval)
            if edge >= self._next_round:
                self._measure()
                known = _STOP if heard else _ALERT if self._alerted else _NOTHING
                self._round = collective.start(known, self._interval)
        except (RuntimeError, ValueError, TypeError) as error:
            self.broken = f"a round failed: {error}".splitlines()[0][:200]
        return False

    def most(self, value: int) -> int | None:
        """The highest of what all ranks pass, at an edge at which all of them leave; None: there
        is no such number. Waits for the others for at most `HEARD_PATIENCE_S`.
        """
        collective = self._collective
        if collective is None or self._round is not None:
            return None
        try:
            pending = collective.start(value, 0)
            until = self._clock() + HEARD_PATIENCE_S
            while not pending.done():
                if self._clock() > until:
                    pending.abandon()
                    return None
                time.sleep(_POLL_S)
            return pending.result()[0]
        except (RuntimeError, ValueError, TypeError) as error:
            logger.debug("the ranks did not agree: %s", error)
            return None

    def _await(self, pending: Round, heard: bool) -> bool:
        if pending.done():
            return True
        began = self._clock()
        allowed_s = HEARD_PATIENCE_S
        if not heard:
            allowed_s = PATIENCE_S + PATIENCE_SHARE * (began - self._began) - self._waited_s
        while True:
            time.sleep(_POLL_S)
            done = pending.done()
            waited_s = self._clock() - began
            if done or waited_s > allowed_s:
                if not heard:
                    self._waited_s += waited_s
                return done

    def _measure(self) -> None:
        now, before = self._clock(), self._last_round_at
        edges = self._edges - self._edges_since
        if before is not None and edges >= self._interval and self._edges > _SETTLE:
            per_edge_s = max((now - before) / edges, 1e-6)
            self._interval = min(max(1, math.ceil(ROUND_S / per_edge_s)), _MAX_INTERVAL)
        self._last_round_at, self._edges_since = now, self._edges


class _GlooRound:
    def __init__(self, work: dist.Work, numbers: torch.Tensor, reset: Callable[[], None]) -> None:
        self._work = work
        self._numbers = numbers
        self._reset = reset

    def done(self) -> bool:
        return bool(self._work.is_completed())

    def result(self) -> tuple[int, int]:
        self._work.wait()
        known, interval = self._numbers.tolist()
        return int(known), int(interval)

    def abandon(self) -> None:
        for each in (self._work, self._numbers):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
        # The ranks that are late may still write to it: the next round needs a tensor of its own.
        self._reset()


class GlooCollective:
    """On a gloo group of its own; tensors on the CPU whatever the main backend is."""

    def __init__(self, torch_distributed: ModuleType, group: object) -> None:
        self._dist = torch_distributed
        self._group = group
        self._numbers: torch.Tensor | None = None

    def start(self, known: int, interval: int) -> Round:
        """See Collective. There is at most one round at a time."""
        numbers = self._numbers
        if numbers is None:
            import torch

            numbers = self._numbers = torch.zeros(2, dtype=torch.int64, device="cpu")
        numbers[0], numbers[1] = known, interval
        maximum = self._dist.ReduceOp.MAX
        work = self._dist.all_reduce(numbers, op=maximum, group=self._group, async_op=True)
        if work is None:
            raise RuntimeError("this rank is not in the group")
        return _GlooRound(work, numbers, self._reset)

    def _reset(self) -> None:
        self._numbers = None


_collective: GlooCollective | None = None
_agreement: Agreement | None = None
_trainings = 0


def current() -> Agreement | None:
    """A fresh agreement among the ranks of the process group; None without one, or for one rank."""
    global _agreement
    if _agreement is not None:
        _agreement.close()
    _agreement = None if _collective is None else Agreement(_collective)
    return _agreement


Place = tuple[tuple[int, int], Callable[[str], str]] | tuple[None, None]


def ranks_here() -> Place:
    """(rank, world size), and how the ranks agree on one training; None before they have met."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None, None
    return (dist.get_rank(), dist.get_world_size()), one_training


def ranks_to_come(environ: Mapping[str, str]) -> bool:
    """Whether this is one of several ranks that have torch, and have not met yet.

    What one says before that it would say as a training of its own.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or dist.is_initialized():
        return False
    return rank_of(environ)[2] > 1


def one_training(claim: str) -> str:
    """The same text on all ranks whose training begins now: that of the rank that came first.

    `claim` is this rank's own. Through the store of the process group, so nobody waits for another;
    each rank's n-th training is one with the others' n-th. Raises what torch does.
    """
    global _trainings
    import torch.distributed as dist

    if dist.get_world_size() < 2 or dist.get_backend() == "fake":
        return claim
    name, _trainings = f"tocsin/training/{_trainings}", _trainings + 1
    store = dist.distributed_c10d._get_default_store()
    return bytes(store.compare_set(name, "", claim)).decode() or claim


def wrap_init_process_group(torch_distributed: ModuleType) -> None:
    """Have each `init_process_group` make the side group. To be called once torch is imported.

    The wrapped function behaves and raises as before; what fails on our side is logged, and each
    rank then leaves at its own edge. With ranks that have no tocsin it takes up to `HERE_S` longer.
    """
    original = torch_distributed.init_process_group
    if getattr(original, "_tocsin", False):
        return
    wrapped = _after(original, lambda: _make_group(torch_distributed, os.environ))
    closing = _before(torch_distributed.destroy_process_group, _reset)
    # Libraries import the function from either module.
    for module in (torch_distributed, torch_distributed.distributed_c10d):
        setattr(module, original.__name__, wrapped)
        setattr(module, "destroy_process_group", closing)  # noqa: B010  (a module has no such field)


def _after(original: Callable[P, R], then: Callable[[], None]) -> Callable[P, R]:
    @functools.wraps(original)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        result = original(*args, **kwargs)
        try:
            then()
        # An emitter hook's isolation: the process group is there, whatever ours does.
        except Exception as error:
            if from_signal(error):
                raise
            reason = (str(error) or type(error).__name__).splitlines()[0]
            logger.warning("each rank leaves at its own edge when it is stopped: %s", reason)
        return result

    wrapped._tocsin = True  # type: ignore[attr-defined]  # marks it as wrapped
    return wrapped


def _before(original: Callable[P, R], first: Callable[[], None]) -> Callable[P, R]:
    @functools.wraps(original)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            first()
        except Exception as error:
            # An emitter hook's isolation: the user's call is made whatever ours does.
            if from_signal(error):
                raise
            logger.warning("the side group was not let go of in order", exc_info=True)
        return original(*args, **kwargs)

    return wrapped


def _reset() -> None:
    global _agreement, _collective
    if _agreement is not None:
        _agreement.close()
    _agreement = _collective = None


def _make_group(torch_distributed: ModuleType, environ: Mapping[str, str]) -> None:
    global _collective
    _reset()
    if not environ.get("TOCSIN_RUN_ID"):
        return
    world_size, rank = torch_distributed.get_world_size(), torch_distributed.get_rank()
    if world_size < 2 or "fake" in torch_distributed.get_backend():
        # The ranks of a fake group are one process, and gloo dies of its store by SIGSEGV.
        return
    store = torch_distributed.distributed_c10d._get_default_store()
    # A group that is made again meets a store that remembers; each making has its own names.
    turn = int(store.add(f"tocsin/turn/{rank}", 1))
    # Counted before the rank is there, so that all who see all ranks see the same count.
    store.add(f"tocsin/off/{turn}", int(environ.get("TOCSIN_STOP") == "off"))
    store.set(f"tocsin/here/{turn}/{rank}", environ.get("TOCSIN_JOB_ID", ""))
    names = [f"tocsin/here/{turn}/{other}" for other in range(world_size)]
    try:
        store.wait(names, timedelta(seconds=HERE_S))
        answer = "here" if store.add(f"tocsin/off/{turn}", 0) == 0 else "off"
    except RuntimeError:
        answer = f"not all ranks were there within {HERE_S:g} s"
    answer = store.compare_set(f"tocsin/all/{turn}", "", answer).decode()
    if answer not in ("here", "off"):
        raise TimeoutError(answer)
    job_id = store.get(names[0]).decode()
    if job_id:
        # On other nodes another launcher made another one; an incarnation is equal on all ranks.
        os.environ["TOCSIN_JOB_ID"] = job_id
    if answer == "off":
        return
    group = torch_distributed.new_group(backend="gloo", timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    _collective = GlooCollective(torch_distributed, group)
