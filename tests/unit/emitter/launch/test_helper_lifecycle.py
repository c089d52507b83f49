"""Helper processes at their ends: let go while they restart, and beside forked workers."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from support.waiting import SOON_S, until
from tocsin.emitter.launch.helper import HelperProcess
from tocsin.emitter.launch.helper_child import HelperChild
from tocsin.emitter.launch.listener_process import Orders
from tocsin.emitter.process.process_group import Reaper

UNTIL_EOF = "import sys; sys.stdin.read()"


async def test_a_helper_that_is_let_go_between_two_starts_is_not_started_again(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    reaper = Reaper()
    command = ["sh", "-c", "echo up; exit 1"]
    helper = HelperProcess(command, dict(os.environ), reaper, log, lambda line: None)
    helper.start()
    keeping = asyncio.create_task(helper.keep())
    async with asyncio.timeout(20):
        while helper.restarts == 0:
            reaper.reap()
            await asyncio.sleep(0.01)
    await helper.close(1.0)
    async with asyncio.timeout(20):
        await keeping
    assert log.read_text() == "up\n"


async def test_orders_for_a_helper_that_reads_nothing_wait_for_it(tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    command = f"until [ -e {go_on} ]; do sleep 0.05; done; cat"
    helper = HelperChild(["sh", "-c", command], tmp_path / "log")
    try:
        assert helper.orders is not None
        with suppress(BlockingIOError):
            while True:
                os.write(helper.orders, 4_095 * b"." + b"\n")
        orders = Orders(helper.orders)
        orders.left(4711)
        orders.left(4712)
        go_on.touch()
        await until(lambda: "left 4711\nleft 4712\n" in (tmp_path / "log").read_text())
    finally:
        helper.close(SOON_S)


def test_a_forked_worker_that_outlives_the_training_does_not_keep_the_helper(
    tmp_path: Path,
) -> None:
    helper = HelperChild([sys.executable, "-c", UNTIL_EOF], tmp_path / "log")
    worker = os.fork()
    if worker == 0:
        signal.pause()
        os._exit(0)
    try:
        helper._close_stdin()  # what the kernel does when the training is killed
        assert helper._popen.wait(20) == 0
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
