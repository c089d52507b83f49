"""Whether this process is the one that an object was made in, at the price of an attribute."""

from __future__ import annotations

import os
from typing import Final


class Forks:
    """How many forks lie between the process that watched first and this one.

    `os.getpid` is a system call, which is too much for what is asked at each step.
    """

    def __init__(self) -> None:
        self.count = 0
        self._watching = False

    def watched(self) -> int:
        """The count; from now on it grows in each child."""
        if not self._watching:
            self._watching = True
            os.register_at_fork(after_in_child=self._forked)
        return self.count

    def _forked(self) -> None:
        self.count += 1


forks: Final = Forks()
"""The one of this process."""
