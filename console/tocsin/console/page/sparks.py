"""Losses as small as a word, for the rows of the overview.

The views of the runs bring a point every few seconds. What was before the page was started is read
from the store or the bus: for rows that somebody sees, one run at a time, and with pauses.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from tocsin.console.charts import decimate, sparkline
from tocsin.console.page.numbers import Numbers, line_of
from tocsin.console.views.sparkline import Bucket
from tocsin.console.watch.state import WatchedRun

if TYPE_CHECKING:
    from tocsin.store import Run

logger = logging.getLogger(__name__)

POINTS: Final = 60
KEPT: Final = 2_000
"""Runs whose losses are remembered."""

_PAUSES: Final = 5.0
"""After each reading a pause of so many times its duration."""

Values = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Seen:
    """A run as it is when somebody sees its row. `over`: it has ended, so its loss is whole."""

    run_id: str
    incarnation: str
    over: bool

    @classmethod
    def current(cls, run: WatchedRun) -> Seen:
        """That run, now."""
        return cls(run.seen.run_id, run.seen.incarnation, not run.seen.running)


class Sparks:
    """The losses of runs before the page was started, as far as they were wanted."""

    def __init__(self, numbers: Numbers, changed: Callable[[], None]) -> None:
        self._numbers = numbers
        self._changed = changed
        self._known: OrderedDict[Seen, Values] = OrderedDict()
        self._wanted: list[Seen] = []
        self._news = asyncio.Event()

    def values(self, run: Seen, buckets: Sequence[Bucket]) -> Values:
        """The loss to draw: as it was seen live, or as it was read if that is more."""
        live = tuple(_value(bucket) for bucket in buckets)
        read = self._known.get(run) or self._known.get(replace(run, over=False), ())
        return live if len(live) >= len(read) else read

    def want(self, runs: Sequence[Seen]) -> None:
        """These rows are seen now: read their losses, unless they are known."""
        self._wanted = [run for run in runs if run not in self._known]
        if self._wanted:
            self._news.set()

    async def run(self) -> None:
        """Read what is wanted, for ever."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._wanted:
                key = self._wanted.pop(0)
                started_s = time.monotonic()
                self._known[key] = await self._try_to_read(key.run_id)
                while len(self._known) > KEPT:
                    self._known.popitem(last=False)
                if self._known[key]:
                    self._changed()
                await asyncio.sleep(_PAUSES * (time.monotonic() - started_s))

    async def _try_to_read(self, run_id: str) -> Values:
        """One run that cannot be read must not end the page, nor be read again and again."""
        try:
            return await asyncio.to_thread(self._read, run_id)
        except Exception:
            logger.exception("loss not read", extra={"action": "render", "run_id": run_id})
            return ()

    def _read(self, run_id: str) -> Values:
        return self._numbers.glance(run_id, _loss_of)


def _loss_of(run: Run | None) -> Values:
    line = line_of(run, "loss", "loss")
    if line is None:
        return ()
    _, y = decimate(line.x, line.y, POINTS // 2)
    return tuple(value if math.isfinite(value) else math.nan for value in y.tolist())


@functools.lru_cache(maxsize=1_000)
def spark_svg(values: Values) -> str:
    """The loss as SVG; empty with fewer than two points."""
    if len(values) < 2:
        return ""
    return sparkline(values, title="Loss so far", width=150, height=34)


def _value(bucket: Bucket) -> float:
    return math.nan if bucket.nonfinite or bucket.mean is None else bucket.mean
