"""The launcher's hands: carries a stop out on this node, and goes further if the job does not go.

    agents told not to restart -> ranks told -> edge, within grace -> SIGTERM, grace -> SIGKILL

A job without a training gets SIGTERM at once: nobody there can hear. That the job is gone is looked
at, never assumed. Where the trained process has gone and CMD goes on to another training (a script
that runs python twice), that one is another incarnation, and the stop does not touch it.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal, TypedDict

from tocsin.emitter import link
from tocsin.emitter.edges import STOPPED
from tocsin.emitter.job import Job
from tocsin.emitter.members import Members
from tocsin.emitter.stop_command import Facts, SignedCommand, Verdict, read_keys
from tocsin.emitter.summary import StopFigures
from tocsin.schemas.control import (
    StopAcknowledged,
    StopEscalated,
    StopExited,
    StopRefused,
    StopRequested,
)
from tocsin.schemas.events import Data, clip
from tocsin.schemas.runs import Role

How = Literal["edge", "SIGTERM", "SIGKILL", "itself"]

AGENTS_S: Final = 2.0
"""How long agents are waited for to answer that they restart nothing, seconds."""

KILLED_S: Final = 10.0
"""How long the end of a job is waited for after SIGKILL, seconds."""

_LOOK_S: Final = 0.02


class _Who(TypedDict):
    run_id: str
    incarnation: str
    role: Role
    world_size: int


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
        self.command: StopRequested | None = None
        self.how: How | None = None
        self.step: int | None = None
        self.exit_code: int | None = None
        self._run_id = run_id
        self._members = members
        self._job = job
        self._answer = answer
        self._key_paths = key_paths
        self._stops_off = stops_off
        self._keeping = keeping
        self._commands: list[StopRequested] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop was acknowledged: it decides the exit code."""
        return self.command is not None

    @property
    def figures(self) -> StopFigures | None:
        """How it went, for the summary; None without a stop."""
        if self.command is None:
            return None
        return StopFigures(
            command=self.command, how=self.how, step=self.step, exit_code=self.exit_code
        )

    def facts(self) -> Facts:
        """See Hands."""
        members, job = self._members, self._job()
        over = ""
        if job is None or job.returncode is not None:
            over = "the job had ended"
        elif members.training_over():
            over = "that training had ended by itself"
        return Facts(
            self._run_id,
            members.incarnation,
            read_keys(self._key_paths),
            stops_off=self._stops_off,
            over=over,
        )

    def obey(self, signed: SignedCommand, command: StopRequested) -> None:
        """See Hands."""
        self.command, self.how = command, None
        self._commands = [command]
        self._answer(self._acknowledged(command))
        self._task = asyncio.create_task(self._carry_out(signed, command), name="stop")

    def join(self, command: StopRequested) -> None:
        """See Hands."""
        self._answer(self._acknowledged(command))
        if self._commands:
            self._commands.append(command)
        else:
            self._answer(self._exited(command, self.how or "itself", self.exit_code or STOPPED))

    def missed(self, command: StopRequested, why: str) -> None:
        """See Hands. If the job itself is gone that is an answer; its training alone is not."""
        job = self._job()
        if job is not None and job.exit_code is not None:
            self._answer(self._exited(command, "itself", job.exit_code))
            return
        self.refuse(Verdict("other_incarnation", why, command, command.command_id))

    def refuse(self, verdict: Verdict) -> None:
        """See Hands."""
        why, command = verdict.why, verdict.command
        if why is None:
            return
        self._answer(
            StopRefused(
                **self._who(),
                command_id=verdict.command_id,
                issue_id=None if command is None else command.issue_id,
                why=why,
                reason=clip(verdict.text, 500),
            )
        )

    def job_gone(self) -> None:
        """The job was seen to be gone, all of it: confirm the stop under way."""
        job = self._job()
        if not self._commands or job is None or job.exit_code is None:
            return
        self._confirm(job.exit_code)

    async def close(self) -> None:
        """End the escalation, if one runs still."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _carry_out(self, signed: SignedCommand, command: StopRequested) -> None:
        job = self._job()
        if job is None:
            return
        await self._block_restarts()
        told = [
            trainer
            for trainer in self._members.living(command.incarnation)
            if link.send(trainer.socket, signed.message())
        ]
        if told:
            if await self._gone(job, command, command.grace_s):
                return
            left = {trainer.pid for trainer in told if trainer.left_at is not None}
            late = [str(trainer.rank) for trainer in told if trainer.pid not in left]
            reason = (
                f"rank {', '.join(late)} did not leave within {command.grace_s:g} s"
                if late
                else f"the job did not end within {command.grace_s:g} s, though its ranks left"
            )
        else:
            reason = "no training said hello from this job"
        steps: tuple[tuple[signal.Signals, How, float], ...] = (
            (signal.SIGTERM, "SIGTERM", command.grace_s),
            (signal.SIGKILL, "SIGKILL", KILLED_S),
        )
        for number, how, patience_s in steps:
            self.how = how
            self._answer(
                StopEscalated(
                    **self._who(),
                    command_id=command.command_id,
                    issue_id=command.issue_id,
                    how="SIGTERM" if number is signal.SIGTERM else "SIGKILL",
                    reason=clip(reason, 500),
                )
            )
            job.terminate(number, keeping=self._keeping())
            if await self._gone(job, command, patience_s):
                return
            reason = f"the job did not end within {patience_s:g} s of {number.name}"

    async def _block_restarts(self) -> None:
        agents = self._members.unblocked()
        for agent in agents:
            link.send(agent.socket, {"kind": "no_restart"})
        if agents:
            members = self._members
            await members.until(lambda: not members.unblocked(), timeout_s=AGENTS_S)

    async def _gone(self, job: Job, command: StopRequested, timeout_s: float) -> bool:
        """Whether CMD ended, or went on to another training, within that time."""
        until = time.monotonic() + timeout_s
        while True:
            if job.returncode is not None:
                return True
            members = self._members
            if members.incarnation != command.incarnation and not members.processes_live(
                command.incarnation
            ):
                self._confirm(STOPPED)
                return True
            if time.monotonic() > until:
                return False
            await asyncio.sleep(_LOOK_S)

    def _confirm(self, exit_code: int) -> None:
        command = self._commands[0]
        trainers = [t for t in self._members.trainers if t.incarnation == command.incarnation]
        steps = [t.left_at for t in trainers if t.left_at is not None]
        self.step = max(steps, default=None)
        if self.how is None:
            self.how = "edge" if steps else "itself"
        self.exit_code = exit_code
        for each in self._commands:
            self._answer(self._exited(each, self.how, exit_code, command.incarnation))
        self._commands = []

    def _acknowledged(self, command: StopRequested) -> StopAcknowledged:
        return StopAcknowledged(
            **self._who(), command_id=command.command_id, issue_id=command.issue_id
        )

    def _exited(
        self, command: StopRequested, how: How, exit_code: int, incarnation: str | None = None
    ) -> StopExited:
        who = self._who()
        if incarnation is not None:
            who["incarnation"] = incarnation
        return StopExited(
            **who,
            command_id=command.command_id,
            issue_id=command.issue_id,
            how=how,
            exit_code=exit_code,
        )

    def _who(self) -> _Who:
        return {
            "run_id": self._run_id,
            "incarnation": self._members.incarnation,
            "role": "launcher",
            "world_size": self._members.world_size,
        }
