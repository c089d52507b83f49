"""Commands, as real processes."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from support.actions.notices import notice, state
from support.records.issues import issue
from support.waiting import until
from tocsin.actions.decision.retry import Outcome
from tocsin.actions.receivers.address_guard import AddressGuard
from tocsin.actions.receivers.command.config import CommandReceiver
from tocsin.actions.receivers.command.kind import Command, CommandSender, CommandTarget
from tocsin.actions.receivers.kind import ReceiverContext
from tocsin.console.context import section_registry
from tocsin.schemas.configuration.file import check_config
from tocsin.schemas.errors import ConfigurationError

GIVEN = notice(issue(), kind="command")


def program(folder: Path, text: str) -> str:
    """A program of sh."""
    path = folder / "program"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def target(folder: Path, text: str, *arguments: str, **settings: Any) -> CommandTarget:
    run = [program(folder, text), *arguments]
    config = CommandReceiver.model_validate({"type": "command", "run": run, **settings})
    made = Command().target("page", config, context(folder, run[0]))
    assert made is not None
    return made


def context(folder: Path, *commands: str) -> ReceiverContext:
    return ReceiverContext(
        secrets={"token": SecretStr("planted-SECRET")},
        guard=AddressGuard(private=False),
        folder=folder,
        environ={"PATH": os.environ["PATH"], "AWS_SECRET_ACCESS_KEY": "planted-SECRET"},
        commands=frozenset(commands),
    )


async def test_a_program_gets_the_issue_and_little_else(tmp_path: Path) -> None:
    made = target(
        tmp_path,
        'cat > issue; echo "$@" > arguments; env > environment',
        "--team", "$(touch evil)",
        environment={"TOCSIN_TOKEN": {"secret": "token"}},
    )  # fmt: skip
    outcome = await CommandSender().send(made, GIVEN)

    assert outcome == Outcome(done="the program exited with 0")
    event = json.loads((tmp_path / "issue").read_text())
    assert event["deliveryid"] == GIVEN.delivery.delivery_id
    assert event["data"]["reason"] == "NaN in the loss at step 1"
    assert (tmp_path / "arguments").read_text() == "--team $(touch evil)\n"
    assert not (tmp_path / "evil").exists()
    lines = (tmp_path / "environment").read_text().splitlines()
    environment = dict(line.partition("=")[::2] for line in lines)
    assert environment["TOCSIN_TOKEN"] == "planted-SECRET"
    assert environment["TOCSIN_ISSUE_STATE"] == "firing"
    assert "AWS_SECRET_ACCESS_KEY" not in environment
    assert "planted-SECRET" not in repr(made)


@pytest.mark.parametrize(
    ("text", "words", "wanted"),
    [
        ("exit 3", "the program exited with 3", "pending"),
        ("exit 78", "the program exited with 78", "rejected"),
        ("kill -9 $$", "the program was ended by signal 9", "pending"),
        # One that reads nothing, and one that prints without end until its reader is gone.
        ("exec <&-; exit 0", "the program exited with 0", "delivered"),
        ("yes SECRET | head -c 5000000; echo SECRET >&2", "the program exited with 0", "delivered"),
    ],
)
async def test_what_its_end_means(
    tmp_path: Path, text: str, words: str, wanted: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    outcome = await CommandSender().send(target(tmp_path, text), GIVEN)
    assert (outcome.text(), state(outcome)) == (words, wanted)
    assert "SECRET" not in caplog.text


async def test_a_program_that_hangs_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    hanging = "trap '' TERM; sh -c 'trap \"\" TERM; echo $$ > child; sleep 60' & wait"
    outcome = await CommandSender().send(target(tmp_path, hanging, timeout="400ms"), GIVEN)

    assert outcome.text() == "the program was killed after 0.4 s"
    await until(lambda: _gone(_text(tmp_path / "child")))


async def test_the_end_of_the_service_ends_the_program(tmp_path: Path) -> None:
    made = target(tmp_path, "echo $$ > pid; exec sleep 60")
    sending = asyncio.create_task(CommandSender().send(made, GIVEN))
    await until(lambda: _text(tmp_path / "pid"))
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    await until(lambda: _gone(_text(tmp_path / "pid")))


def _text(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


def _gone(pid: str) -> bool:
    """Whether a process has ended; its parent may not have noticed."""
    try:
        return " Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


async def test_a_program_that_is_not_there_is_tried_again(tmp_path: Path) -> None:
    made = target(tmp_path, "")
    os.unlink(made.run[0])
    outcome = await CommandSender().send(made, GIVEN)
    assert outcome == Outcome(later="the program cannot be started (FileNotFoundError)")


def test_a_program_that_was_not_allowed_is_refused(tmp_path: Path) -> None:
    config = CommandReceiver.model_validate({"type": "command", "run": [sys.executable, "-c", "1"]})
    for allowed in ((), ("/bin/sh",), (os.path.basename(sys.executable),)):
        with pytest.raises(ConfigurationError, match=f"--allow-command {sys.executable}"):
            Command().target("page", config, context(tmp_path, *allowed))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("run: []", "expected a program"),
        ("run: [page]", "expected the full path of a program"),
        ("run: [../page]", "expected the full path of a program"),
        ("run: page", "expected a list"),
        ("run: [/bin/page], timeout: 1h", "at most 10m"),
        ("run: [/bin/page], environment: {LD_PRELOAD: x}", "TOCSIN_"),
        ("run: [/bin/page], environment: {PATH: x}", "TOCSIN_"),
    ],
)
def test_mistakes_are_found(settings: str, words: str) -> None:
    text = f"version: 1\nreceivers: {{a: {{type: command, {settings}}}}}"
    _, problems = check_config(text, "tocsin.yaml", section_registry())
    assert words in problems[0].message
    assert problems[0].line == 2
