"""A run that no rules have read is never called watched, and no option is dropped in silence."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.processes.forking import Forked
from support.processes.site import SCRIPTS, embedded_site_in, end, kafka_site_in
from support.servers.receiver import Receiver, http_receiver
from support.waiting import wait_until

PYTHON = sys.executable
LOOP = str(SCRIPTS / "plain_loop.py")


@pytest.mark.kafka
def test_on_kafka_without_a_rules_worker(
    tmp_path: Path, kafka_url: str, receiver: Receiver
) -> None:
    site = kafka_site_in(tmp_path, kafka_url, receiver)
    finished = site.run(PYTHON, LOOP, "--nan-at", "30", options=["--drain", "1"])

    assert finished.exit_code == 0, finished
    assert (finished.summary["steps"], finished.summary["judged_steps"]) == (50, 0), finished
    assert "50 steps recorded, none checked: no rules worker has read them" in finished.stderr
    assert "0 issues" not in finished.stderr
    ignored = f"{site.config}: rules, receivers have no effect here: on Kafka"
    assert finished.stderr.count(ignored) == 1, finished

    refused = site.tocsin(
        "run", "--config", str(site.config), "--notify", "me@example.com", "--", "true"
    )
    assert refused.returncode == 2
    assert "--notify: on Kafka the action workers send the notices" in refused.stderr


@pytest.fixture
def sick_receiver() -> Iterator[Receiver]:
    """One that answers 503 until its `status` is changed."""
    with http_receiver() as receiver:
        receiver.status = 503
        yield receiver


def test_the_line_about_what_is_left_finishes_it(tmp_path: Path, sick_receiver: Receiver) -> None:
    """The command is typed as it was printed, from the folder of the run."""
    site = embedded_site_in(tmp_path, sick_receiver)
    notify = f"{sick_receiver.url}/notified?token=SECRET"
    finished = site.run(
        PYTHON,
        str(SCRIPTS / "same_nan.py"),
        options=["--drain", "3", "--notify", notify],
        run_id="left-over",
    )
    sick_receiver.requests.clear()
    sick_receiver.status = 204
    assert finished.exit_code == 79, finished
    assert "SECRET" not in finished.stderr
    printed = re.search(r"to finish, run `(tocsin actions [^`]*)`", finished.stderr)
    assert printed is not None, finished
    (kept,) = tmp_path.glob("left-over/*.json")
    assert kept.stat().st_mode & 0o077 == 0

    words = shlex.split(printed[1])
    worker = Forked(
        [PYTHON, "-m", "tocsin.console", *words[1:]],
        cwd=site.folder,
        env={**os.environ, **site.environ},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )

    def told() -> set[str]:
        return {request.path for request in sick_receiver.about("left-over")}

    try:
        wait_until(
            lambda: {"/hook", "/hook/notified?token=SECRET"} <= told(), 60, "both were notified"
        )
    finally:
        end(worker)
