"""Fixtures that several folders of tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.kafka_broker import Broker, skip_or_fail, unavailable

SHARED = ("kafka_url", "undisturbed_id")
"""Session fixtures that cost seconds: tests with one of them go to one worker of pytest-xdist."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep tests that share a broker or a long run together."""
    for item in items:
        if item.get_closest_marker("kafka") or set(SHARED) & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group("shared"))


@pytest.fixture(scope="session")
def kafka_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a real Kafka that the whole session shares: use a topic prefix of your own."""
    given = os.environ.get("TOCSIN_TEST_KAFKA")
    if given:
        yield f"kafka://{given}"
        return
    reason = unavailable()
    if reason is not None:
        skip_or_fail(reason)
    broker = Broker(tmp_path_factory.mktemp("kafka"))
    try:
        broker.start()
        yield broker.url
    finally:
        broker.stop(hard=True)


@pytest.fixture
def private_broker(tmp_path: Path) -> Iterator[Broker]:
    """A running broker that the test may freeze, stop and start again."""
    reason = unavailable()
    if reason is not None:
        skip_or_fail(reason)
    broker = Broker(tmp_path / "kafka")
    try:
        broker.start()
        yield broker
    finally:
        broker.stop(hard=True)
