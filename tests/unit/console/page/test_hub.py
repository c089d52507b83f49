"""Open pages are rendered once for each change, and viewers get what differs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from support.waiting import until
from tocsin.console.page import hub as page_hub
from tocsin.console.page.hub import Hub, Rendered, event_of


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_hub, "MIN_S", 0.01)
    monkeypatch.setattr(page_hub, "GATHER_S", 0.001)
    monkeypatch.setattr(page_hub, "SHARE", 0.0)


class Page:
    """A page with a number in it, and how often it was rendered."""

    def __init__(self) -> None:
        self.number = 0
        self.times = 0
        self.broken = False

    async def render(self) -> Rendered:
        self.times += 1
        if self.broken:
            raise ZeroDivisionError
        regions = {"number": str(self.number), "rest": "always"}
        return Rendered(regions, lambda: f"<{self.number}>")


@asynccontextmanager
async def running() -> AsyncIterator[Hub]:
    hub = Hub()
    task = asyncio.create_task(hub.run())
    try:
        yield hub
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Viewer:
    """Reads events as a browser does."""

    def __init__(self, hub: Hub, page: Page, version: str = "", key: str = "/") -> None:
        self.events: list[dict[str, object]] = []
        self.task = asyncio.create_task(self._read(hub, page, version, key))

    async def _read(self, hub: Hub, page: Page, version: str, key: str) -> None:
        async for message in hub.events(key, page.render, version):
            if message.startswith(b"data: "):
                self.events.append(json.loads(message[6:]))

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def test_a_page_that_takes_long_holds_up_no_other() -> None:
    page, slow, held = Page(), Page(), asyncio.Event()

    async def render() -> Rendered:
        if slow.times:
            await held.wait()
        return await Page.render(slow)

    slow.render = render  # type: ignore[method-assign]
    async with running() as hub:
        viewers = [Viewer(hub, slow, key="/slow"), Viewer(hub, page)]
        await until(lambda: all(viewer.events for viewer in viewers))
        page.number = slow.number = 1
        hub.news()
        await until(lambda: len(viewers[1].events) == 2)
        page.number = slow.number = 2
        hub.news()
        await until(lambda: len(viewers[1].events) == 3)
        assert len(viewers[0].events) == 1
        held.set()
        await until(lambda: viewers[0].events[-1].get("regions") == {"number": "2"})
        for viewer in viewers:
            await viewer.leave()


async def test_fifty_viewers_cost_one_rendering_for_each_change() -> None:
    page = Page()
    async with running() as hub:
        viewers = [Viewer(hub, page) for _ in range(50)]
        await until(lambda: all(viewer.events for viewer in viewers))
        before = page.times
        page.number = 1
        hub.news()
        await until(lambda: all(len(viewer.events) == 2 for viewer in viewers))
        assert page.times == before + 1
        assert all(viewer.events[1]["regions"] == {"number": "1"} for viewer in viewers)
        assert hub.viewers == 50
        for viewer in viewers:
            await viewer.leave()
        assert hub.viewers == 0


async def test_who_has_the_newest_version_gets_nothing_until_it_changes() -> None:
    page = Page()
    async with running() as hub:
        _, version = await hub.page("/", page.render)
        viewer = Viewer(hub, page, version)
        await until(lambda: hub.viewers == 1)
        page.number = 7
        hub.news()
        await until(lambda: viewer.events)
        assert viewer.events[0]["regions"] == {"number": "7"}
        await viewer.leave()


async def test_without_viewers_nothing_is_rendered() -> None:
    page = Page()
    async with running() as hub:
        await hub.page("/", page.render)
        other = Page()
        viewer = Viewer(hub, other, key="/other")
        await until(lambda: viewer.events)
        before = page.times
        other.number = 1
        hub.news()
        await until(lambda: len(viewer.events) == 2)
        assert page.times == before
        await viewer.leave()


async def test_a_page_that_cannot_be_rendered_leaves_the_others_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad, good = Page(), Page()
    async with running() as hub:
        viewers = [Viewer(hub, bad, key="/bad"), Viewer(hub, good, key="/good")]
        await until(lambda: all(viewer.events for viewer in viewers))
        bad.broken, good.number = True, 3
        hub.news()
        await until(lambda: len(viewers[1].events) == 2)
        await until(lambda: "page not rendered" in caplog.text)
        for viewer in viewers:
            await viewer.leave()


async def test_closing_ends_the_streams() -> None:
    page = Page()
    async with running() as hub:
        viewer = Viewer(hub, page)
        await until(lambda: viewer.events)
        await hub.close()
        await until(viewer.task.done)


def test_an_event_has_the_frame_where_the_regions_are_others() -> None:
    one = Rendered({"a": "1", "b": "2"}, lambda: "one")
    other = Rendered({"a": "1", "c": "2"}, lambda: "other")
    assert json.loads((event_of(None, one) or b"")[6:])["frame"] == "one"
    assert json.loads((event_of(one, other) or b"")[6:])["frame"] == "other"
    assert event_of(one, Rendered({"a": "1", "b": "2"}, lambda: "")) is None
    lines = Rendered({"a": "x\n\ndata: y", "b": "2"}, lambda: "")
    assert (event_of(one, lines) or b"").count(b"\n") == 2, "one event, whatever is in it"
