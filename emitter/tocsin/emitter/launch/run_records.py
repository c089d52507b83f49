"""The records of a launcher about its run: that it began, lives, has ended."""

from __future__ import annotations

import asyncio
import os
import platform
from pathlib import Path
from typing import Literal

from tocsin.emitter.launch.options import LaunchOptions
from tocsin.emitter.process import run_facts
from tocsin.emitter.process.environment import HEARTBEAT_S
from tocsin.emitter.process.scheduler import scheduler_of
from tocsin.emitter.send.publisher import Publisher
from tocsin.emitter.stop.processes import Members
from tocsin.schemas.records.events import clip
from tocsin.schemas.records.runs import (
    Heartbeat,
    Outcome,
    RunEnded,
    RunStarted,
)

StopState = Literal["trusted_key", "no_trusted_key", "off"]


def run_started(
    options: LaunchOptions,
    incarnation: str,
    restart_count: int,
    stop: StopState,
    *,
    after_stop: str = "",
) -> RunStarted:
    """The job is about to start."""
    folder = Path.cwd()
    return RunStarted(
        run_id=options.run_id,
        incarnation=incarnation,
        role="launcher",
        job_id=options.job_id,
        scheduler=scheduler_of(os.environ),
        restart_count=restart_count,
        labels=dict(options.labels),
        node=platform.node(),
        pid=os.getpid(),
        command=run_facts.command_line(options.command),
        folder=clip(str(folder)),
        git_commit=run_facts.git_commit(folder),
        versions=run_facts.versions({}),
        heartbeat_s=HEARTBEAT_S,
        after_stop=clip(after_stop),
        stop=stop,
        ends_by_ms=run_facts.ends_by_ms(os.environ),
    )


async def keep_beating(options: LaunchOptions, members: Members, publisher: Publisher) -> None:
    """Say every `HEARTBEAT_S` that the launcher lives, and so does its job."""
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        publisher.publish(
            Heartbeat(
                run_id=options.run_id,
                incarnation=members.incarnation,
                world_size=members.world_size,
                role="launcher",
            )
        )


def run_ended(
    options: LaunchOptions,
    incarnation: str,
    *,
    outcome: Outcome,
    exit_code: int,
    reason: str,
    steps: int,
    world_size: int,
    duration_s: float,
) -> RunEnded:
    """The job has ended, or could not be started; `reason` is why, in the latter case."""
    return RunEnded(
        run_id=options.run_id,
        incarnation=incarnation,
        world_size=world_size,
        role="launcher",
        outcome=outcome,
        exit_code=exit_code,
        reason=clip(reason),
        last_step=steps - 1 if steps else None,
        duration_s=duration_s,
    )
