"""`tocsin drill` against a mail server and receivers with faults."""

from __future__ import annotations

import asyncio
import json
import os
from functools import partialmethod
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support.servers.fault_server import fault_server
from support.servers.smtp_server import smtp_server
from tocsin.actions.receivers.picture import Plotter
from tocsin.console.__main__ import app
from tocsin.console.context import CommandContext, read_context
from tocsin.console.services.drill import RUN, as_text, drill
from tocsin.schemas.errors import ConfigurationError


def context(folder: Path, receivers: str, **environ: str) -> CommandContext:
    file = folder / "tocsin.yaml"
    rules = "rules:\n  - nonfinite: [stop]\n"
    file.write_text(f"version: 1\nreceivers:\n{receivers}{rules}", encoding="utf-8")
    return read_context(file, None, environ=environ)


@pytest.mark.slow  # it draws a plot
async def test_a_mail_of_a_drill_has_all_that_a_mail_can_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine may take longer to import what draws.
    monkeypatch.setattr(Plotter, "__init__", partialmethod(Plotter.__init__, timeout_s=100.0))
    async with smtp_server() as mailbox:
        server = f"smtp: {{host: 127.0.0.1, port: {mailbox.port}}}"
        given = context(tmp_path, f"  mail: {{type: email, to: [me@example.com], {server}}}\n")
        (done,) = await drill(given, [], timeout_s=120)

    assert (done.action, done.kind, done.state) == ("mail", "email", "delivered")
    (mail,) = mailbox.mails
    assert mail["Subject"] == f"[tocsin] drill in {RUN} at step 58"
    names = [part.get_filename() for part in mail.walk() if part.get_filename()]
    assert names == ["series.png", "last_values.csv"]


async def test_a_drill_is_marked_and_its_states_are_those_of_a_notice(tmp_path: Path) -> None:
    async with fault_server() as server:
        given = context(
            tmp_path,
            f'  hook: {{type: webhook, url: "{server.url("/status/200")}"}}\n'
            f'  gone: {{type: webhook, url: "{server.url("/status/404")}"}}\n'
            f'  busy: {{type: webhook, url: "{server.url("/status/503")}"}}\n',
        )
        done = await drill(given, [], timeout_s=3)
        bodies = [json.loads(request.body) for request in server.seen]

    states = [(one.action, one.state) for one in done]
    assert states == [("hook", "delivered"), ("gone", "rejected"), ("busy", "pending")]
    assert done[0].decided_by == "tocsin.yaml:3:9"
    assert done[2].attempts > 1
    for body in bodies:
        assert body["data"]["labels"] == {"drill": "true"}
        assert body["data"]["reason"].startswith("this is a drill")
    lines = as_text(done, 3).splitlines()
    assert lines[0].split() == ["hook", "webhook", "delivered", "1", "attempt", "200", "OK"]
    assert lines[2].endswith("503 Service Unavailable; not delivered within 3 s")
    assert os.listdir(tmp_path) == ["tocsin.yaml"]


async def test_a_drill_goes_to_those_that_are_named(tmp_path: Path) -> None:
    async with fault_server() as server:
        given = context(
            tmp_path,
            f'  one: {{type: webhook, url: "{server.url("/status/200?one")}"}}\n'
            f'  two: {{type: webhook, url: "{server.url("/status/200?two")}"}}\n',
        )
        (named,) = await drill(given, ["two"], timeout_s=10)
        (addressed,) = await drill(
            given, [], notify=[server.url("/status/200?three")], timeout_s=10
        )
        paths = [request.path.partition("?")[2] for request in server.seen]
    assert (named.action, named.state) == ("two", "delivered")
    assert addressed.action.startswith("notify:127.0.0.1-")
    assert paths == ["two", "three"]


async def test_on_kafka_a_drill_reaches_private_addresses_only_where_workers_do(
    tmp_path: Path,
) -> None:
    async with fault_server() as server:
        file = tmp_path / "tocsin.yaml"
        url = server.url("/status/200")
        file.write_text(
            "version: 1\nbus: kafka://kafka-1:9092\n"
            f'receivers: {{hook: {{type: webhook, url: "{url}"}}}}\n'
        )
        given = read_context(file, None, environ={})
        (refused,) = await drill(given, [], timeout_s=10)
        (allowed,) = await drill(given, [], allow_cidr=["127.0.0.0/8"], timeout_s=10)
    assert (refused.state, allowed.state) == ("rejected", "delivered")


async def test_a_receiver_that_is_not_there_is_refused_before_anything_is_sent(
    tmp_path: Path,
) -> None:
    given = context(tmp_path, '  hook: {type: webhook, url: "http://127.0.0.1:1/"}\n')
    with pytest.raises(ConfigurationError, match="no receiver 'hok' in the configuration; try"):
        await drill(given, ["hok"], timeout_s=1)
    with pytest.raises(ConfigurationError, match="no receiver: name one"):
        await drill(context(tmp_path, ""), [], timeout_s=1)


def test_the_exit_code_says_whether_all_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    async def codes() -> list[int]:
        async with fault_server() as server:
            context(
                tmp_path,
                f'  hook: {{type: webhook, url: "{server.url("/status/200")}"}}\n'
                f'  gone: {{type: webhook, url: "{server.url("/status/404")}"}}\n',
            )
            return [await asyncio.to_thread(run, *names) for names in (["hook"], ["gone"], [])]

    def run(*names: str) -> int:
        shown = CliRunner().invoke(app, ["drill", *names, "--timeout", "10", "--json"])
        assert {one["action"] for one in json.loads(shown.stdout)["deliveries"]} == (
            set(names) or {"hook", "gone"}
        )
        return shown.exit_code

    assert asyncio.run(codes()) == [0, 1, 1]
