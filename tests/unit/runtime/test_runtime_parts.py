"""Positions, metrics, HTTP endpoints, signals and the order of the end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tocsin.bus.port import FencedMember, Partition, Record
from tocsin.runtime import metrics as names
from tocsin.runtime.http import HttpEndpoints, open_metrics
from tocsin.runtime.metrics import METRICS, Metrics
from tocsin.runtime.offsets import Positions
from tocsin.runtime.prometheus_metrics import PrometheusMetrics
from tocsin.runtime.shutdown import serve, stop_signals
from tocsin.runtime.testing import CrashPoints
from tocsin.schemas.errors import ConfigurationError, MissingExtra

ROOT = Path(__file__).resolve().parents[3]

P0 = Partition("t", 0)


def records(*offsets: int) -> list[Record]:
    return [Record(P0, offset, 0, b"run-1", b"") for offset in offsets]


def admitted(positions: Positions, *offsets: int) -> tuple[list[int], dict[Partition, int]]:
    fresh, refetch = positions.admit(records(*offsets), lambda record: True)
    return [record.offset for record in fresh], refetch


def test_records_of_partitions_that_are_not_ours_are_dropped() -> None:
    assert admitted(Positions(["t"]), 0, 1) == ([], {})


def test_a_hole_is_fetched_once_more_and_then_believed() -> None:
    positions = Positions(["t"])
    positions.start(0, {"t": 5})
    assert admitted(positions, 5, 6, 9, 10) == ([5, 6], {P0: 7})
    assert admitted(positions, 7, 8, 9) == ([7, 8, 9], {}), "they had been lost in between"
    assert admitted(positions, 12) == ([], {P0: 10})
    assert admitted(positions, 12) == ([12], {}), "the log has a hole there"


def test_a_hole_up_to_the_end_is_passed_once_it_was_fetched_again() -> None:
    positions = Positions(["t"])
    positions.start(0, {"t": 5})
    assert positions.behind({P0: 9}) == {P0: 4}
    again = (False, {P0: 5})
    assert positions.pass_holes({P0: 9}) == again, "what was lost in a rebalance is not passed"
    assert positions.pass_holes({P0: 5}) == (False, {})
    assert (positions.next(P0), positions.behind({P0: 9})) == (5, {P0: 4})
    assert positions.pass_holes({P0: 9}) == (True, {})
    assert (positions.next(P0), positions.behind({P0: 9})) == (9, {})
    assert admitted(positions, 9) == ([9], {})
    assert positions.pass_holes({Partition("t", 1): 9}) == (False, {}), "it is not ours"


def test_a_partition_that_is_another_s_is_not_waited_for_and_one_that_may_come_back_is() -> None:
    positions = Positions(["t"])
    other = Partition("t", 1)
    positions.start(0, {"t": 5})
    positions.start(1, {"t": 6})
    positions.park({0, 1})
    assert positions.behind({P0: 9, other: 9}) == {P0: 4, other: 3}
    assert positions.unpark_if_unchanged(1, {"t": 6}, unwritten=True)
    assert positions.behind({P0: 9, other: 9}) == {other: 3}


def test_what_is_before_the_place_to_start_from_is_not_read() -> None:
    positions = Positions(["t"])
    positions.start(0, {"t": None})
    assert positions.behind({P0: 9}) == {P0: 9}
    assert positions.pass_holes({P0: 9}) == (True, {}), "no fetch from offset 0"
    assert positions.to_commit(lambda _, offset: offset) == {P0: 9}
    assert admitted(positions, 9) == ([9], {})


def test_a_hole_that_was_seen_before_a_rebalance_is_fetched_again_after_it() -> None:
    positions = Positions(["t"])
    positions.start(0, {"t": 5})
    assert positions.pass_holes({P0: 9}) == (False, {P0: 5})
    positions.park([0])
    assert not positions.numbers()
    assert positions.kept() == {0}
    assert positions.unpark_if_unchanged(0, {"t": 5}, unwritten=True)
    assert positions.pass_holes({P0: 9}) == (False, {P0: 5})
    positions.start(0, {"t": 5})
    assert admitted(positions, 9) == ([], {P0: 5})


def test_offsets_that_go_back_mean_another_log() -> None:
    positions = Positions(["t"])
    positions.start(0, {"t": 5})
    with pytest.raises(FencedMember):
        admitted(positions, 4)


def test_a_partition_comes_back_without_a_restore_if_nobody_went_on() -> None:
    positions = Positions(["t"])
    positions.start(0, {"t": None})
    admitted(positions, 0, 1)
    positions.was_committed({P0: 2})
    positions.park([0])
    assert positions.numbers() == frozenset()
    assert positions.unpark_if_unchanged(0, {"t": 2}, unwritten=True)
    positions.park([0])
    assert not positions.unpark_if_unchanged(0, {"t": 3}, unwritten=True)


def test_no_lag_is_said_only_of_what_was_asked_for() -> None:
    positions = Positions(["t"])
    positions.start(0, {"t": 5})
    assert positions.caught_up({}, 100) == {}
    assert positions.caught_up({P0: 6}, 100) == {}
    found = positions.caught_up({P0: 5}, 200)[0]
    assert (found.as_of_ms, found.since_ms) == (200, 200)
    assert positions.caught_up({P0: 5}, 300)[0].since_ms == 200


def test_metrics_are_text_that_prometheus_reads() -> None:
    metrics = PrometheusMetrics()
    metrics.add(names.RECORDS, 3, service="rules")
    metrics.add(names.RECORDS, 2, service='a"b')
    metrics.set(names.PENDING, 4)
    metrics.observe(names.DELIVERY, 0.3, kind="webhook")

    found = {family.name: family for family in text_string_to_metric_families(metrics.text())}

    assert set(found) == {name.removesuffix("_total") for name in METRICS}
    assert {name: family.type for name, family in found.items()} == {
        name.removesuffix("_total"): metric.kind for name, metric in METRICS.items()
    }
    records = found["tocsin_records"]
    assert records.documentation == METRICS[names.RECORDS].help
    assert {(s.name, s.labels["service"], s.value) for s in records.samples} == {
        (names.RECORDS, "rules", 3),
        (names.RECORDS, 'a"b', 2),
    }
    assert [s.value for s in found[names.PENDING].samples] == [4]
    within = {s.labels["le"]: s.value for s in found[names.DELIVERY].samples if "le" in s.labels}
    assert (within["0.25"], within["0.5"], within["+Inf"]) == (0, 1, 1)


def test_what_is_no_metric_or_has_other_labels_is_a_bug() -> None:
    metrics = PrometheusMetrics()
    with pytest.raises(KeyError):
        metrics.add("tocsin_unheard_of_total")
    with pytest.raises(ValueError, match="label"):
        metrics.add(names.RECORDS, kind="webhook")


def test_two_services_of_one_process_have_figures_of_their_own() -> None:
    one, other = PrometheusMetrics(), PrometheusMetrics()
    one.set(names.PENDING, 4)
    assert (one.value(names.PENDING), other.value(names.PENDING)) == (4, 0)


def test_without_the_extra_nothing_is_counted_and_nothing_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert type(open_metrics()) is PrometheusMetrics
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "tocsin.runtime.prometheus_metrics")

    metrics = open_metrics()

    assert type(metrics) is Metrics
    metrics.add(names.RECORDS, service="rules")
    metrics.set(names.PENDING, 4)
    metrics.observe(names.ROUND, 0.1, service="rules")
    with pytest.raises(MissingExtra, match=r"'\.\[kafka\]'"):
        metrics.text()


async def test_metrics_that_are_not_there_say_what_to_install() -> None:
    endpoints = HttpEndpoints("127.0.0.1", 0, Metrics())
    task = asyncio.create_task(endpoints.run())
    await asyncio.wait_for(endpoints.listening.wait(), 5)
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{endpoints.port}/metrics") as response,
    ):
        status, text = response.status, await response.text()
    endpoints.stop()
    await task
    assert (status, text) == (501, f"{MissingExtra('kafka', '/metrics')}\n")


async def test_the_http_endpoints_answer() -> None:
    metrics, ready = PrometheusMetrics(), asyncio.Event()
    metrics.add(names.RECORDS, service="rules")
    endpoints = HttpEndpoints("127.0.0.1", 0, metrics, [ready.is_set])
    task = asyncio.create_task(endpoints.run())
    await asyncio.wait_for(endpoints.listening.wait(), 5)
    base = f"http://127.0.0.1:{endpoints.port}"
    async with aiohttp.ClientSession() as session:
        answers = {}
        for path in ("/healthz", "/readyz", "/metrics", "/other"):
            async with session.get(base + path) as response:
                answers[path] = response.status
        ready.set()
        async with session.get(f"{base}/readyz") as response:
            assert response.status == 200
    endpoints.stop()
    await task
    assert answers == {"/healthz": 200, "/readyz": 503, "/metrics": 200, "/other": 404}


async def test_an_address_in_use_is_said() -> None:
    first = HttpEndpoints("127.0.0.1", 0, Metrics())
    task = asyncio.create_task(first.run())
    await asyncio.wait_for(first.listening.wait(), 5)
    with pytest.raises(ConfigurationError, match="cannot listen there"):
        await HttpEndpoints("127.0.0.1", first.port, Metrics()).run()
    first.stop()
    await task


class Part:
    def __init__(self, ended: list[str], name: str, *, fails: bool = False) -> None:
        self._ended, self._name, self._fails = ended, name, fails
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        if self._fails:
            raise RuntimeError("broken")
        await self._stopping.wait()
        self._ended.append(self._name)

    def stop(self) -> None:
        self._stopping.set()


class Deaf(Part):
    def stop(self) -> None:
        pass


async def test_a_signal_ends_all_parts_in_their_order() -> None:
    ended: list[str] = []
    stopping = asyncio.Event()
    with stop_signals(stopping):
        task = asyncio.create_task(serve([Part(ended, "a"), Part(ended, "b")], stopping))
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(task, 5) == 0
    assert ended == ["a", "b"]


async def test_a_part_that_fails_ends_the_others_with_code_1() -> None:
    ended: list[str] = []
    parts = [Part(ended, "a", fails=True), Part(ended, "b")]
    assert await serve(parts, asyncio.Event()) == 1
    assert ended == ["b"]


async def test_an_address_that_is_taken_is_the_users_mistake() -> None:
    ended: list[str] = []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoints = HttpEndpoints("127.0.0.1", taken.getsockname()[1], Metrics())
        with pytest.raises(ConfigurationError, match=r"--http .*cannot listen there"):
            await serve([Part(ended, "a"), endpoints], asyncio.Event())
    assert ended == ["a"]


async def test_a_part_that_does_not_end_in_time_is_cut_off() -> None:
    ended: list[str] = []
    stopping = asyncio.Event()
    stopping.set()
    assert await serve([Deaf(ended, "a"), Part(ended, "b")], stopping, budget_s=0.02) == 1
    assert ended == ["b"]


def test_a_crash_point_fires_at_its_pass_alone() -> None:
    deaths: list[str] = []
    crash = CrashPoints("applied:2", die=lambda: deaths.append("x"))
    for name in ("polled", "applied", "polled", "applied", "applied"):
        crash(name)
    assert deaths == ["x"]
    assert crash.passed == {"polled": 2, "applied": 3}
