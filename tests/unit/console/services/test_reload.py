"""A configuration that changes while workers run: taken over as a whole, or refused."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.buses import until
from support.records.feedback import publish_issue
from support.servers.receiver import Receiver, http_receiver
from tocsin.bus.port import Bus
from tocsin.console.context import CommandContext, read_context
from tocsin.console.services.reload import (
    ConfigurationWatch,
    TakeOver,
    refused_record,
    reload_signal,
)
from tocsin.console.services.workers import run_actions
from tocsin.console.views.bus_view import read_refused
from tocsin.console.views.status import refused_lines, status_json
from tocsin.runtime import metrics as names
from tocsin.runtime.metrics import Metrics
from tocsin.runtime.testing import FakeClock
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.configurations import ConfigurationRefused, run_worker
from tocsin.schemas.records.runs_fold import RunsView

GOOD = "version: 1\nlabels: {a: b}\n"
BAD = "version: 1\nrules:\n  - nonfinit: [stop]\nreceivers:\n  h: {type: webhook, url: s3cret}\n"


class Gauges(Metrics):
    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def set(self, name: str, value: float, **labels: str) -> None:
        assert labels == {"service": "rules"}
        self.values[name] = value


class Watched:
    """A watch over a file, and what was taken over."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "tocsin.yaml"
        self.write(GOOD)
        self.context = read_context(None, None, environ={"TOCSIN_CONFIG": str(self.file)})
        self.taken: list[CommandContext] = []
        self.gauges = Gauges()
        self.clock = FakeClock(1_000_000)
        self.why_not = ""
        self.needs_secrets = False

    def write(self, text: str) -> None:
        new = self.file.with_suffix(".new")
        new.write_text(text)
        new.replace(self.file)

    async def prepare(self, context: CommandContext) -> TakeOver:
        if self.why_not:
            raise ConfigurationError(self.why_not)
        if self.needs_secrets:
            context.all_secrets()

        async def take_over() -> None:
            self.taken.append(context)

        return take_over

    def on(self, bus: Bus) -> ConfigurationWatch:
        return ConfigurationWatch(
            self.context,
            prepare=[self.prepare],
            bus=bus,
            service="rules",
            metrics=self.gauges,
            clock=self.clock,
        )

    def labels(self) -> list[object]:
        return [dict(context.config.labels) for context in self.taken]


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


@pytest.fixture
async def bus(watched: Watched) -> AsyncIterator[Bus]:
    async with watched.context.open_bus() as opened:
        await opened.init(watched.context.topics.specs())
        yield opened


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


async def test_a_file_is_read_once_it_has_stopped_changing(watched: Watched, bus: Bus) -> None:
    watch = watched.on(bus)

    await watch.check()
    watched.write("version: 1\nlabels: {a:")
    await watch.check()
    watched.write("version: 1\nlabels: {a: c}\n")
    await watch.check()
    assert watched.labels() == []
    await watch.check()
    await watch.check()

    assert watched.labels() == [{"a": "c"}]


async def test_a_bad_file_changes_nothing_and_is_said_everywhere_once(
    watched: Watched, bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    watch = watched.on(bus)
    watched.write(BAD)
    for _ in range(4):
        await watch.check()

    assert watched.taken == []
    (said,) = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert f"{watched.file}:3:5: unknown rule 'nonfinit'" in said
    assert "the one from before stays in effect" in said
    assert "s3cret" not in said
    (refused,) = await read_refused(bus, watched.context.topics)
    assert refused.worker.startswith("rules@")
    assert refused.problems == (
        f"{watched.file}:3:5: unknown rule 'nonfinit'",
        f"{watched.file}:5:27: expected a URL like https://hooks.example.com/ml, "
        "or {secret: NAME}",
    )
    lines = list(refused_lines([refused], 1_060_000))
    assert lines[0].endswith("refused its new configuration 60 s ago; the old one is in effect:")
    assert lines[1] == f"  {refused.problems[0]}"
    assert '"refused_configurations": [\n' in status_json(RunsView(), [refused])
    assert watched.gauges.values[names.RELOAD_SUCCESSFUL] == 0

    watched.clock.advance(s=5)
    watched.write(GOOD)
    await watch.check(requested=True)

    assert watched.labels() == [{"a": "b"}]
    assert await read_refused(bus, watched.context.topics) == []
    assert watched.gauges.values == {names.RELOAD_SUCCESSFUL: 1, names.RELOAD_TIMESTAMP: 1005.0}


async def test_what_a_service_cannot_use_is_refused_as_a_whole(watched: Watched, bus: Bus) -> None:
    watched.why_not = "receiver 'x': needs the extra actions"
    watch = watched.on(bus)

    await watch.check(requested=True)
    watched.file.unlink()
    await watch.check(requested=True)

    assert watched.taken == []
    (refused,) = await read_refused(bus, watched.context.topics)
    assert refused.problems[0].startswith(f"cannot read the configuration '{watched.file}'")


async def test_a_secret_whose_file_comes_later_ends_the_refusal(watched: Watched, bus: Bus) -> None:
    watched.needs_secrets = True
    watch = watched.on(bus)
    watched.write("version: 1\nsecrets: {hook: {file: hook}, other: {file: other}}\n")
    for _ in range(4):
        await watch.check()
    (refused,) = await read_refused(bus, watched.context.topics)
    assert refused.problems == (
        "secret 'hook': file 'hook' does not exist",
        "secret 'other': file 'other' does not exist",
    )

    (watched.file.parent / "hook").write_text("s3cret")
    watched.clock.advance(s=5)
    for _ in range(4):
        await watch.check()
    (refused,) = await read_refused(bus, watched.context.topics)
    assert refused.problems == ("secret 'other': file 'other' does not exist",)
    assert refused.at_ms == 1_005_000
    (watched.file.parent / "other").touch()
    await watch.check()
    (watched.file.parent / "other").write_text("s3cret")
    for _ in range(4):
        await watch.check()

    assert len(watched.taken) == 1
    assert await read_refused(bus, watched.context.topics) == []


async def test_a_refusal_is_not_repeated_while_a_secret_stays_missing(
    watched: Watched, bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    watched.needs_secrets = True
    watch = watched.on(bus)
    watched.write("version: 1\nsecrets: {hook: {file: hook}, key: {env: NOT_SET_AT_ALL}}\n")
    for _ in range(6):
        await watch.check()

    assert sum("was refused" in record.getMessage() for record in caplog.records) == 1


async def test_a_file_that_others_can_write_to_is_not_read_again(
    watched: Watched, bus: Bus
) -> None:
    watch = watched.on(bus)
    watched.write("version: 1\nlabels: {a: c}\n")
    watched.file.chmod(0o666)

    await watch.check(requested=True)

    assert watched.taken == []
    (refused,) = await read_refused(bus, watched.context.topics)
    assert "others can write to" in refused.problems[0]

    watched.file.chmod(0o644)
    for _ in range(3):
        await watch.check()
    assert watched.labels() == [{"a": "c"}]


async def test_a_change_of_the_bus_is_said_to_need_a_restart(
    watched: Watched, bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    watched.write("version: 1\nbus: embedded:other.db\n")

    await watched.on(bus).check(requested=True)

    assert len(watched.taken) == 1
    assert "the section 'bus' has changed" in caplog.text


async def test_a_file_that_nobody_named_and_that_goes_is_refused_and_read_again(
    watched: Watched, bus: Bus
) -> None:
    watched.context = read_context(None, None, environ={})
    assert watched.context.loaded.path == watched.file
    watch = watched.on(bus)
    watched.file.unlink()
    for _ in range(3):
        await watch.check()
    assert watched.taken == []
    assert len(await read_refused(bus, watched.context.topics)) == 1
    watched.write(GOOD)
    for _ in range(3):
        await watch.check()
    assert len(watched.taken) == 1
    assert await read_refused(bus, watched.context.topics) == []


async def test_a_signal_has_it_read_now_and_the_end_takes_the_refusal_away(
    watched: Watched, bus: Bus
) -> None:
    watch = watched.on(bus)
    running = asyncio.create_task(watch.run())
    with reload_signal() as reloading:
        watched.write(BAD)
        # As while the bus is still waited for.
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0)
        reloading.hand_to(watch)

        async def refused() -> bool:
            return bool(await read_refused(bus, watched.context.topics))

        await until(refused, "the refusal on the bus")
    watch.stop()
    await running

    assert await read_refused(bus, watched.context.topics) == []


async def test_a_helper_takes_the_refusals_of_its_predecessors_away(
    watched: Watched, bus: Bus
) -> None:
    topics = watched.context.topics
    producer = await bus.producer()
    workers = [f"run gpt-1@{socket.gethostname()}", "run gpt-1@gone", "run gpt-10@x", "actions@x"]
    refused = [ConfigurationRefused(worker=name, at_ms=1, problems=("wrong",)) for name in workers]
    await producer.publish([refused_record(topics, one) for one in refused])
    await producer.close()
    watch = ConfigurationWatch(
        watched.context,
        prepare=[watched.prepare],
        bus=bus,
        service=run_worker("gpt-1"),
        run_id="gpt-1",
    )
    watch.stop()
    await watch.run()

    left = [one.worker for one in await read_refused(bus, topics)]
    assert left == ["actions@x", "run gpt-10@x"]


async def test_a_running_action_worker_sends_to_the_receivers_of_the_new_file(
    watched: Watched, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(watched.file.parent))
    with http_receiver() as old, http_receiver() as new:

        def config(name: str, receiver: Receiver) -> str:
            return (
                f"version: 1\nreceivers:\n  {name}: {{type: webhook, url: '{receiver.url}'}}\n"
                f"rules:\n  - nonfinite: [{name}]\n"
            )

        watched.write(config("old", old))
        context = watched.context.read_again()
        working = asyncio.create_task(run_actions(context))
        try:
            await publish_issue(context)
            await until(lambda: answered(bool(old.requests)), "the first notice")
            watched.write(config("new", new))
            os.kill(os.getpid(), signal.SIGHUP)
            await until(lambda: answered("configuration applied" in caplog.text), "the reload")
            await publish_issue(context, run_id="run-2")
            await until(lambda: answered(bool(new.requests)), "the second notice")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            code = await working

    assert code == 0
    assert [len(old.requests), len(new.about("run-2")), len(new.requests)] == [1, 1, 1]


async def answered(condition: bool) -> bool:
    return condition
