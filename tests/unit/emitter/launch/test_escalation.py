"""The launcher's hands, on a job that only pretends: reasons, and one state per stop."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from support.records.stops import StopSigner
from support.waiting import until
from tocsin.emitter.launch.escalation import Stopper
from tocsin.emitter.launch.job import Job
from tocsin.emitter.stop import datagrams
from tocsin.emitter.stop.processes import KEPT, Members
from tocsin.emitter.stop.verification import CommandVerdict
from tocsin.schemas.records.events import Data
from tocsin.schemas.records.stops.commands import (
    StopAcknowledged,
    StopEscalated,
    StopExited,
    StopExpired,
)
from tocsin.schemas.records.stops.progress import answered


@dataclass
class Pretended:
    """A job that ends when it is told to by a signal."""

    returncode: int | None = None
    signals: list[signal.Signals] = field(default_factory=list)

    @property
    def exit_code(self) -> int | None:
        return self.returncode

    def terminate(self, number: signal.Signals, *, keeping: frozenset[int]) -> None:
        self.signals.append(number)
        self.returncode = 128 + number


class Place:
    """A stopper, its members and what it said."""

    def __init__(self, folder: Path) -> None:
        self.said: list[Data] = []
        self.job: Pretended | None = Pretended()
        self.members = Members("i0", lambda pid: pid == os.getpid())
        self.signer = StopSigner()
        self.socket = datagrams.Endpoint(folder / "rank.sock")
        self.stopper = Stopper(
            "r1", self.members, lambda: cast(Job, self.job), self.said.append,
            key_paths=[], stops_off=False,
        )  # fmt: skip

    def hello(self, incarnation: str, *, socket: str | None = None) -> None:
        self.members.receive(
            {
                "kind": "hello", "role": "trainer", "pid": os.getpid(), "rank": 0,
                "world_size": 1, "incarnation": incarnation,
                "socket": socket or str(self.socket.path),
            }
        )  # fmt: skip

    def tell(self, kind: str, incarnation: str, step: int = 7) -> None:
        self.members.receive(
            {"kind": kind, "pid": os.getpid(), "incarnation": incarnation, "step": step}
        )

    def obey(self, incarnation: str, grace_s: float = 20.0) -> str:
        command = self.signer.command("r1", incarnation, grace_s=grace_s)
        self.stopper.obey(self.signer.sign(command), command)
        return command.command_id

    def exits(self) -> list[tuple[str, str, int]]:
        found = [each for each in self.said if isinstance(each, StopExited)]
        return [(each.command_id, each.how, each.exit_code) for each in found]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.socket.close()


async def test_a_script_that_catches_the_stop_and_trains_again_is_left_alone(place: Place) -> None:
    place.hello("i1")
    command_id = place.obey("i1", grace_s=0.5)
    place.tell("left", "i1")
    place.tell("finished", "i1")
    place.hello("i2")
    await until(place.exits)
    assert place.exits() == [(command_id, "edge", 79)]
    assert place.job is not None
    assert place.job.signals == []
    await place.stopper.close()


async def test_a_stop_of_a_second_training_leaves_the_first_ones_state(place: Place) -> None:
    place.hello("i1")
    first = place.obey("i1")
    place.hello("i2")  # before the first training's process has said that it left
    second = place.obey("i2")
    joined = place.signer.command("r1", "i2")
    place.stopper.join(joined)
    place.tell("left", "i1", step=3)
    place.tell("finished", "i1", step=3)
    await until(place.exits)
    assert place.exits() == [(first, "edge", 79)]
    place.tell("left", "i2", step=5)
    assert place.job is not None
    place.job.returncode = 79
    place.stopper.job_gone()
    assert place.exits()[1:] == [(second, "edge", 79), (joined.command_id, "edge", 79)]
    figures = place.stopper.figures
    assert figures is not None
    assert figures.command is not None
    assert (figures.command.command_id, figures.step) == (second, 5)
    late = place.signer.command("r1", "i1")
    place.stopper.join(late)
    assert place.exits()[-1] == (late.command_id, "edge", 79)
    acknowledged = [each for each in place.said if isinstance(each, StopAcknowledged)]
    assert len(acknowledged) == 4
    await place.stopper.close()


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (None, "no training of this job has registered"),
        ("/nowhere.sock", "rank 0 could not be reached: its socket accepted no data"),
    ],
)
async def test_why_nobody_was_told(place: Place, hello: str | None, reason: str) -> None:
    if hello is not None:
        place.hello("i0", socket=hello)
    place.obey("i0")
    await until(lambda: any(isinstance(each, StopEscalated) for each in place.said))
    (escalated,) = [each for each in place.said if isinstance(each, StopEscalated)]
    assert escalated.reason == reason
    await place.stopper.close()


async def test_what_is_over_is_said_as_it_is(place: Place) -> None:
    assert place.stopper.facts().over == ""
    place.hello("i1")
    place.tell("finished", "i1")
    assert place.stopper.facts().over == "that training had ended by itself"
    assert place.job is not None
    place.job.returncode = 0
    assert place.stopper.facts().over == "the job had ended"
    place.job = None
    assert place.stopper.facts().over == "the job has not started yet"


async def test_thousands_of_trainings_cost_no_more_than_the_last_ones(place: Place) -> None:
    members = place.members
    for number in range(3 * KEPT):
        place.hello(f"i{number}")
        place.tell("finished", f"i{number}", step=9)
    await asyncio.sleep(0)
    assert members.steps() == 10 * 3 * KEPT
    assert len(members.incarnations()) == 3 * KEPT
    assert sum(bool(members.ranks(f"i{number}")) for number in range(3 * KEPT)) == KEPT + 1


async def test_what_ends_a_job_is_what_its_exit_code_says(place: Place) -> None:
    """SIGTERM takes effect when SIGKILL is sent already."""

    class Late(Pretended):
        def terminate(self, number: signal.Signals, *, keeping: frozenset[int]) -> None:
            self.signals.append(number)
            if number is signal.SIGKILL:
                self.returncode = 128 + signal.SIGTERM

    place.job = Late()
    place.hello("i1")
    command_id = place.obey("i1", grace_s=0.01)
    await until(lambda: place.job is not None and place.job.returncode is not None)
    place.stopper.job_gone()
    assert place.job.signals == [signal.SIGTERM, signal.SIGKILL]
    assert place.exits() == [(command_id, "SIGTERM", 143)]
    assert place.stopper.figures is not None
    assert place.stopper.figures.how == "SIGTERM"
    await place.stopper.close()


async def test_a_command_that_was_read_too_late_is_told_as_expired(place: Place) -> None:
    command = place.signer.command("r1", "i1")
    place.stopper.refuse(CommandVerdict("expired", "too late", command, command.command_id))
    (said,) = place.said
    assert isinstance(said, StopExpired)
    assert (said.command_id, said.reason) == (command.command_id, "too late")
    assert said.not_after_ms == command.not_after_ms
    view = answered(None, said, 5)
    assert view is not None
    assert (view.state, view.reason) == ("expired", "too late")
    acknowledged = StopAcknowledged(
        run_id="r1", incarnation="i1", role="launcher", command_id="another"
    )
    assert answered(view, acknowledged, 6) != view
    assert answered(answered(None, acknowledged, 5), said, 6) == answered(None, acknowledged, 5)


def saving(place: Place, *, on: bool) -> None:
    place.members.receive({"kind": "saving", "pid": os.getpid(), "on": on})


async def test_a_job_that_is_saving_gets_its_grace_once_more(place: Place) -> None:
    place.hello("i1")
    saving(place, on=True)
    place.obey("i1", grace_s=0.1)
    assert place.job is not None
    job = place.job
    await until(lambda: job.signals)
    (escalated,) = [one for one in place.said if isinstance(one, StopEscalated)]
    assert job.signals == [signal.SIGTERM]
    # It names the time that was waited in truth, which on a busy machine is longer.
    reason = re.fullmatch(r"rank 0 did not leave within (\d+(\.\d)?) s", escalated.reason)
    assert reason is not None, escalated.reason
    assert float(reason[1]) >= 0.2
    await place.stopper.close()


def test_ranks_may_leave_before_an_update_only_if_a_stop_would_be_obeyed(
    place: Place, tmp_path: Path
) -> None:
    place.hello("i1")
    assert not place.stopper.may_leave(""), "no key is trusted"
    place.signer.key.write(tmp_path / "keys" / "actions.key")

    def stopper(*, stops_off: bool = False) -> Stopper:
        return Stopper(
            "r1", place.members, lambda: cast(Job, place.job), place.said.append,
            key_paths=[tmp_path / "keys"], stops_off=stops_off,
        )  # fmt: skip

    assert stopper().may_leave("")
    assert not stopper().may_leave("all stops are switched off by ana")
    assert not stopper(stops_off=True).may_leave("")
    assert place.job is not None
    place.job.returncode = 0
    assert not stopper().may_leave("")


async def test_torchrun_keeps_its_restarts_until_the_ranks_leave(
    place: Place, tmp_path: Path
) -> None:
    """A rank that asks may have to stay, if another one may not leave."""
    place.signer.key.write(tmp_path / "keys" / "actions.key")
    stopper = Stopper(
        "r1", place.members, lambda: cast(Job, place.job), place.said.append,
        key_paths=[tmp_path / "keys"], stops_off=False,
    )  # fmt: skip
    agent = datagrams.Endpoint(tmp_path / "agent.sock")
    hello = {"kind": "hello", "role": "agent", "pid": os.getpid(), "socket": str(agent.path)}
    place.members.receive(cast(datagrams.Message, hello))
    place.hello("i1")
    assert stopper.may_leave("")
    assert agent.drain() == []
    forbidden = asyncio.create_task(stopper.forbid_restarts())
    await until(agent.drain, what="the agent is told")
    assert not forbidden.done()
    place.members.receive({"kind": "restart_blocked", "pid": os.getpid()})
    await forbidden
    agent.close()


async def test_a_command_confirms_that_the_ranks_have_left_before_an_update(place: Place) -> None:
    place.hello("i1")
    place.members.receive(
        {
            "kind": "left", "pid": os.getpid(), "incarnation": "i1", "step": 6,
            "before_update": True,
        }
    )  # fmt: skip
    assert place.job is not None
    place.job.returncode = 1  # as torchrun has it
    place.stopper.job_gone()
    assert place.stopper.stopped
    assert place.stopper.awaits_command
    figures = place.stopper.figures
    assert figures is not None
    assert (figures.command, figures.how, figures.step) == (None, "edge", 6)
    assert place.stopper.facts().over == ""
    command_id = place.obey("i1")
    assert place.exits() == [(command_id, "edge", 1)]
    assert not place.stopper.awaits_command
    assert place.job.signals == []
