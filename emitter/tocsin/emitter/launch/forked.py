"""A process of ours as a fork of the launcher: what both need is imported once.

A fork is as good as a Python started anew only if this process has one thread, no event loop, and
none of the user's modules (`schemas.process.own_python`). Where that is not so, start one anew.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NoReturn

from tocsin.emitter.process.process_group import set_name
from tocsin.schemas.process.own_python import has_users_modules

ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Environment: libraries of numbers start no threads. One is enough for what we compute, and the
training needs the cores.
"""

_TASKS: Final = "/proc/self/task"
_MAX_DESCRIPTORS: Final = 65_536


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """For imports before a fork: they start no threads, as numpy's OpenBLAS would, and nobody looks
    for garbage in what they make, now or later: that takes a fifth of their time.
    """
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    collecting = gc.isenabled()
    os.environ.update(ONE_THREAD)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collecting:
            gc.enable()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def can_fork() -> bool:
    """Whether a fork of this process would be as good as a Python started anew."""
    try:
        threads = len(os.listdir(_TASKS))
        for stream in range(3):
            os.fstat(stream)  # one that is closed would be the number of a pipe to the child
    except OSError:
        return False
    return threads == 1 and not has_users_modules()


def fork(
    serve: Callable[[], int], environ: Mapping[str, str], stdin: int, name: str, log: int = 2
) -> int:
    """Run `serve` in a fork with a session, an environment and a name of its own; it exits with
    what that returns, and writes to `log`. The pid.

    Raises OSError.
    """
    pid = os.fork()
    if pid == 0:
        _become(serve, environ, stdin, name, log)
    return pid


def _become(
    serve: Callable[[], int], environ: Mapping[str, str], stdin: int, name: str, log: int
) -> NoReturn:
    """In the child: never returns into the launcher's code."""
    code = 1
    try:
        # The collector would write to each page that the launcher has.
        gc.freeze()
        os.setsid()
        set_name(name)
        os.dup2(stdin, 0)
        os.dup2(log, 2)
        os.dup2(2, 1)
        os.closerange(3, _MAX_DESCRIPTORS)
        # Those of the launcher may be None.
        sys.stdin = open(0, closefd=False)  # noqa: SIM115  (for as long as the process lives)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        os.environ.clear()
        os.environ.update(environ)
        code = serve()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(code)
