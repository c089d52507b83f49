"""Trainings that are there and are not watched: which of them are, and who is notified.

A child of `multiprocessing` that trains is the job's training where no other process of the job
trains: a lock on a file of the job's folder decides. Data-loader workers and the workers of pools
never are: they are daemonic.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from tocsin.emitter.process.environment import LAUNCHER, RUNTIME_DIR
from tocsin.emitter.process.stderr import print_line
from tocsin.emitter.stop import datagrams

Kind = Literal["no_step", "child", "thread"]

LINES: Final[Mapping[str, str]] = {
    "no_step": "backward() was called many times and no torch.optim.Optimizer has made a step, so "
    "rules have no loss to check; try run.log({'loss': loss}) in each step, with "
    "run = tocsin.emitter.start()",
    "child": "a child process trains and is not watched; try tocsin.emitter.start() in it, or one "
    "such process at a time",
    "thread": "another thread of this process also trains and is not watched; try one process for "
    "each training",
}
"""What was seen, and what to do."""

_LOCK: Final = "training.lock"


class _Claim:
    """That of this process; forked children have none."""

    def __init__(self) -> None:
        self.held = False
        self.reported: set[str] = set()


_claim = _Claim()


def may_train(environ: Mapping[str, str]) -> bool:
    """Whether a training of this child process is the job's."""
    process = sys.modules.get("multiprocessing.process")
    if process is None or process.parent_process() is None or process.current_process().daemon:
        return False
    return claim(environ)


def is_loader_worker() -> bool:
    """Whether this process feeds a data loader: what it trains is its own affair."""
    worker = sys.modules.get("torch.utils.data._utils.worker")
    return worker is not None and worker.get_worker_info() is not None


def claim(environ: Mapping[str, str]) -> bool:
    """Be the process of the job that trains, until this process ends; False: another one is."""
    folder = environ.get(RUNTIME_DIR)
    if _claim.held or not folder:
        return _claim.held
    try:
        place = os.open(Path(folder) / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return False
    try:
        fcntl.lockf(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(place)
        return False
    # The file stays open: a lock of this kind goes with the first of its descriptors.
    _claim.held = True
    return True


def report(kind: Kind, environ: Mapping[str, str]) -> None:
    """Report it to the launcher once, which prints it at the end; without one, print it here."""
    if kind in _claim.reported:
        return
    _claim.reported.add(kind)
    launcher = environ.get(LAUNCHER)
    message: datagrams.Message = {"kind": "unwatched", "what": kind, "pid": os.getpid()}
    if not launcher or not datagrams.send(launcher, message):
        print_line(LINES[kind])


def _in_child() -> None:
    _claim.held = False
    _claim.reported = set()


os.register_at_fork(after_in_child=_in_child)
