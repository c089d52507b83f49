"""The gloo group beside the user's own, on which ranks agree where to leave.

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
import os
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

from tocsin.emitter.process.identity import rank_of
from tocsin.emitter.process.isolation import from_signal
from tocsin.emitter.stop.rank_agreement import Agreement, Round

if TYPE_CHECKING:
    import torch.distributed as dist

logger = logging.getLogger(__name__)

HERE_S: Final = 10.0
"""How long ranks look for each other before a group is made, seconds."""

GROUP_TIMEOUT_S: Final = 30.0
"""After this long a round has failed, seconds; it bounds what a lost rank holds up at exit."""

P = ParamSpec("P")
R = TypeVar("R")


class _GlooRound:
    def __init__(self, work: dist.Work, numbers: _Numbers, reset: Callable[[], None]) -> None:
        self._work = work
        self._numbers = numbers
        self._reset = reset

    def done(self) -> bool:
        return bool(self._work.is_completed())

    def result(self) -> tuple[int, int]:
        self._work.wait()
        known, interval = self._numbers.view.tolist()
        return known, interval

    def abandon(self) -> None:
        for each in (self._work, self._numbers.tensor):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
        # The ranks that are late may still write to it: the next round needs a tensor of its own.
        self._reset()


class _Numbers:
    """What a round works on: a tensor, the list that gloo wants it in, and NumPy's view of it,
    through which two numbers are read and written in a tenth of the time.
    """

    def __init__(self) -> None:
        import torch

        self.tensor = torch.zeros(2, dtype=torch.int64, device="cpu")
        self.tensors = [self.tensor]
        self.view = self.tensor.numpy()


class GlooCollective:
    """On a gloo group of its own; tensors on the CPU whatever the main backend is.

    It calls the group itself: half of what `torch.distributed.all_reduce` takes are its wrappers.
    """

    def __init__(self, torch_distributed: ModuleType, group: dist.ProcessGroup) -> None:
        self._group = group
        self._options = torch_distributed.AllreduceOptions()
        self._options.reduceOp = torch_distributed.ReduceOp.MAX
        self._numbers: _Numbers | None = None

    def start(self, known: int, interval: int) -> Round:
        """Begin a round; never waits. There is at most one round at a time."""
        numbers = self._numbers
        if numbers is None:
            numbers = self._numbers = _Numbers()
        view = numbers.view
        view[0], view[1] = known, interval
        work = self._group.allreduce(numbers.tensors, self._options)
        return _GlooRound(work, numbers, self._reset)

    def _reset(self) -> None:
        self._numbers = None


_collective: GlooCollective | None = None
_votes: GlooCollective | None = None
_agreement: Agreement | None = None
_trainings = 0


def current() -> Agreement | None:
    """A fresh agreement among the ranks of the process group; None without one, for one rank, or
    where the ranks have not done the same on it. Waits for a round of the agreement before, for a
    second at most.
    """
    global _agreement, _collective, _votes
    if _agreement is not None:
        _agreement.close()
        if _agreement.unpaired:
            _collective = _votes = None
    _agreement = None if _collective is None else Agreement(_collective, votes=_votes)
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

    What one sends before that it would send as a training of its own.
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
    rank then leaves at its own exit point. With ranks that have no tocsin it takes up to `HERE_S`
    longer.
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
            logger.warning(
                "on a stop, ranks will exit independently, not at the same step: %s", reason
            )
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
    global _agreement, _collective, _votes
    if _agreement is not None:
        _agreement.close()
    _agreement = _collective = _votes = None


def _make_group(torch_distributed: ModuleType, environ: Mapping[str, str]) -> None:
    global _collective, _votes
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
    # Each has a tensor of its own, so that a vote may be taken while a round is under way.
    _collective = GlooCollective(torch_distributed, group)
    _votes = GlooCollective(torch_distributed, group)
