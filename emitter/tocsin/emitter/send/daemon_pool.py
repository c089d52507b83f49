"""What the event loop of a daemon thread needs to begin, and to work while the process ends.

Platform facts. asyncio looks up host names in its default executor. Python's thread pools refuse
work once the main thread is over, before `atexit` calls are made: that is when a training sends its
last records, and a bus whose connection is made only then, or again, could not be reached. A loop
that ends waits for its pool, too, and a name server that does not answer would hold up the exit.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def check_descriptors() -> None:
    """Whether an event loop could be made here; to be asked before one is.

    One that finds no descriptor free is made by half: it keeps the others until it is collected,
    and that complains on stderr.

    Raises:
        OSError: there are too few.
    """
    pairs: list[socket.socket] = []
    try:
        pairs += socket.socketpair()
        pairs += socket.socketpair()
    finally:
        for each in pairs:
            each.close()


class DaemonPool(ThreadPoolExecutor):
    """Runs each call in a daemon thread of its own; nobody ever waits for one.

    A subclass because asyncio takes no other default executor. For calls that are few and short.
    """

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Start the call. Raises RuntimeError if the system refuses a thread."""
        future: Future[R] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            # Handed to whoever waits for the result.
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=work, name="tocsin-call", daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Shut down without waiting."""
