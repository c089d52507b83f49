"""A worker that is killed, and one that hangs: `tocsin heartbeat check` notifies of both."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import PIPE

import pytest

from support.processes.forking import Forked
from support.servers.receiver import Receiver, http_receiver
from support.waiting import wait_until
from tocsin.console.services.heartbeat import sender_name

pytestmark = pytest.mark.timeout(300)

SENDER = sender_name("actions")


@contextmanager
def command(folder: Path, *words: str) -> Iterator[Forked]:
    """A command of tocsin; killed at the end."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("TOCSIN_")},
        "XDG_CONFIG_HOME": str(folder / "settings"),
    }
    process = Forked(
        [sys.executable, "-m", "tocsin.console", *words],
        cwd=folder, env=environment, stderr=PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def listening_at(check: Forked) -> str:
    """The URL that the check prints when it listens."""
    assert check.stderr is not None
    for line in check.stderr:
        if found := re.search(r"http://127\.0\.0\.1:\d+/\{sender\}", line):
            return found[0]
    raise AssertionError("the check has ended")


def last(receiver: Receiver) -> tuple[str, str]:
    """The state that was posted last, and the id of its delivery."""
    if not receiver.requests:
        return "", ""
    request = receiver.requests[-1]
    notice = json.loads(request.body)
    assert notice["data"]["run_id"] == SENDER
    return notice["type"].rpartition(".")[2], request.headers["webhook-id"]


def test_a_worker_that_hangs_or_dies_is_noticed_and_that_it_is_back(tmp_path: Path) -> None:
    with http_receiver() as people, ExitStack() as stack:
        check = stack.enter_context(
            command(
                tmp_path, "heartbeat", "check", "--http", "127.0.0.1:0", "--after", "4s",
                "--expect", SENDER, "--notify", people.url,
            )
        )  # fmt: skip
        url = listening_at(check)
        text = f"version: 1\nheartbeat: {{url: '{url}', every: 2s}}\n"
        (tmp_path / "tocsin.yaml").write_text(text)

        def await_notice(state: str) -> None:
            def come() -> bool:
                assert check.poll() is None, "the check has ended"
                return last(people)[0] == state

            wait_until(come, what=f"a notice: {state}")

        await_notice("firing")
        worker = stack.enter_context(command(tmp_path, "actions"))
        await_notice("resolved")
        os.kill(worker.pid, signal.SIGSTOP)
        await_notice("firing")
        os.kill(worker.pid, signal.SIGCONT)
        await_notice("resolved")

        # The receiver is down when the worker dies.
        people.status = 503
        worker.kill()
        await_notice("firing")
        failed = len(people.requests)
        delivery = last(people)
        people.status = 204
        wait_until(lambda: len(people.requests) > failed, what="another attempt")
        assert last(people) == delivery

        stack.enter_context(command(tmp_path, "actions"))
        await_notice("resolved")
