"""CUDA events and pinned memory, which only the process that made them may destroy.

Their destructors call the driver, and in a forked child the driver refuses every call. A destructor
that fails ends the process: workers of a data loader were killed (SIGABRT) because they were forked
while a step was timed, and dropped its events.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

_inherited: Final[list[dict[str, Any]]] = []
"""What a child has of its parents, kept until it leaves; workers leave without destructors."""


class DriverObjects:
    """Base of a class whose attributes hold such objects: in a forked child they are kept."""

    def __init__(self) -> None:
        self._maker = os.getpid()

    def __del__(
        self,
        pid: Callable[[], int] = os.getpid,
        inherited: list[dict[str, Any]] = _inherited,
    ) -> None:
        # The defaults: at the interpreter's end the module's names may be gone.
        if pid() != self._maker:
            inherited.append(self.__dict__)
