"""What runs in a training process, and what starts one: capture, sampling, sending, the stop.

`start()` watches a training from its own code; `tocsin run` does it from outside. Importing this
package is cheap: what it offers is imported when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tocsin.emitter.api import start
    from tocsin.emitter.run import Run
    from tocsin.emitter.stop.exception import StopTraining

__all__ = ["Run", "StopTraining", "start"]


def __getattr__(name: str) -> object:
    if name == "start":
        from tocsin.emitter.api import start

        return start
    if name == "Run":
        from tocsin.emitter.run import Run

        return Run
    if name == "StopTraining":
        from tocsin.emitter.stop.exception import StopTraining

        return StopTraining
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
