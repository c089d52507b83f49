"""A cluster by its commands: `squeue` and `scontrol` to look, `scontrol` and `scancel` to end.

Their exit status alone says little: `scancel` of a job that there is not exits with 0. What they
print is read, and never repeated: a job's owner writes some of it.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tocsin.actions.receivers.command.child import KEPT, end_group
from tocsin.actions.targets.kind import StopAsked
from tocsin.actions.targets.slurm.controller import Listing
from tocsin.actions.targets.slurm.jobs import SEVERAL, ListedJob
from tocsin.schemas.errors import ConfigurationError

PROGRAMS: Final = ("squeue", "scontrol", "scancel")
TIMEOUT_S: Final = 30.0
"""For one command: they give up a controller that is away after 9 to 18 s."""

_KEPT: Final = (*KEPT, "SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
"""Not SLURM_CLUSTERS, SQUEUE_STATES, SCANCEL_…: they would change what a command means."""

_READABLE: Final = {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}
"""Their words in English, and times in Unix seconds."""

_FIELDS: Final = (
    "JobID", "ArrayTaskID", "HetJobID", "RestartCnt", "Requeue", "StartTime", "State"
)  # fmt: skip
_WIDTH: Final = 40
_INVALID_JOB: Final = "Invalid job id"
_DENIED: Final = ("Access/permission denied", "Invalid user id")
_AWAY: Final = ("Unable to contact slurm controller", "Connection refused", "Socket timed out")


@dataclass(frozen=True, slots=True)
class Done:
    """A command that has ended; `code` is None if it was killed for its time, or never ran."""

    code: int | None
    output: str = ""
    errors: str = ""


class Commands:
    """The commands of one cluster, found on the PATH of the service."""

    def __init__(
        self, name: str, environ: Mapping[str, str], *, timeout_s: float = TIMEOUT_S
    ) -> None:
        """For the target of that name. Raises ConfigurationError: a command is not installed."""
        self._programs: dict[str, str] = {}
        for program in PROGRAMS:
            found = shutil.which(program, path=environ.get("PATH"))
            if found is None:
                raise ConfigurationError(
                    f"target {name!r}: expected {program} on the PATH of this machine (Debian: "
                    "slurm-client), or 'rest' with the URL of a slurmrestd"
                )
            self._programs[program] = found
        self._environ = {key: environ[key] for key in _KEPT if key in environ} | _READABLE
        self._timeout_s = timeout_s

    async def jobs(self, called: str) -> Listing:
        """As `squeue` lists them, with what `scontrol` says of the cluster."""
        shown = await self._run("scontrol", "show", "config")
        if shown.code != 0:
            return Listing(failure=_why("scontrol show config", shown))
        config = read_config(shown.output)
        form = ",".join(f"{field}:{_WIDTH}" for field in _FIELDS)
        listed = await self._run(
            "squeue", "--all", "--noheader", "--states=all", f"--jobs={called}", f"--Format={form}"
        )
        if listed.code != 0 and _INVALID_JOB not in listed.errors:
            return Listing(failure=_why("squeue", listed))
        try:
            jobs = read_jobs(listed.output) if listed.code == 0 else ()
        except ValueError:
            return Listing(failure="squeue's output is not a job list")
        return Listing(
            jobs=jobs,
            cluster=config.get("ClusterName", ""),
            all_shown="jobs" not in config.get("PrivateData", "jobs").lower().split(","),
        )

    async def set_requeue(self, called: str, *, allowed: bool) -> StopAsked:
        """By `scontrol update`."""
        return _answer(
            "scontrol update",
            await self._run("scontrol", "update", f"JobId={called}", f"Requeue={int(allowed)}"),
        )

    async def cancel(self, called: str) -> StopAsked:
        """By `scancel`."""
        return _answer("scancel", await self._run("scancel", called))

    async def close(self) -> None:
        """Nothing stays open."""

    async def _run(self, program: str, *arguments: str) -> Done:
        """Run it and read it. No shell sees the arguments."""
        try:
            process = await asyncio.create_subprocess_exec(
                self._programs[program],
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=self._environ,
                start_new_session=True,
            )
        except OSError:
            return Done(None)
        try:
            async with asyncio.timeout(self._timeout_s):
                output, errors = await process.communicate()
        except TimeoutError:
            return Done(None)
        finally:
            await asyncio.shield(end_group(process))
        return Done(
            process.returncode, output.decode(errors="replace"), errors.decode(errors="replace")
        )


def read_config(text: str) -> dict[str, str]:
    """The settings that `scontrol show config` prints: `KillWait = 30 sec`."""
    return dict(re.findall(r"^(\w+) *= (.*?) *$", text, re.MULTILINE))


def read_jobs(text: str) -> tuple[ListedJob, ...]:
    """The jobs that `squeue` prints in columns of one width. Raises ValueError: it is no list."""
    return tuple(_read_job(line) for line in text.splitlines() if line.strip())


def _read_job(line: str) -> ListedJob:
    cells = [line[start : start + _WIDTH].strip() for start in range(0, len(line), _WIDTH)]
    found = dict(zip(_FIELDS, cells, strict=True))
    task, het_job, started = found["ArrayTaskID"], found["HetJobID"], found["StartTime"]
    return ListedJob(
        job=int(found["JobID"]),
        restarts=int(found["RestartCnt"]),
        states=(found["State"],),
        requeue=found["Requeue"] != "0",
        array_task=None if task == "N/A" else int(task) if task.isdigit() else SEVERAL,
        het_job=int(het_job) if het_job.isdigit() else 0,
        started_s=int(started) if started.isdigit() else 0,
    )


def _answer(command: str, done: Done) -> StopAsked:
    if done.code == 0:
        return StopAsked("accepted", f"{command} exited with 0")
    denied = any(words in done.errors for words in _DENIED)
    return StopAsked("refused" if denied else "failed", _why(command, done))


def _why(command: str, done: Done) -> str:
    """Why a command failed, in words of our own."""
    if done.code is None:
        return f"{command} did not end in time, or could not be started"
    if any(words in done.errors for words in _DENIED):
        return f"{command}: not permitted; the job's owner or an operator of Slurm may do it"
    if any(words in done.errors for words in _AWAY):
        return f"{command}: the controller cannot be reached"
    return f"{command} exited with {done.code}"
