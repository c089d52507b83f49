"""Fixtures that several folders of tests share."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import yaml
from hypothesis import settings

from support.plugins import cpu_times, failed_tests, workers
from support.processes import forking
from support.processes.children import STARTUP, python_path
from support.processes.command_parameters import keep_parameters
from support.servers.kafka_broker import (
    LASTING_MS,
    Broker,
    in_memory,
    skip_or_fail,
    unavailable,
)

# An example of a property may be the first that uses a model, or run on a busy machine.
settings.register_profile("tocsin", deadline=None)
settings.load_profile("tocsin")

_BROKER = pytest.StashKey[Broker]()
_SERVER = pytest.StashKey[workers.Server]()


def pytest_configure(config: pytest.Config) -> None:
    """Signals are as in a terminal, for the processes that tests start: `nohup` and `&` of a script
    leave some ignored, which a child inherits. In `make torture` they import all that users' do.
    """
    config.pluginmanager.register(cpu_times)
    config.pluginmanager.register(failed_tests)
    # Of the runs that tests start, those archive that are to (tests/e2e/services/test_archive.py).
    os.environ["TOCSIN_STORE"] = "off"
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if os.environ.get("TOCSIN_TORTURE") == "1":
        return
    keep_parameters()
    if _starts_workers(config):
        forking.Shared()
        config.stash[_SERVER] = server = workers.Server(config.args)
        config.option.tx = [server.gateway] * len(config.option.tx)
    else:
        os.environ["PYTHONPATH"] = python_path(STARTUP)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the process whose forks the workers are."""
    if "torch._dynamo" in sys.modules:
        gc.unfreeze()  # a part of it reports what is not collected in the end
    server = config.stash.get(_SERVER, None)
    if server is not None:
        server.stop()


def _starts_workers(config: pytest.Config) -> bool:
    """Whether this is the process of pytest-xdist that runs no test itself."""
    several = getattr(config.option, "numprocesses", None)
    return bool(several) and not hasattr(config, "workerinput")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """With several workers of pytest-xdist, start one broker for all of them, before them."""
    config = session.config
    if not _starts_workers(config):
        return
    if "TOCSIN_TEST_KAFKA" in os.environ or unavailable() is not None:
        return
    folder = Path(tempfile.mkdtemp(prefix="tocsin-tests-kafka-", dir=in_memory()))
    config.stash[_BROKER] = broker = Broker(folder, session_ms=LASTING_MS)
    broker.start()
    os.environ["TOCSIN_TEST_KAFKA"] = broker.url.removeprefix("kafka://")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Stop it."""
    broker = session.config.stash.get(_BROKER, None)
    if broker is not None:
        del os.environ["TOCSIN_TEST_KAFKA"]
        broker.stop(hard=True)
        shutil.rmtree(broker.folder, ignore_errors=True)


@pytest.fixture
def parser_events(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many events of the YAML parser were taken."""
    count = [0]
    parse = yaml.parse

    def counting(text: str, Loader: object) -> object:
        for event in parse(text, Loader=Loader):  # type: ignore[arg-type]
            count[0] += 1
            yield event

    monkeypatch.setattr(yaml, "parse", counting)
    return count


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A temporary folder whose path leaves room for a socket's name, as `tmp_path` does not."""
    with tempfile.TemporaryDirectory(prefix="tocsin-t") as folder:
        yield Path(folder)


def pytest_collection_finish(session: pytest.Session) -> None:
    """In a worker the garbage collector never goes through the tests themselves: to go through all
    that is there takes half a second.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        _freeze()


_MANY = 100
"""Modules that tests have imported since, as the compiler's are."""

_frozen_modules = 0


def _freeze() -> None:
    global _frozen_modules
    gc.collect()
    gc.freeze()
    _frozen_modules = len(sys.modules)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Nor does it go through what files of tests have imported, and capture no more than it: each
    training that is captured goes through the heap.
    """
    result = yield
    if (
        "PYTEST_XDIST_WORKER" in os.environ
        and (nextitem is None or nextitem.path != item.path)
        and len(sys.modules) > _frozen_modules + _MANY
    ):
        _freeze()
    return result


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers, let each begin with its part of the end-to-end tests.

    Each worker is given an equal run of neighbours first. These tests wait for most of their time
    and are the longest: at the end of the last run they would be waited for by all. Tests of
    compiled models are neighbours: the first of a worker imports the compiler, which takes seconds.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers < 2:
        return
    slow: dict[Path, list[pytest.Item]] = {}
    others: list[pytest.Item] = []
    for item in sorted(items, key=lambda item: "compile" not in item.nodeid):
        if "e2e" in item.path.parts:
            slow.setdefault(item.path, []).append(item)
        else:
            others.append(item)
    shares: list[list[pytest.Item]] = [[] for _ in range(workers)]
    for nth, path in enumerate(sorted(slow)):
        shares[nth % workers] += slow[path]
    size = len(items) // workers
    ordered: list[pytest.Item] = []
    for share in shares:
        room = max(0, size - len(share))
        ordered += [*share, *others[:room]]
        others = others[room:]
    items[:] = [*ordered, *others]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the tests that needed another try, last of all: each is a fault of test or product."""
    tried = {report.nodeid: report for report in terminalreporter.stats.get("rerun", ())}
    if not tried:
        return
    terminalreporter.section(f"tried again: {len(tried)}; each wants to be mended")
    for nodeid, report in sorted(tried.items()):
        why = str(report.longrepr or "").strip().splitlines() or ["no reason given"]
        crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", why[-1])
        terminalreporter.line(f"{nodeid}: {crash.splitlines()[0]}")


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
    with tempfile.TemporaryDirectory(prefix="tocsin-tests-kafka-", dir=in_memory()) as folder:
        broker = Broker(Path(folder), session_ms=LASTING_MS)
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


@pytest.fixture(autouse=True)
def _heap_is_gone_through_as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test stands for a process; this one's heap is large, and so are its walks' costs, and
    tests before may have frozen what there is. To count that takes a tenth of a second, so it is
    counted only where a test freezes more."""
    count, freeze, unfreeze = gc.get_freeze_count, gc.freeze, gc.unfreeze
    before: list[int] = []
    thawed = False

    def noted() -> None:
        before[:] = before or [count()]
        freeze()

    def noted_too() -> None:
        nonlocal thawed
        thawed = True
        unfreeze()

    monkeypatch.setattr(gc, "freeze", noted)
    monkeypatch.setattr(gc, "unfreeze", noted_too)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: count() - before[0] if before else 0)
    if (models := sys.modules.get("tocsin.emitter.model.discovery")) is not None:
        models.walks.reset()
    yield
    if thawed and "PYTEST_XDIST_WORKER" in os.environ:
        freeze()
