"""The launcher's stop handler: stops the job on this node, and goes further if it does not end.

    agents told not to restart -> ranks told -> exit point, or the signals of `signal_ladder`

A job without a training gets SIGTERM at once: nobody there can hear. That the job is gone is looked
at, never assumed. Where the trained process has gone and CMD goes on to another training (a script
that runs python twice), that one is another incarnation, and the stop does not touch it.

Without a launcher (`start()`), `enforcer` sends the signals.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypedDict

from tocsin.emitter.launch import signal_ladder
from tocsin.emitter.launch.job import Job
from tocsin.emitter.launch.signal_ladder import Signalled
from tocsin.emitter.launch.summary import StopFigures
from tocsin.emitter.stop import datagrams
from tocsin.emitter.stop.processes import Members, Trainer
from tocsin.emitter.stop.verification import (
    NO_STOP,
    CommandVerdict,
    Facts,
    SignedCommand,
    read_keys,
    refusal,
)
from tocsin.schemas.exit_codes import SIGNALLED, STOPPED
from tocsin.schemas.records.events import Data, clip
from tocsin.schemas.records.runs import Role
from tocsin.schemas.records.stops.commands import (
    StopAcknowledged,
    StopEscalated,
    StopExited,
    StopRequested,
)

How = Literal["edge", "itself"] | Signalled

AGENTS_S: Final = 2.0
"""How long agents are waited for to answer that they restart nothing, seconds."""


class _Who(TypedDict):
    run_id: str
    incarnation: str
    role: Role
    world_size: int


@dataclass(slots=True)
class _Stop:
    """One stop, of one incarnation; `joined` are further commands that ask for the same."""

    command: StopRequested
    joined: list[StopRequested] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    how: How | None = None
    step: int | None = None
    exit_code: int | None = None
    """None until it is confirmed."""


class Stopper:
    """Does what the listener decides. On the launcher's loop."""

    def __init__(
        self,
        run_id: str,
        members: Members,
        job: Callable[[], Job | None],
        answer: Callable[[Data], None],
        *,
        key_paths: list[Path],
        stops_off: bool,
        keeping: Callable[[], frozenset[int]] = frozenset,
    ) -> None:
        """`answer` puts an event on telemetry; `keeping` gives pids that no signal may reach."""
        self._run_id = run_id
        self._members = members
        self._job = job
        self._answer = answer
        self._key_paths = key_paths
        self._stops_off = stops_off
        self._keeping = keeping
        # By incarnation, in the order in which they came: a job can be stopped once per training.
        self._stops: dict[str, _Stop] = {}

    @property
    def command(self) -> StopRequested | None:
        """The newest that is, or was, obeyed."""
        return None if self._newest is None else self._newest.command

    @property
    def stopped(self) -> bool:
        """Whether a stop was acknowledged, or the ranks have left before an update: it decides the
        exit code.
        """
        return bool(self._stops) or self.left_early

    @property
    def left_early(self) -> bool:
        """Whether ranks of the newest training have left before an update."""
        return bool(self._members.left_early(self._members.incarnation))

    @property
    def awaits_command(self) -> bool:
        """Whether they have, and the command that confirms it has not come yet."""
        return self.left_early and self._members.incarnation not in self._stops

    @property
    def figures(self) -> StopFigures | None:
        """How the newest one went, for the summary; None without a stop."""
        stop = self._newest
        if stop is None:
            steps = self._early_steps()
            return StopFigures(how="edge", step=max(steps)) if steps else None
        return StopFigures(
            command=stop.command, how=stop.how, step=stop.step, exit_code=stop.exit_code
        )

    @property
    def _newest(self) -> _Stop | None:
        return next(reversed(self._stops.values()), None)

    def facts(self) -> Facts:
        """What the decision is taken by, now."""
        members, job = self._members, self._job()
        over = ""
        if job is None:
            over = "the job has not started yet"
        elif self.awaits_command:
            over = ""  # it is stopped; what comes now confirms it
        elif job.returncode is not None:
            over = "the job had ended"
        elif members.training_over():
            over = "that training had ended by itself"
        return Facts(
            self._run_id,
            members.incarnation,
            read_keys(self._key_paths),
            stops_off=NO_STOP if self._stops_off else "",
            over=over,
        )

    def obey(self, signed: SignedCommand, command: StopRequested) -> None:
        """Stop: the one effect of this incarnation."""
        stop = self._stops[command.incarnation] = _Stop(command)
        self._answer(self._acknowledged(command))
        job = self._job()
        if job is not None and job.exit_code is not None:
            self._confirm(stop, job.exit_code)
            return
        stop.task = asyncio.create_task(self._carry_out(signed, stop), name="stop")

    def may_leave(self, stops_off: str) -> bool:
        """Whether a rank may leave before an update now, where the configuration asks for it;
        `stops_off`: why no stop of the bus takes effect. Changes nothing: other ranks may refuse.
        """
        facts = self.facts()
        return not (stops_off or facts.stops_off or facts.over) and bool(len(facts.keys))

    async def forbid_restarts(self) -> None:
        """Have torchrun start nothing again on this node; waits for it up to `AGENTS_S`."""
        agents = self._members.unblocked()
        for agent in agents:
            datagrams.send(agent.socket, {"kind": "no_restart"})
        if agents:
            members = self._members
            await members.until(lambda: not members.unblocked(), timeout_s=AGENTS_S)

    def join(self, command: StopRequested) -> None:
        """Another good command while a stop of this incarnation is under way or done."""
        self._answer(self._acknowledged(command))
        stop = self._stops[command.incarnation]
        stop.joined.append(command)
        if stop.exit_code is not None:
            self._answer(self._exited(stop, command))

    def missed(self, command: StopRequested, why: str) -> None:
        """A good command, but what it was to stop has ended. If the job itself is gone that is an
        answer; its training alone is not."""
        job = self._job()
        if job is not None and job.exit_code is not None:
            late = _Stop(command, how="itself", exit_code=job.exit_code)
            self._answer(self._exited(late, command))
            return
        self.refuse(CommandVerdict("other_incarnation", why, command, command.command_id))

    def refuse(self, verdict: CommandVerdict) -> None:
        """Answer with a refusal to the command that it names."""
        if verdict.why is not None:
            self._answer(refusal(verdict, self._who()))

    def job_gone(self) -> None:
        """The job was seen to be gone, all of it: confirm the stops under way."""
        job = self._job()
        if job is None or job.exit_code is None:
            return
        for stop in self._stops.values():
            if stop.exit_code is None:
                self._confirm(stop, job.exit_code)

    async def close(self) -> None:
        """End the escalations, if one runs still."""
        tasks = [stop.task for stop in self._stops.values() if stop.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _carry_out(self, signed: SignedCommand, stop: _Stop) -> None:
        job, command = self._job(), stop.command
        if job is None:
            return
        await self.forbid_restarts()
        living = self._members.living(command.incarnation)
        notified = [each for each in living if datagrams.send(each.socket, signed.message())]
        leaving = _LeavingJob(self, job, stop, living, notified)
        # Who was not notified may have gone on to another training: that one is not touched.
        grace_s = command.grace_s if notified else 0.0
        await signal_ladder.end(leaving, grace_s=grace_s, term_grace_s=command.grace_s)
        if leaving.trains_on() and stop.exit_code is None:
            self._confirm(stop, STOPPED)

    def _confirm(self, stop: _Stop, exit_code: int) -> None:
        trainers = self._members.ranks(stop.command.incarnation)
        steps = [t.left_at for t in trainers if t.left_at is not None]
        stop.step = max(steps, default=None)
        if stop.how is None:
            stop.how = "edge" if steps else "itself"
        elif stop.how == "SIGKILL" and exit_code == SIGNALLED + signal.SIGTERM:
            # It was on its way out when the second signal came.
            stop.how = "SIGTERM"
        stop.exit_code = exit_code
        for command in (stop.command, *stop.joined):
            self._answer(self._exited(stop, command))

    def _early_steps(self) -> list[int]:
        trainers = self._members.left_early(self._members.incarnation)
        return [t.left_at for t in trainers if t.left_at is not None]

    def _acknowledged(self, command: StopRequested) -> StopAcknowledged:
        return StopAcknowledged(
            **self._who(), command_id=command.command_id, issue_id=command.issue_id
        )

    def _exited(self, stop: _Stop, command: StopRequested) -> StopExited:
        who = self._who()
        who["incarnation"] = stop.command.incarnation
        return StopExited(
            **who,
            command_id=command.command_id,
            issue_id=command.issue_id,
            how=stop.how or "itself",
            exit_code=STOPPED if stop.exit_code is None else stop.exit_code,
        )

    def _who(self) -> _Who:
        return {
            "run_id": self._run_id,
            "incarnation": self._members.incarnation,
            "role": "launcher",
            "world_size": self._members.world_size,
        }


@dataclass(frozen=True, slots=True)
class _LeavingJob:
    """The launcher's job, which was told to leave: see `signal_ladder.Leaving`."""

    stopper: Stopper
    job: Job
    stop: _Stop
    living: Sequence[Trainer]
    notified: Sequence[Trainer]
    name: str = "the job"

    def late(self, waited_s: float) -> str:
        if self.notified:
            left = {trainer.pid for trainer in self.notified if trainer.left_at is not None}
            late = [str(trainer.rank) for trainer in self.notified if trainer.pid not in left]
            if late:
                return f"rank {', '.join(late)} did not leave within {waited_s:g} s"
            return f"the job did not end within {waited_s:g} s, though its ranks left"
        if self.living:
            unheard = ", ".join(str(trainer.rank) for trainer in self.living)
            return f"rank {unheard} could not be reached: its socket accepted no data"
        if self.stopper._members.ranks(self.stop.command.incarnation):
            return "no rank of that training is there any more, but the job is"
        return "no training of this job has registered"

    def gone(self) -> bool:
        return self.job.returncode is not None or self.trains_on()

    def trains_on(self) -> bool:
        """Whether CMD went on to another training. The process of this one may live: a script can
        catch the stop, and train again in the same one."""
        members, incarnation = self.stopper._members, self.stop.command.incarnation
        return members.incarnation != incarnation and not members.living(incarnation)

    def saving(self) -> bool:
        living = self.stopper._members.living(self.stop.command.incarnation)
        return any(trainer.saving for trainer in living)

    def send(self, number: signal.Signals, how: Signalled, reason: str) -> bool:
        stopper, command = self.stopper, self.stop.command
        # Before the signal: the end of the job may be seen as soon as it is sent.
        self.stop.how = how
        stopper._answer(
            StopEscalated(
                **stopper._who(),
                command_id=command.command_id,
                issue_id=command.issue_id,
                how=how,
                reason=clip(reason, 500),
            )
        )
        self.job.terminate(number, keeping=stopper._keeping())
        return True
