"""A plugin of pytest: how much processor time each test takes, its ended children included.

Wall times say how busy the machine is; these say what a test costs, on any machine. With several
workers the totals of the folders and the costliest tests are listed at the end of the run.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Iterable
from pathlib import PurePosixPath

import pytest

from support.processes import forking

UNIT_S = 2.0
"""A test in `tests/unit` that takes longer bears the marker `slow`."""

BUSY = 3.0
"""So many times longer may the same work take on a machine whose cores are shared."""

_IMPORTS = 100
"""A test in which so many modules are imported first has paid for those after it."""

_NAME = "cpu_s"
_COSTLIEST = 25


def _now() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime + forking.spent.seconds


def _measured(item: pytest.Item) -> Generator[None, object, object]:
    before = _now()
    try:
        return (yield)
    finally:
        item.user_properties.append((_NAME, round(_now() - before, 3)))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Fixtures are paid for by the test that needs them first."""
    return (yield from _measured(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """The test itself; it fails if it takes long and does not say that it is slow."""
    modules, began = len(sys.modules), time.monotonic()
    result = yield from _measured(item)
    took = float(str(item.user_properties[-1][1]))
    # More than can be: a child of an earlier test was waited for in this one.
    possible = (time.monotonic() - began) * (os.cpu_count() or 1)
    if (
        UNIT_S * BUSY < took <= possible
        and "unit" in item.path.parts
        and not any(item.get_closest_marker(name) for name in ("slow", "torture"))
        and len(sys.modules) - modules < _IMPORTS
    ):
        pytest.fail(
            f"a unit test that takes {took:.1f} CPU seconds: let it do less (a shorter training, "
            f"a shared fixture), or mark it `slow`",
            pytrace=False,
        )
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """What ends now was a child of this test, or of its fixtures."""
    return (yield from _measured(item))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The totals by folder and the costliest tests, for a run of several workers."""
    if not getattr(terminalreporter.config.option, "numprocesses", None):
        return
    spent: dict[str, float] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                cost = _sum(report.user_properties)
                spent[report.nodeid] = max(cost, spent.get(report.nodeid, 0.0))
    folders: dict[str, float] = defaultdict(float)
    for nodeid, cost in spent.items():
        parts = PurePosixPath(nodeid.partition("::")[0]).parts
        folders["/".join(parts[: 3 if {"unit", "e2e"} & {*parts} else 2])] += cost
    terminalreporter.section(f"{sum(spent.values()):.0f} CPU seconds")
    for folder, cost in _by_cost(folders):
        terminalreporter.line(f"{cost:7.1f} {folder}")
    terminalreporter.line("")
    for nodeid, cost in _by_cost(spent)[:_COSTLIEST]:
        if cost > UNIT_S:
            terminalreporter.line(f"{cost:7.1f} {nodeid}")


def _sum(properties: Iterable[tuple[str, object]]) -> float:
    return sum(float(str(value)) for name, value in properties if name == _NAME)


def _by_cost(costs: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(costs.items(), key=lambda item: -item[1])
