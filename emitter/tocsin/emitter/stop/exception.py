"""The stop as a training meets it: an exception, or a framework that ends its loop by itself."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from tocsin.emitter.process.isolation import from_signal
from tocsin.schemas.exit_codes import STOPPED

logger = logging.getLogger(__name__)


class StopTraining(SystemExit):
    """Raised in the training loop by a stop. A `SystemExit`: the process exits with code 79.

    Attributes:
        reason: why, in one sentence.
        step: the last completed step.
        issue_id: the issue that caused the stop.
        save: whether a checkpoint is to be saved before the loop is left.
    """

    def __init__(
        self,
        reason: str,
        *,
        step: int | None = None,
        issue_id: str | None = None,
        save: bool = False,
    ) -> None:
        super().__init__(STOPPED)
        self.reason: Final = reason
        self.step: Final = step
        self.issue_id: Final = issue_id
        self.save: Final = save

    def __str__(self) -> str:
        at = "" if self.step is None else f" at step {self.step:,}"
        return f"training stopped by tocsin{at}: {self.reason}"

    def __repr__(self) -> str:
        return f"StopTraining({str(self)!r})"

    def _render_traceback_(self) -> list[str]:
        # IPython asks for this; a stop is an answer, not a crash.
        return [str(self)]


Taker = Callable[[StopTraining], bool]
"""Of a framework: whether it ends its loop for this stop by itself."""

_taker: Taker | None = None


def take_over(taker: Taker | None) -> None:
    """From now on `taker` is asked before a stop is raised; with None nobody is."""
    global _taker
    _taker = taker


def taken_over(stop: StopTraining) -> bool:
    """Whether a framework ends its loop for it, so that it need not be raised here."""
    try:
        return _taker is not None and _taker(stop)
    except Exception as error:
        if from_signal(error):
            raise
        # An emitter hook's isolation: then it is raised, as without that framework.
        logger.warning("the framework could not end its loop for the stop", exc_info=True)
        return False
