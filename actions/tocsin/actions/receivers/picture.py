"""The picture of a message: the deciding series, its limit, and the step of the issue.

matplotlib runs in a child process (`python -m tocsin.actions.receivers.picture`: JSON in, PNG out):
it costs a second of a core and some 60 MB, and whatever it does there delays nothing and fails
alone.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import sys
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from tocsin.actions.receivers.drawing import Drawing, from_json, to_json
from tocsin.actions.receivers.message import Message
from tocsin.schemas.process.own_python import python_command, python_environment
from tocsin.schemas.text import number_text

logger = logging.getLogger(__name__)

TIMEOUT_S: Final = 15.0
"""For one picture, its time in the queue included."""

_AT_ONCE: Final = 2
_KEPT: Final = 32
_MAX_BYTES: Final = 1_000_000
_PNG: Final = b"\x89PNG\r\n\x1a\n"


def drawing_of(message: Message) -> Drawing | None:
    """What to draw for a message; None if it has no series of two values at least."""
    series = message.series
    if series is None or len(series.values) < 2:
        return None
    return Drawing.from_series(series, message.first_step)


class Plotter:
    """Draws in child processes, and keeps the newest pictures for attempts to come."""

    def __init__(
        self, *, timeout_s: float = TIMEOUT_S, command: Sequence[str] | None = None
    ) -> None:
        self._command = command or python_command(__name__)
        self._timeout_s = timeout_s
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._kept: OrderedDict[str, bytes] = OrderedDict()

    async def draw(self, key: str, drawing: Drawing) -> bytes | None:
        """A PNG, or None if it cannot be drawn in time. Raises nothing but CancelledError.

        Args:
            key: equal keys have equal pictures.
        """
        if (known := self._kept.get(key)) is not None:
            return known
        try:
            async with asyncio.timeout(self._timeout_s), self._room:
                png = await self._run(drawing)
        except (TimeoutError, OSError) as error:
            logger.warning(
                "message without its picture",
                extra={"action": "email", "reason": type(error).__name__},
            )
            return None
        if png is None:
            logger.warning("message without its picture", extra={"action": "email"})
            return None
        self._kept[key] = png
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return png

    async def _run(self, drawing: Drawing) -> bytes | None:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            # matplotlib would read a matplotlibrc of the working folder.
            cwd="/",
            env={**python_environment(os.environ), "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"},
        )
        try:
            out, _ = await process.communicate(to_json(drawing).encode())
        except BaseException:
            if process.returncode is None:
                process.kill()
                await asyncio.shield(process.wait())
            raise
        good = process.returncode == 0 and out.startswith(_PNG) and len(out) <= _MAX_BYTES
        return out if good else None


def render(drawing: Drawing) -> bytes:
    """Draw it, as a PNG of 1,200 by 600 pixels. Takes tenths of a second.

    The figure is small in inches, so that its words are large enough on a telephone.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(4.8, 2.4), dpi=250, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(
        [s for s, _ in drawing.finite], [v for _, v in drawing.finite],
        color="#1f5fa8", linewidth=1.3, marker="o" if drawing.dotted else None, markersize=2.5,
        label=_plain(drawing.name),
    )  # fmt: skip
    if drawing.limit is not None:
        axes.axhline(
            drawing.limit, color="#c26a00", linestyle="--", linewidth=1.1,
            label=f"limit {number_text(drawing.limit)}",
        )  # fmt: skip
    for number, step in enumerate(drawing.gone):
        axes.axvspan(
            step - 0.5, step + 0.5, color="#c62828", alpha=0.18, linewidth=0,
            label=None if number else "NaN or infinite",
        )  # fmt: skip
    if drawing.first_step is not None:
        axes.axvline(
            drawing.first_step, color="#c62828", linewidth=1.3,
            label=f"began at step {drawing.first_step:,}",
        )  # fmt: skip
    if drawing.logarithmic:
        axes.set_yscale("log")
    axes.set_xlabel(drawing.x_label)
    axes.set_ylabel(_plain(drawing.y_label))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small", loc="best")
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def _plain(text: str) -> str:
    """A name as it is: matplotlib would take what stands between dollar signs for a formula."""
    return text[:80].replace("$", r"\$")


if __name__ == "__main__":
    sys.stdout.buffer.write(render(from_json(sys.stdin.read())))
