"""The API's data source, over each bus: what is there, what comes, and the numbers of a run."""

from __future__ import annotations

from functools import partial

from support.buses import World
from support.records.made_runs import made_run, of_team
from tocsin.bus.port import Bus, Outgoing
from tocsin.console.api.answers import list_issues, list_refused_configurations, list_runs
from tocsin.console.api.bus_source import BusSource
from tocsin.console.api.readings import read_series
from tocsin.console.api.requests import ListIssues, ListRuns, Nothing, ReadSeries, Request
from tocsin.console.publication import publish
from tocsin.console.views.bus_view import workers_partition
from tocsin.schemas.configuration.sections import PricesConfig
from tocsin.schemas.records.configurations import ConfigurationRefused
from tocsin.schemas.records.events import Event
from tocsin.schemas.records.wire import meta_of
from tocsin.schemas.topics import Topics
from tocsin.store import Run, open_run


async def test_runs_issues_and_series_are_read_as_they_come(world: World, bus: Bus) -> None:
    topics = Topics(world.prefix)
    await of_team(made_run("run-1"), world.prefix).publish(bus)

    def opened(run_id: str, incarnation: str | None) -> Run:
        return open_run(run_id, bus=world.bus, incarnation=incarnation, topics=topics)

    source = BusSource(
        world.bus,
        topics,
        open_run=opened,
        stored=lambda: (),
        fold_stored=lambda view, runs: None,
        prices=PricesConfig(),
    )
    async with source:
        asking = partial(Request, source, now_ms=0)
        runs = await list_runs(asking(ListRuns()))
        assert [one["run_id"] for one in runs["runs"]] == ["run-1"]  # type: ignore[attr-defined]
        series = await read_series(asking(ReadSeries(name="loss", rank=1), about="run-1"))
        assert series["points"] == 20

        await of_team(made_run("run-2"), world.prefix).publish(bus)

        issues = await list_issues(asking(ListIssues()))
        assert {one["run_id"] for one in issues["issues"]} == {"run-1", "run-2"}  # type: ignore[attr-defined]

        async def refused() -> object:
            found = await list_refused_configurations(asking(Nothing()))
            return [one["worker"] for one in found["refused_configurations"]]  # type: ignore[attr-defined]

        data = ConfigurationRefused(worker="rules@node-1", at_ms=1, problems=("line 3",))
        event = Event.wrap(data, id="1", source="/workers", time_ms=1)
        place = workers_partition(topics)
        told = Outgoing(place, data.key, event.encode(), meta_of(event).headers())
        await publish(bus, [told])
        assert await refused() == ["rules@node-1"]
        await publish(bus, [Outgoing(place, data.key, None)])
        assert await refused() == []
