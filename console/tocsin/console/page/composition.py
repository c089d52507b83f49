"""The page's composition: what is read, what is rendered, and for which page.

Content is put together on the loop, from the state that the follower keeps there; what blocks or
computes (numbers, charts, templates) runs in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode

from tocsin.bus.port import BusError
from tocsin.console.context import CommandContext
from tocsin.console.page.actions import PageActions
from tocsin.console.page.compare_page import compare_content
from tocsin.console.page.guard import Access
from tocsin.console.page.hub import Hub, Render, Rendered
from tocsin.console.page.issue_page import issue_content, issue_shot
from tocsin.console.page.numbers import Numbers, marks_of, newest_of
from tocsin.console.page.overview import Query, overview, overview_content, row_of
from tocsin.console.page.run_charts import run_charts
from tocsin.console.page.run_page import Snapshot, run_content, snapshot
from tocsin.console.page.sparks import POINTS, Seen, Sparks, spark_svg
from tocsin.console.page.stored import StoredRuns
from tocsin.console.page.system_page import system_content
from tocsin.console.page.templating import Content, rendered
from tocsin.console.page.tensors_page import Asked, tensors_content
from tocsin.console.page.zoom_page import zoom_content
from tocsin.console.report.html import to_html
from tocsin.console.report.report import report_of
from tocsin.console.run_lookup import store_of
from tocsin.console.views.selection import named
from tocsin.console.watch.follower import Follower
from tocsin.schemas.configuration.sections import PricesConfig
from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.schemas.records.issues import IssueFiring
from tocsin.store import UnknownRun
from tocsin.store.errors import StoreError

if TYPE_CHECKING:
    from tocsin.store import Run

LIMIT: Final = 20_000
"""Runs, issues and deliveries that are kept, each."""


READY_S: Final = 10.0
"""How long the first requests wait for the bus to be read."""


class MissingPage(Exception):
    """There is nothing of that name; the text says what there is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One page: what it is called, where it is, and what makes it.

    Attributes:
        key: its path and query, which all who look at the same have in common.
        crumbs: texts and addresses of where it is; the address of the page itself is empty.
        live: whether it changes while it is open.
        query: of the overview.
    """

    title: str
    key: str
    kind: str
    render: Render
    crumbs: Sequence[tuple[str, str]] = ()
    scripts: Sequence[str] = ()
    live: bool = True
    query: Query | None = None


class Site:
    """All that the routes need. For one event loop.

    Args:
        environ: where the key is that signs what people answer.
    """

    def __init__(self, context: CommandContext, access: Access, environ: Mapping[str, str]) -> None:
        self.context = context
        self.access = access
        self.follower = Follower(context, None, limit=LIMIT, telemetry=False, control=True)
        self.hub = Hub()
        self.actions = PageActions(context, environ)
        self.ready = asyncio.Event()
        store = store_of(context)
        self.numbers = Numbers(context, store)
        self.stored = StoredRuns(context, store, lambda: self.follower.state, self.hub.news)
        self._sparks = Sparks(self.numbers, self.hub.news)

    async def run(self) -> None:
        """Keep the state and the open pages up to date, until cancelled.

        Raises:
            UnusableBus, UnknownTopic: the bus was never set up, and will not be by waiting.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self.follower.follow(), name="tocsin-page-follow")
            group.create_task(self.hub.run(), name="tocsin-page-hub")
            group.create_task(self._sparks.run(), name="tocsin-page-sparks")
            group.create_task(self.stored.run(), name="tocsin-page-stored")
            group.create_task(self._push_changes(), name="tocsin-page-tell")

    async def _push_changes(self) -> None:
        while True:
            await self.follower.changed.wait()
            self.follower.changed.clear()
            self.ready.set()
            self.hub.news()

    async def caught_up(self) -> None:
        """Return once the bus was read up to now for the first time, or cannot be."""
        with suppress(TimeoutError):
            async with asyncio.timeout(READY_S):
                await self.ready.wait()

    def issue(self, issue_id: str) -> IssueFiring:
        """The issue of that id. Raises MissingPage."""
        issues = self.follower.state.view.issues
        found = next((one for one in issues if one.issue_id == issue_id), None)
        if found is None:
            raise MissingPage(f"There is no issue {issue_id[:60]} on this bus.")
        return found

    def check_run(self, run_id: str) -> None:
        """Raises MissingPage: there is no run of that name."""
        if run_id not in self.follower.state.view.seen:
            raise MissingPage(f"There is no run {run_id[:210]} on this bus.")

    @property
    def prices(self) -> PricesConfig:
        """For estimates of what stops have saved."""
        return self.context.config.prices

    @property
    def trouble(self) -> str:
        """What is wrong with the bus; empty if nothing is."""
        return self.follower.situation(unix_ms()).trouble or ""

    # -- the pages -------------------------------------------------------------------------

    def overview(self, query: Query) -> View:
        """The list of runs."""
        return View(
            title="Runs",
            key=query.url,
            kind="overview",
            render=partial(self._overview, query),
            query=query,
        )

    async def _overview(self, query: Query) -> Rendered:
        now_ms, trouble = unix_ms(), self.trouble
        found = overview(self.follower.state, query, now_ms)
        self._sparks.want([Seen.current(run) for run in found.runs])
        rows = [
            (
                row_of(run, found, now_ms),
                self._sparks.values(Seen.current(run), run.series.buckets(POINTS)),
            )
            for run in found.runs
        ]

        def content() -> Content:
            drawn = [row.with_spark(spark_svg(values)) for row, values in rows]
            return overview_content(drawn, found, query, trouble)

        return await self._rendered(content)

    def run_page(self, run_id: str) -> View:
        """The page of a run. Raises MissingPage."""
        self.check_run(run_id)
        return View(
            title=run_id,
            key=f"/runs/{run_id}",
            kind="run-page",
            render=self._while_there(partial(self._run, run_id)),
            crumbs=[(run_id, "")],
        )

    async def _run(self, run_id: str) -> Rendered:
        prices = self.prices
        shot = self._snapshot(run_id)

        def content(numbers: Run | None) -> Content:
            goodput = None if shot.view is None else shot.view.goodput
            marks = marks_of(shot.raw_issues, shot.incarnation)
            charts = run_charts(numbers, marks, goodput)
            return run_content(shot, charts, prices, newest=newest_of(numbers))

        return await self._rendered(lambda: self.numbers.read(run_id, content))

    def issue_page(self, issue_id: str) -> View:
        """The page of an issue. Raises MissingPage."""
        issue = self.issue(issue_id)
        return View(
            title=f"{issue.rule} in {issue.run_id}",
            key=f"/issues/{issue_id}",
            kind="issue-page",
            render=self._while_there(partial(self._issue, issue_id)),
            crumbs=[(issue.run_id, f"/runs/{issue.run_id}"), (issue.rule, "")],
        )

    async def _issue(self, issue_id: str) -> Rendered:
        prices = self.prices
        shot = issue_shot(self.follower.state, issue_id, prices, trouble=self.trouble)
        if shot is None:
            raise MissingPage(f"There is no issue {issue_id} on this bus.")
        return await self._rendered(lambda: issue_content(shot))

    def compare(self, first: str, second: str) -> View:
        """Two runs side by side; which ones is asked for where a name is empty."""

        async def render() -> Rendered:
            runs = self.follower.state.ordered_runs()
            known = [run.seen.run_id for run in runs]
            asked = (_meant(first, known), _meant(second, known))
            missing = [name for name in asked if name and name not in known]
            if missing or not all(asked) or asked[0] == asked[1]:
                message = ""
                if missing:
                    message = f"There is no run {missing[0]} on this bus."
                elif all(asked):
                    message = "Choose two different runs."
                return await self._rendered(
                    lambda: compare_content(None, None, asked, known, message)
                )
            return await self._rendered(lambda: self._compared(asked, known))

        return View(
            title="Compare two runs",
            key="/compare?" + urlencode({"a": first, "b": second}),
            kind="compare-page",
            render=render,
            crumbs=[("Compare", "")],
            live=False,
        )

    def _compared(self, run_ids: tuple[str, str], known: Sequence[str]) -> Content:
        """Read in the order of the names: two viewers must not wait for each other's run."""
        low, high = sorted(run_ids)

        def with_both(one: Run, other: Run) -> Content:
            runs = {low: one, high: other}
            return compare_content(runs[run_ids[0]], runs[run_ids[1]], run_ids, known, "")

        try:
            return self.numbers.read_known(
                low,
                None,
                lambda one: self.numbers.read_known(
                    high, None, lambda other: with_both(one, other)
                ),
            )
        except (UnknownRun, StoreError, BusError) as error:
            return compare_content(None, None, run_ids, known, f"{error}")

    async def report(self, run_id: str) -> str:
        """The report of a run as one HTML file. Raises MissingPage: no numbers of it are kept."""

        def made(run: Run) -> str:
            return to_html(report_of(run, now_ms=unix_ms(), prices=self.prices))

        try:
            return await asyncio.to_thread(self.numbers.read_known, run_id, None, made)
        except (UnknownRun, StoreError, BusError) as error:
            raise MissingPage(str(error)) from error

    def zoom(self, run_id: str, name: str, rank: int | None, search: str) -> View:
        """Where people zoom into one scalar of a run. Raises MissingPage."""
        self.check_run(run_id)
        of_rank = {} if rank is None else {"rank": rank}
        query = urlencode({"name": name, **of_rank, "search": search})

        async def render() -> Rendered:
            trouble = self.trouble
            return await self._rendered(
                lambda: self.numbers.read(
                    run_id, lambda run: zoom_content(run_id, run, name, rank, search, trouble)
                )
            )

        return View(
            title=f"{name} of {run_id}",
            key=f"/runs/{run_id}/zoom?{query}",
            kind="zoom-page",
            render=render,
            crumbs=[(run_id, f"/runs/{run_id}"), ("Zoom", "")],
            scripts=["plotly.js", "zoom.js"],
            live=False,
        )

    def tensors(self, run_id: str, query: Asked) -> View:
        """The tensors of a run. Raises MissingPage."""

        def content(shot: Snapshot, run: Run | None) -> Content:
            marks = marks_of(shot.raw_issues, shot.incarnation)
            return tensors_content(run_id, run, query, marks, shot.trouble)

        return self._part_of_run(
            run_id, "Tensors", query.url(run_id), content, scripts=["tensors.js"]
        )

    def system(self, run_id: str, node: str) -> View:
        """The machines of a run. Raises MissingPage."""

        def content(shot: Snapshot, run: Run | None) -> Content:
            marks = marks_of(shot.raw_issues, shot.incarnation)
            return system_content(run_id, run, node, shot.raw_issues, marks, shot.trouble)

        query = f"?{urlencode({'node': node})}" if node else ""
        return self._part_of_run(run_id, "System", f"/runs/{run_id}/system{query}", content)

    def _part_of_run(
        self,
        run_id: str,
        title: str,
        key: str,
        content: Callable[[Snapshot, Run | None], Content],
        scripts: Sequence[str] = (),
    ) -> View:
        self.check_run(run_id)

        async def render() -> Rendered:
            shot = self._snapshot(run_id)
            return await self._rendered(
                lambda: self.numbers.read(run_id, lambda run: content(shot, run))
            )

        return View(
            title=f"{title} of {run_id}",
            key=key,
            kind=f"{title.lower()}-page",
            render=self._while_there(render),
            crumbs=[(run_id, f"/runs/{run_id}"), (title, "")],
            scripts=scripts,
        )

    def _snapshot(self, run_id: str) -> Snapshot:
        prices = self.prices
        shot = snapshot(self.follower.state, run_id, prices, now_ms=unix_ms(), trouble=self.trouble)
        if shot is None:
            raise MissingPage(f"There is no run {run_id} on this bus.")
        return shot

    def _while_there(self, render: Render) -> Render:
        """That, and once it is gone (another bus is at its place), that it is."""

        async def guarded() -> Rendered:
            try:
                return await render()
            except MissingPage as missing:
                values = {"text": str(missing), "trouble": self.trouble}
                return await self._rendered(lambda: Content("gone", values))

        return guarded

    async def _rendered(self, content: Callable[[], Content]) -> Rendered:
        csrf = self.access.csrf
        return await asyncio.to_thread(lambda: rendered(content(), csrf=csrf))


def _meant(text: str, known: Sequence[str]) -> str:
    """The one run that is meant, else what was typed."""
    found = named(text, known)
    return found[0] if len(found) == 1 else text
