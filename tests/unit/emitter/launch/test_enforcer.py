"""What the helper of `start()` does with ranks that were told to stop."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from support.waiting import until
from tocsin.emitter.launch.enforcer import Enforcer, StopOrder
from tocsin.schemas.records.events import Data
from tocsin.schemas.records.stops.commands import StopEscalated, StopExited

SLEEPS = "print('up', flush=True); import time; time.sleep(60)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEPS


@contextmanager
def process(code: str) -> Iterator[subprocess.Popen[bytes]]:
    """A python that runs `code`, which has printed a line; it is killed at the end."""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        yield child
    finally:
        child.kill()
        child.communicate()


def order(pid: int, grace_s: float = 0.1) -> StopOrder:
    return StopOrder(
        pid=pid, rank=1, world_size=2, incarnation="i1", command_id="c1", grace_s=grace_s
    )


async def test_a_rank_that_does_not_leave_is_ended_and_seen_to_be_gone() -> None:
    said: list[Data] = []
    with process(SLEEPS) as child:
        enforcer = Enforcer("r1", said.append)
        enforcer.obey(order(child.pid))
        await asyncio.wait(enforcer.under_way, timeout=20)
        assert child.wait(20) == -15
    escalated, exited = said
    assert isinstance(escalated, StopEscalated)
    assert (escalated.how, escalated.rank) == ("SIGTERM", 1)
    assert escalated.reason == "rank 1 did not leave within 0.1 s"
    assert isinstance(exited, StopExited)
    assert (exited.how, exited.command_id) == ("SIGTERM", "c1")


async def test_a_rank_that_ignores_sigterm_is_killed() -> None:
    said: list[Data] = []
    with process(DEAF) as child:
        enforcer = Enforcer("r1", said.append)
        enforcer.obey(order(child.pid))
        await asyncio.wait(enforcer.under_way, timeout=20)
        assert child.wait(20) == -9
    hows = [each.how for each in said if isinstance(each, StopEscalated | StopExited)]
    assert hows == ["SIGTERM", "SIGKILL", "SIGKILL"]


async def test_a_rank_that_has_left_gets_no_signal() -> None:
    said: list[Data] = []
    with process(SLEEPS) as child:
        enforcer = Enforcer("r1", said.append)
        enforcer.obey(order(child.pid))
        enforcer.left(child.pid)
        await until(lambda: not enforcer.under_way)
        assert child.poll() is None
    assert said == []


async def test_a_process_that_is_gone_in_time_is_not_said_to_have_been_ended() -> None:
    said: list[Data] = []
    with process("print('up', flush=True); input()") as child:
        enforcer = Enforcer("r1", said.append)
        enforcer.obey(order(child.pid, grace_s=20))
        child.kill()
        await asyncio.wait(enforcer.under_way, timeout=20)
    enforcer.obey(order(child.pid))
    assert enforcer.under_way == []
    assert said == []


async def test_a_rank_that_saves_gets_its_grace_once_more() -> None:
    said: list[Data] = []
    with process(SLEEPS) as child:
        enforcer = Enforcer("r1", said.append)
        enforcer.saving(child.pid, on=True)
        enforcer.obey(order(child.pid, grace_s=0.3))
        await asyncio.wait(enforcer.under_way, timeout=20)
    escalated = said[0]
    assert isinstance(escalated, StopEscalated)
    waited = re.fullmatch(r"rank 1 did not leave within ([0-9.]+) s", escalated.reason)
    assert waited is not None
    assert float(waited[1]) >= 0.6


async def test_a_rank_that_has_saved_may_leave_after_it() -> None:
    said: list[Data] = []
    with process("print('up', flush=True); input()") as child:
        enforcer = Enforcer("r1", said.append)
        enforcer.saving(child.pid, on=True)
        enforcer.obey(order(child.pid, grace_s=20.0))
        (task,) = enforcer.under_way
        enforcer.saving(child.pid, on=False)
        child.kill()
        await asyncio.wait([task], timeout=20)
    assert said == []
