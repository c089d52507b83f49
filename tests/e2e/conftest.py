"""Sites for the end-to-end tests: the embedded bus and a real Kafka with workers of its own."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.receiver import Receiver, http_receiver
from support.site import HOOK_SECRET, Site, end, until

CONFIG = """\
version: 1
bus: {{url: "{url}", prefix: {prefix}}}
secrets:
  hook: {{env: TOCSIN_TEST_HOOK}}
receivers:
  hook: {{type: webhook, url: "{hook}", sign: {{key: {{secret: hook}}}}}}
rules:
  - nonfinite: [stop, hook]
  - loss_diverged: [stop, hook]
  - exploding_gradient: [hook]
"""


@pytest.fixture(scope="session")
def receiver() -> Iterator[Receiver]:
    """Where the sites' webhooks arrive."""
    with http_receiver() as receiver:
        yield receiver


def _site(kind: str, folder: Path, url: str, prefix: str, receiver: Receiver) -> Site:
    config = folder / "tocsin.yaml"
    config.write_text(CONFIG.format(url=url, prefix=prefix, hook=receiver.url))
    environ = {
        "TOCSIN_TEST_HOOK": HOOK_SECRET,
        "XDG_CONFIG_HOME": str(folder / "config"),
        "OMP_NUM_THREADS": "1",
    }
    return Site(kind, folder, url, prefix, config, environ)


@pytest.fixture
def embedded_site(tmp_path: Path, receiver: Receiver) -> Site:
    """A folder with an embedded bus of its own."""
    return _site("embedded", tmp_path, f"embedded:{tmp_path}/bus.db", "tocsin", receiver)


@pytest.fixture(scope="session")
def kafka_site(
    kafka_url: str, receiver: Receiver, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """A Kafka with topics of its own, one rules worker and one action worker."""
    folder = tmp_path_factory.mktemp("kafka-site")
    site = _site("kafka", folder, kafka_url, f"e2e-{uuid.uuid4().hex[:8]}", receiver)
    done = site.tocsin("bus", "init", "--config", str(site.config))
    assert done.returncode == 0, done.stderr
    workers = [site.service("rules"), site.service("actions", "--allow-cidr", "127.0.0.0/8")]
    try:
        until(lambda: all(worker.poll() is None for worker in workers), what="workers start")
        yield site
    finally:
        for worker in workers:
            end(worker)


@pytest.fixture(params=["embedded", pytest.param("kafka", marks=pytest.mark.kafka)])
def site(request: pytest.FixtureRequest) -> Site:
    """Both buses, one after the other."""
    name = "embedded_site" if request.param == "embedded" else "kafka_site"
    found = request.getfixturevalue(name)
    assert isinstance(found, Site)
    return found
