"""`tocsin rules` of which `loss_spike` never returns from the call at step 20.

    python -m support.rules.hanging_rule CONFIG

Its watchdog waits for two seconds.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from unittest.mock import patch

from tocsin.console.context import read_context
from tocsin.console.services import workers
from tocsin.runtime.watchdog import Watchdog
from tocsin.schemas.records.frames import StepFrame
from tocsin.stream_rules.outcomes import Moment, Outcome
from tocsin.stream_rules.rules.progress.loss_spike import LossSpike

HANGS_AT = 20
HANGS_S = 2.0


def hang(rule: LossSpike, frame: StepFrame, at: Moment) -> Iterable[Outcome]:
    if HANGS_AT in frame.steps:
        threading.Event().wait()
    return ()


if __name__ == "__main__":
    with (
        patch.object(LossSpike, "on_steps", hang),
        patch.object(workers, "Watchdog", partial(Watchdog, hangs_s=HANGS_S)),
    ):
        sys.exit(asyncio.run(workers.run_rules(read_context(Path(sys.argv[1]), None, environ={}))))
