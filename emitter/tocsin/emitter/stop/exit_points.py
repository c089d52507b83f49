"""The points of the loop at which a training process asks whether it has to stop.

Capture calls `started` when a training begins, `check` at each exit point (outside of its
isolation) and `finished` at its end. In between the rank listens (`tocsin.emitter.stop.rank_stop`).

While nothing was heard `check` costs an attribute or two; with several ranks there is also the
agreement (`tocsin.emitter.stop.rank_agreement`).

A framework that can end its loop in good order takes the stop over (`exception.take_over`): it is
not raised at the exit point then, but when the loop has ended (`leave`), or at the next exit point
if the loop goes on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from tocsin.emitter.process.isolation import from_signal
from tocsin.emitter.stop import side_group
from tocsin.emitter.stop.leave_report import Emit, ExitPoint, Flush
from tocsin.emitter.stop.rank_stop import Rank, RequestDetail
from tocsin.emitter.stop.verification import STOP
from tocsin.schemas.records.frames import RecordOrigin

logger = logging.getLogger(__name__)


def leave() -> None:
    """A loop whose framework had taken a stop over has ended: raise that StopTraining. Otherwise
    nothing happens.
    """
    rank = _rank
    if rank is not None:
        rank.leave()


_rank: Rank | None = None


def started(
    origin: RecordOrigin,
    emit: Emit,
    *,
    flush: Flush | None = None,
    local_rank: int = 0,
    restart_count: int = 0,
    training: int = 0,
    request_detail: RequestDetail | None = None,
    finite: Callable[[], bool] | None = None,
) -> Rank:
    """A training begins in this process: listen, and sign on to the launcher.

    `emit` must be safe to call from another thread and must not wait; `flush(timeout_s)` waits
    until what was emitted is acknowledged. `request_detail` is called when a rule asks for more.
    `finite` returns whether the weights are, now; it may raise what it likes.
    """
    global _rank
    finished()
    stops_off = os.environ.get(STOP) == "off"
    agreed = None if stops_off or origin.world_size < 2 else side_group.current()
    _rank = Rank(
        origin, emit, flush=flush, local_rank=local_rank, restart_count=restart_count,
        training=training, agreed=agreed, request_detail=request_detail, finite=finite,
    )  # fmt: skip
    return _rank


def check(exit_point: ExitPoint, step: int) -> None:
    """At an exit point of this process: raises StopTraining if a verified stop is due. Then it
    waits for other ranks, and for a checkpoint.
    """
    rank = _rank
    if rank is not None:
        rank.step = step
        if rank.awake:
            try:
                rank.at_exit_point(exit_point, step)
            except Exception as error:
                # An emitter hook's isolation: only the stop leaves, and that is no `Exception`.
                if from_signal(error):
                    raise
                rank.awake = False
                logger.warning(
                    "a check between two steps has failed; the training continues", exc_info=True
                )


def asks(step: int) -> bool:
    """At the same exit point on the fast path: whether `check` has more to do than note it."""
    rank = _rank
    if rank is None:
        return False
    rank.step = step
    return rank.awake


def listening() -> Rank | None:
    """The rank of the training of this process, for the fast path to ask itself."""
    return _rank


def await_command() -> None:
    """Before the end of a training is reported: where it has left before an update, wait for the
    command that confirms that, for a bounded time.
    """
    if _rank is not None:
        _rank.await_command()


def alert() -> None:
    """Something went wrong in this rank that a stop may follow. On the training's thread."""
    rank = _rank
    if rank is not None:
        rank.alert()


def finished() -> None:
    """The training is over; nothing is heard any more. Without a training it does nothing."""
    global _rank
    rank, _rank = _rank, None
    if rank is not None:
        rank.close()


def _in_child() -> None:
    # A forked data-loader worker is not a rank: it must not leave, nor take the socket's file away.
    global _rank
    _rank = None


os.register_at_fork(after_in_child=_in_child)
