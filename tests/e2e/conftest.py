"""Sites for the end-to-end tests: the embedded bus and a real Kafka with workers of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.processes.site import Site, embedded_site_in, end, kafka_site_in
from support.servers.receiver import Receiver, http_receiver


@pytest.fixture(scope="session")
def receiver() -> Iterator[Receiver]:
    """Where the sites' webhooks arrive."""
    with http_receiver() as receiver:
        yield receiver


@pytest.fixture
def embedded_site(tmp_path: Path, receiver: Receiver) -> Site:
    """See `embedded_site_in`."""
    return embedded_site_in(tmp_path, receiver)


@pytest.fixture(scope="session")
def bare_kafka_site(
    kafka_url: str, receiver: Receiver, tmp_path_factory: pytest.TempPathFactory
) -> Site:
    """Topics of its own on a Kafka, without workers."""
    return kafka_site_in(tmp_path_factory.mktemp("kafka-site"), kafka_url, receiver)


@pytest.fixture
def kafka_site(bare_kafka_site: Site) -> Iterator[Site]:
    """The same with one rules worker and one action worker. They end with the test: idle they would
    take a CPU second of theirs, and one of the broker, in each minute of all tests after it."""
    site = bare_kafka_site
    workers = [site.service("rules"), site.service("actions", "--allow-cidr", "127.0.0.0/8")]
    try:
        yield site
    finally:
        for worker in workers:
            end(worker)


@pytest.fixture
def site(request: pytest.FixtureRequest) -> Site:
    """One of the two: tests say which with the marks of `support.processes.site`."""
    found = request.getfixturevalue(f"{request.param}_site")
    assert isinstance(found, Site)
    return found
