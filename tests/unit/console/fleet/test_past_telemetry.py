"""`tocsin bus dump`, `load`; `tocsin replay` and `diff` of telemetry find what was found live."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support.processes.archive import archive_all
from support.records.on_bus import data_of, send, work
from tocsin.bus.port import Partition, Record
from tocsin.console.__main__ import app
from tocsin.console.context import read_context
from tocsin.console.fleet.dump import DumpWriter, open_dump
from tocsin.console.fleet.past_telemetry import Span, read_span
from tocsin.runtime.worker import Worker
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.topics import Topics, issue_partition
from tocsin.store import open_store
from tocsin.stream_rules.service import build_rules_service
from tocsin.stream_rules.testing import RunBuilder

RUN = CliRunner()
TOPICS = Topics()

CONFIG = """\
version: 1
receivers:
  chat: {type: webhook, url: "https://chat.example.com/x"}
rules:
  - nonfinite: [chat]
"""


def two_runs() -> list[RunBuilder]:
    bad, good = RunBuilder("gpt-1"), RunBuilder("gpt-2")
    for run in (bad, good):
        run.started()
        run.steps(range(30), loss=1.0, gradient_norm=1.0, gradient_nonfinite=0)
    bad.steps([30], loss=math.nan, gradient_norm=1.0, gradient_nonfinite=0)
    for run in (bad, good):
        run.steps(range(31, 40), loss=1.0, gradient_norm=1.0, gradient_nonfinite=0)
        run.ended()
    return [bad, good]


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[tuple[str, str]]]:
    """A bus on which two runs were watched live, and the ids and states of their issues."""
    folder = tmp_path_factory.mktemp("lived")

    async def live() -> set[tuple[str, str]]:
        async with read_context(
            None, f"embedded:{folder / 'bus.db'}", environ={}
        ).open_bus() as bus:
            await bus.init(TOPICS.specs())
            for run in two_runs():
                await send(bus, run.records)
            worker = Worker(bus, build_rules_service(TOPICS), topics=TOPICS, group="tocsin-rules")
            assert await work(worker)
            await archive_all(bus, open_store(folder / "store"))
            found: list[object] = []
            for number in {issue_partition(run) for run in ("gpt-1", "gpt-2")}:
                found += await data_of(bus, TOPICS.issues, number)
        return {(one.issue_id, one.state) for one in found if isinstance(one, IssueFiring)}

    (folder / "tocsin.yaml").write_text(CONFIG)
    (folder / "off.yaml").write_text(CONFIG.replace("nonfinite: [chat]", "nonfinite: off"))
    return folder, asyncio.run(live())


def invoke(*words: str | Path) -> str:
    done = RUN.invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.exception
    return done.output


def test_a_replay_finds_the_issues_of_the_live_run_on_the_bus_in_the_store_and_in_a_dump(
    lived: tuple[Path, set[tuple[str, str]]], tmp_path: Path
) -> None:
    folder, live = lived
    config, bus = folder / "tocsin.yaml", f"embedded:{folder / 'bus.db'}"
    assert live, "the training went bad"
    dump = tmp_path / "gpt-1.dump.gz"
    assert "records in" in invoke("bus", "dump", dump, "--run", "gpt-1", "--bus", bus)

    on_bus = invoke("replay", "--run", "gpt-1", "--config", config, "--bus", bus, "--json")
    words = ("replay", "--run", "gpt-1", "--config", config, "--archived", "--json")
    in_store = invoke(*words, "--store", folder / "store")
    in_dump = invoke("replay", "--file", dump, "--config", config, "--json")

    for output in (on_bus, in_store, in_dump):
        facts = json.loads(output)
        assert {(one["issue_id"], one["state"]) for one in facts["issues"]} == live
        assert {one["run"] for one in facts["deliveries"]} == {"gpt-1"}
        assert (facts["records"], facts["unusable"]) == (len(two_runs()[0].records), 0)
    text = invoke("replay", "--file", dump, "--config", config)
    assert "nonfinite critical firing" in text
    assert "times real time" in text
    asyncio.run(nothing_new(bus, live))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--archived",), "--archived needs --run"),
        (("--run", "gpt-1", "--store", "x"), "--store is of use with --archived"),
        (("--run", "nobody", "--archived"), "no telemetry of run 'nobody' in this time in "),
    ],
)
def test_what_cannot_be_replayed_from_a_store_is_said(
    tmp_path: Path, words: Sequence[str], why: str
) -> None:
    bus = f"embedded:{tmp_path / 'bus.db'}"
    done = RUN.invoke(app, ["replay", "--bus", bus, *words])
    assert isinstance(done.exception, ConfigurationError)
    assert why in str(done.exception)


async def nothing_new(url: str, live: set[tuple[str, str]]) -> None:
    async with read_context(None, url, environ={}).open_bus(create=False) as bus:
        found = await data_of(bus, TOPICS.issues, issue_partition("gpt-1"))
    assert {(o.issue_id, o.state) for o in found if isinstance(o, IssueFiring)} == live


def test_two_configurations_side_by_side(
    lived: tuple[Path, set[tuple[str, str]]], tmp_path: Path
) -> None:
    folder, live = lived
    bus = f"embedded:{folder / 'bus.db'}"
    words = ("diff", folder / "tocsin.yaml", folder / "off.yaml", "--run", "gpt-1", "--bus", bus)
    facts = json.loads(invoke(*words, "--json"))
    gone = {(one["issue_id"], one["state"]) for one in facts["issues"] if one["sign"] == "-"}
    assert gone
    assert gone <= live
    assert all(one["new"] is None for one in facts["differences"])
    text = invoke(*words)
    assert "  - " in text
    assert "nonfinite" in text
    same = invoke("diff", folder / "off.yaml", folder / "off.yaml", *words[3:])
    assert same.startswith("issues that differ:\nnone\n")


def test_a_dump_is_loaded_onto_another_bus_record_for_record(
    lived: tuple[Path, set[tuple[str, str]]], tmp_path: Path
) -> None:
    folder, _ = lived
    dump, copy = tmp_path / "all.dump", f"embedded:{tmp_path / 'copy.db'}"
    words = ("bus", "dump", dump, "--topic", "telemetry", "--topic", "issues")
    invoke(*words, "--bus", f"embedded:{folder / 'bus.db'}")
    invoke("bus", "load", dump, "--bus", copy)

    async def there(url: str) -> list[tuple[object, ...]]:
        async with read_context(None, url, environ={}).open_bus(create=False) as bus:
            return [
                (r.partition, r.key, r.value, r.headers)
                async for r in read_span(bus, TOPICS, "telemetry", Span())
            ]

    loaded = asyncio.run(there(copy))
    assert loaded == asyncio.run(there(f"embedded:{folder / 'bus.db'}"))
    assert len(loaded) == sum(len(run.records) for run in two_runs())
    refused = RUN.invoke(app, ["bus", "load", str(dump), "--topic", "control", "--bus", copy])
    assert "--topic control: expected one of telemetry" in str(refused.exception)
    again = RUN.invoke(app, ["bus", "dump", str(dump), "--bus", copy])
    assert "exists already" in str(again.exception)


def test_a_dump_of_a_run_that_is_not_there_is_refused_without_a_file(
    lived: tuple[Path, set[tuple[str, str]]], tmp_path: Path
) -> None:
    bus = f"embedded:{lived[0] / 'bus.db'}"
    for typed, why in (("gtp-1", "no run 'gtp-1' on this bus"), ("gpt", "2 runs start with")):
        done = RUN.invoke(app, ["bus", "dump", str(tmp_path / "x"), "--run", typed, "--bus", bus])
        assert isinstance(done.exception, ConfigurationError)
        assert why in str(done.exception)
        assert list(tmp_path.iterdir()) == []


def test_a_run_is_dumped_that_no_rules_have_seen_or_whose_id_is_begun(tmp_path: Path) -> None:
    bus = f"embedded:{tmp_path / 'bus.db'}"

    async def fill() -> None:
        async with read_context(None, bus, environ={}).open_bus() as opened:
            await opened.init(TOPICS.specs())
            await send(opened, two_runs()[0].records)
            worker = Worker(opened, build_rules_service(TOPICS), topics=TOPICS, group="rules")
            assert await work(worker)
            unseen = RunBuilder("gpt")
            unseen.started()
            await send(opened, unseen.records)

    asyncio.run(fill())
    whole = len(two_runs()[0].records)
    for typed, count in (("gpt", 1), ("gpt-", whole), ("gpt-1", whole)):
        output = invoke("bus", "dump", tmp_path / f"{typed}.dump", "--run", typed, "--bus", bus)
        assert output.startswith(f"{count} records in ")


@pytest.mark.parametrize("name", ["a.dump", "a.dump.gz"])
def test_any_bytes_come_back_from_a_dump(tmp_path: Path, name: str) -> None:
    place = Partition("team.telemetry.v1", 3)
    records = [
        Record(place, 7, 12, b"\xff\x00k", None, (("h", b"\xfe"), ("h", b"2"))),
        Record(place, 9, 11, "größe".encode(), b"", ()),
        Record(place, 10, 13, b"", bytes(range(256)), ()),
    ]
    path = tmp_path / name
    with DumpWriter(path, taken_ms=99, url="kafka://b:9092", prefix="team") as file:
        for record in records:
            file.add("telemetry", record)
    found = open_dump(path)
    assert (found.taken_ms, found.url) == (99, "kafka://b:9092")
    assert [record for _, record in found.records()] == records


@pytest.mark.parametrize("text", ["", "no dump\n", '{"tocsin_dump":2,"taken_ms":1}\n'])
def test_what_is_no_dump_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x"
    path.write_text(text)
    with pytest.raises(ConfigurationError):
        open_dump(path)


def test_a_dump_that_was_cut_off_says_where(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text('{"tocsin_dump":1,"taken_ms":1}\n{"topic":"telem')
    with pytest.raises(ConfigurationError, match=r"x:2: expected a record of a dump"):
        list(open_dump(path).records())
