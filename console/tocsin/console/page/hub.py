"""What changes on open pages: rendered once for each change, whoever many look at it.

A channel is one page with its query: all who look at the same thing share it. It is rendered when
the bus or the clock has news, while somebody looks, and never more often than its cost allows.
Viewers get the regions that differ, as server-sent events; a viewer who is slow gets the newest
state once it reads again, not each one in between.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

logger = logging.getLogger(__name__)

MIN_S: Final = 0.2
"""Least time between two renderings of a channel."""

SHARE: Final = 8.0
"""A rendering is followed by a pause of so many times the processor time that it took."""

TICK_S: Final = 5.0
"""After so long without news a channel is rendered again: data may have become stale."""

KEPT_S: Final = 30.0
"""How long a channel stays after its last viewer has gone."""

MAX_CHANNELS: Final = 200
"""Different pages that are kept at once; one more takes the place of the one without viewers."""

GATHER_S: Final = 0.02

QUIET_S: Final = 15.0
"""After so long without an event a comment is sent, so that proxies keep the connection."""


class Rendered:
    """A page's parts: name of each region -> its HTML, in the order of the page.

    `frame` makes the whole of it, with all regions in it, for who opens the page or when the
    regions are others than before.
    """

    def __init__(self, regions: Mapping[str, str], frame: Callable[[], str]) -> None:
        self.regions = regions
        self._frame = frame
        digest = hashlib.sha256()
        for name, html in regions.items():
            digest.update(f"{name}\0{html}\0".encode())
        self.version = digest.hexdigest()[:16]
        """A name for this content."""

    @cached_property
    def frame(self) -> str:
        """All of it as HTML."""
        return self._frame()


Render = Callable[[], Awaitable[Rendered]]


@dataclass(slots=True)
class Channel:
    """One page that somebody looks at, or has a moment ago."""

    render: Render
    now: Rendered | None = None
    version: str = ""
    viewers: int = 0
    left_s: float = 0.0
    next_s: float = 0.0
    stale: bool = True
    message: tuple[Rendered | None, Rendered, bytes | None] | None = None
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    alone: asyncio.Lock = field(default_factory=asyncio.Lock)
    rendering: bool = False
    """Whether it is being rendered for its viewers."""


class Hub:
    """The channels of one server. For one event loop."""

    def __init__(self) -> None:
        self._channels: dict[str, Channel] = {}
        self._news = asyncio.Event()
        self._closing = False

    @property
    def viewers(self) -> int:
        """Who looks now."""
        return sum(channel.viewers for channel in self._channels.values())

    def news(self) -> None:
        """Something has changed: render what is looked at as soon as it may be."""
        for channel in self._channels.values():
            channel.stale = True
        self._news.set()

    async def close(self) -> None:
        """End all streams of events."""
        self._closing = True
        for channel in self._channels.values():
            async with channel.changed:
                channel.changed.notify_all()

    async def run(self) -> None:
        """Render what is looked at, for ever; each page for itself, as some take long."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._news.clear()
                wait_s = TICK_S
                now_s = time.monotonic()
                for key, channel in list(self._channels.items()):
                    if channel.rendering:
                        continue
                    if not channel.viewers:
                        if now_s - channel.left_s > KEPT_S:
                            self._channels.pop(key, None)
                    elif now_s < channel.next_s:
                        if channel.stale:
                            wait_s = min(wait_s, max(0.01, channel.next_s - now_s))
                    elif channel.stale or now_s >= channel.next_s + TICK_S:
                        channel.rendering = True
                        rendering = self._try_to_refresh(key, channel)
                        group.create_task(rendering, name="tocsin-page-render")
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._news.wait()
                # What comes together is rendered together.
                await asyncio.sleep(GATHER_S)

    async def page(self, key: str, render: Render) -> tuple[Rendered, str]:
        """The page as it is now, for who opens it, and its version."""
        channel = self._channel(key, render)
        if channel.now is None or channel.stale or not channel.viewers:
            await self._refresh(channel)
        assert channel.now is not None
        return channel.now, channel.version

    async def events(self, key: str, render: Render, version: str) -> AsyncIterator[bytes]:
        """The changes since that version, as server-sent events, until the viewer goes."""
        channel = self._channel(key, render)
        channel.viewers += 1
        sent: Rendered | None = channel.now if channel.version == version else None
        self._news.set()
        try:
            yield b"retry: 1000\n\n"
            if channel.now is None:
                await self._refresh(channel)
            while not self._closing:
                now = channel.now
                if now is not None and now is not sent:
                    message = _message_to(channel, sent, now)
                    sent = now
                    if message is not None:
                        yield message
                        continue
                try:
                    async with asyncio.timeout(QUIET_S), channel.changed:
                        await channel.changed.wait()
                except TimeoutError:
                    yield b": still here\n\n"
        finally:
            channel.viewers -= 1
            channel.left_s = time.monotonic()

    def _channel(self, key: str, render: Render) -> Channel:
        channel = self._channels.get(key)
        if channel is None:
            if len(self._channels) >= MAX_CHANNELS:
                unused = [name for name, one in self._channels.items() if not one.viewers]
                for name in unused[: max(1, len(unused) // 2)]:
                    del self._channels[name]
            channel = Channel(render, left_s=time.monotonic())
            self._channels[key] = channel
        return channel

    async def _try_to_refresh(self, key: str, channel: Channel) -> None:
        """One page that cannot be rendered must not keep the others from it."""
        try:
            await self._refresh(channel)
        except Exception:
            channel.next_s = time.monotonic() + TICK_S
            logger.exception("page not rendered", extra={"action": "render", "page": key})
        finally:
            channel.rendering = False
            self._news.set()

    async def _refresh(self, channel: Channel) -> None:
        async with channel.alone:
            # Of the process, since a thread renders: on a busy machine it waits more than it works.
            before_s = time.process_time()
            channel.stale = False
            now = await channel.render()
            spent_s = time.process_time() - before_s
            channel.next_s = time.monotonic() + max(MIN_S, SHARE * spent_s)
            version = now.version
            if version == channel.version:
                return
            channel.now, channel.version = now, version
            async with channel.changed:
                channel.changed.notify_all()


def _message_to(channel: Channel, before: Rendered | None, now: Rendered) -> bytes | None:
    """One event, made once for all viewers who have the same before them."""
    known = channel.message
    if known is None or known[0] is not before or known[1] is not now:
        known = channel.message = (before, now, event_of(before, now))
    return known[2]


def event_of(before: Rendered | None, now: Rendered) -> bytes | None:
    """The regions that differ, or all of it, as a server-sent event; None: nothing does. Pure."""
    body: dict[str, object] = {"version": now.version}
    if before is None or list(before.regions) != list(now.regions):
        body["frame"] = now.frame
    else:
        changed = {name: html for name, html in now.regions.items() if before.regions[name] != html}
        if not changed:
            return None
        body["regions"] = changed
    # JSON has no line breaks in it, which would end the event.
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"
