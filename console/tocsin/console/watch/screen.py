"""`tocsin watch`: shows what is on a bus, as it comes.

What comes is drawn together, a few times a second at most and only if the picture is another one:
it is beside a training that must have the processor.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from contextlib import suppress
from typing import Final

from rich.console import Console
from rich.live import Live

from tocsin.console.context import CommandContext
from tocsin.console.watch.follower import Follower
from tocsin.console.watch.frame import Frame, draw
from tocsin.schemas.exit_codes import SIGNALLED
from tocsin.schemas.monotonic_clock import unix_ms

REDRAW_S: Final = 0.25
"""Least time between two pictures."""

TICK_S: Final = 1.0
"""Ages are shown, so there may be another picture after so long with no news."""

_ONCE_LINES: Final = 1_000
_EXIT: Final = {
    signal.SIGINT: 0,
    signal.SIGTERM: SIGNALLED + signal.SIGTERM,
    signal.SIGHUP: SIGNALLED + signal.SIGHUP,
}


def watch(context: CommandContext, run_id: str | None, *, once: bool, console: Console) -> int:
    """Show the bus until Ctrl-C; one picture if `once`, or if there is no terminal. Exit code.

    Raises:
        UnusableBus, UnknownTopic: the bus was never set up, and will not be by waiting.
        BusUnavailable: it does not answer, and there is only one picture.
    """
    # aiokafka reports each lost connection, which would go into the middle of the picture.
    logging.getLogger().addHandler(logging.NullHandler())
    follower = Follower(context, run_id)
    if once or not console.is_terminal or console.is_dumb_terminal:
        asyncio.run(follower.read_once())
        console.print(_picture(follower, console, _ONCE_LINES), end="")
        return 0
    return asyncio.run(_show(follower, console))


async def _show(follower: Follower, console: Console) -> int:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()
    live = Live(
        console=console,
        screen=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )

    def end(number: signal.Signals) -> None:
        if not ended.done():
            ended.set_result(_EXIT[number])

    def suspend() -> None:
        # The shell that takes over must not find its prompt on our page, without a cursor.
        live.stop()
        os.kill(os.getpid(), signal.SIGSTOP)
        live.start()
        follower.changed.set()

    for number in _EXIT:
        loop.add_signal_handler(number, end, number)
    loop.add_signal_handler(signal.SIGTSTP, suspend)
    loop.add_signal_handler(signal.SIGWINCH, follower.changed.set)
    with live:
        tasks: set[asyncio.Task[None]] = {
            asyncio.create_task(follower.follow(), name="tocsin-watch-follow"),
            asyncio.create_task(_draw(follower, live), name="tocsin-watch-draw"),
        }
        first: set[asyncio.Future[int] | asyncio.Task[None]] = {ended, *tasks}
        over, _ = await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks & over:
        task.result()
    return ended.result()


async def _draw(follower: Follower, live: Live) -> None:
    """Bring the picture up to date for ever."""
    shown, size = None, None
    while True:
        picture = _picture(follower, live.console, live.console.height)
        if picture != shown or live.console.size != size:
            live.update(picture, refresh=True)
            shown, size = picture, live.console.size
        await asyncio.sleep(REDRAW_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(TICK_S - REDRAW_S):
                await follower.changed.wait()
        follower.changed.clear()


def _picture(follower: Follower, console: Console, height: int) -> Frame:
    now_ms = unix_ms()
    return draw(
        follower.state,
        follower.situation(now_ms),
        now_ms=now_ms,
        width=console.width,
        height=height,
    )
