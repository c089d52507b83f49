"""No secret of a receiver or of its answers is on the bus, in a log, in `why` or in `dlq list`."""

from __future__ import annotations

import asyncio
import logging
import stat
from pathlib import Path

import pytest
from pydantic import SecretStr

from support.records.issues import TOPICS, issue, issue_record
from support.servers.editable_chats import BOT, editable_chats
from support.servers.fault_server import fault_server
from tocsin.actions.composition import build_actions_service
from tocsin.actions.decision.retry import RetryPolicy
from tocsin.actions.receivers.chat import kind as chat_kind
from tocsin.actions.receivers.chat.editable import Telegram
from tocsin.actions.receivers.registry import ReceiverKinds
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import EARLIEST, Bus, Partition
from tocsin.console.context import read_viewing_context
from tocsin.console.dead_letters.letters import letter_text, letters_json
from tocsin.console.dead_letters.redrive import read_contents
from tocsin.console.views.issue_commands import print_story
from tocsin.runtime.worker import Worker, WorkerSettings
from tocsin.schemas.configuration.file import SectionRegistry, check_config
from tocsin.schemas.signing import SigningKey

CONFIG = """version: 1
secrets: {{key: {{env: A}}, header: {{env: B}}, token: {{env: C}}}}
defaults: {{rules: all}}
receivers:
  own:
    type: webhook
    url: "{own}?key=SECRET-url"
    headers: {{x-token: {{secret: header}}}}
    sign: {{key: {{secret: key}}}}
    template: {{text: '{{"a": "{{reason}}", "b": "{{labels.team}}"}}'}}
  unfilled:
    type: webhook
    url: "{own}"
    template: {{text: '{{{{ "1" if reason > 1 else "2" }}}}', language: jinja}}
  chat: {{type: chat, url: "tgram://{bot}/42"}}
  program:
    type: command
    run: [{program}]
    environment: {{TOCSIN_TOKEN: {{secret: token}}}}
rules:
  - nonfinite: [own, unfilled, chat, program]
"""


async def test_planted_secrets_and_answers_stay_where_they_are(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG)
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho $TOCSIN_TOKEN; echo $TOCSIN_TOKEN >&2; exit 78\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    async with fault_server() as server, editable_chats() as chats:
        here = Telegram(SecretStr(BOT), "42", base=chats.url)
        monkeypatch.setattr(chat_kind, "editable_chat", lambda url: here)
        chats.answers = [403]
        text = CONFIG.format(own=server.url("/status/410"), bot=BOT, program=program)
        config, problems = check_config(text, "tocsin.yaml", SectionRegistry(ReceiverKinds()))
        assert config is not None, problems
        async with EmbeddedBus(tmp_path / "bus.db") as bus:
            await bus.init(TOPICS.specs())
            service = build_actions_service(
                TOPICS,
                config,
                bus=bus,
                key=SigningKey.generate(),
                secrets={one: SecretStr(f"SECRET-{one}") for one in ("key", "header", "token")},
                embedded=True,
                allow_command=[str(program)],
                policy=RetryPolicy(first_ms=20, most_ms=40, least_ms=5),
            )
            worker = Worker(
                bus, service, topics=TOPICS, group="a", settings=WorkerSettings(checkpoint_s=0.05)
            )
            task = asyncio.create_task(worker.run())
            try:
                producer = await bus.producer()
                await producer.publish([issue_record(issue())])
                await producer.close()
                assert await worker.caught_up(10)
                assert await service.drain(10)
            finally:
                worker.stop()
                await task
            written = await everything(bus)
            found = await read_contents(bus, TOPICS)
        for as_json in (False, True):
            context = read_viewing_context(None, f"embedded:{tmp_path / 'bus.db'}")
            await print_story(context, issue().issue_id, as_json=as_json)

    assert server.seen[0].headers["x-token"] == "SECRET-header"
    for reason in ("410 Gone", "cannot fill the template", "403 Forbidden", "exited with 78"):
        assert reason in written, "its delivery is not on the bus"
    assert "SECRET" not in written
    why = capsys.readouterr().out
    letters = [letters_json(found.letters, found.ledger)]
    letters += [line for one in found.letters for line in letter_text(one, found.ledger)]
    for told in (why, "\n".join(letters)):
        assert told.count("410 Gone") >= 2, "in words and in JSON"
        assert "SECRET" not in told
    logged = [one for one in caplog.records if one.name.startswith("tocsin")]
    assert "SECRET" not in "\n".join(map(caplog.handler.format, logged))


async def everything(bus: Bus) -> str:
    """All records of the bus, keys and headers too."""
    found = []
    for spec in TOPICS.specs():
        for number in range(spec.partitions):
            partition = Partition(spec.name, number)
            reader = await bus.reader({partition: EARLIEST})
            end = (await reader.ends([partition]))[partition]
            while await reader.position(partition) < end:
                found += [repr(one) for one in await reader.poll(timeout_s=1.0)]
            await reader.close()
    return "\n".join(found)
