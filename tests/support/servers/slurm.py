"""A Slurm of one node with two cores for the tests: munged, slurmctld and slurmd in a folder.

Needs what `tools/setup-peers` installs (or its like); no systemd, no database, no root.
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from support.waiting import wait_until

_NODES = ("localhost", "second")
API = "v0.0.38"
"""What Debian's slurmrestd offers."""

PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "srun")

# Both daemons would listen on all addresses without NoInAddrAny, a requeued job would wait for two
# minutes without cred_expire, and what a dead batch shell leaves behind runs on without pgid.
CONFIG = """\
ClusterName=tests
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
ReturnToService=2
KillWait=5
MinJobAge=300
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName=localhost NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


# A heterogeneous job needs a node for each of its parts.
SECOND_NODE = "NodeName=second NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2\n"

# What lets a slurmrestd in: tokens that the controller signs.
TOKENS = """\
AuthAltTypes=auth/jwt
AuthAltParameters=jwt_key={folder}/jwt.key
"""


def unavailable(*more: str) -> str | None:
    """Why there can be no Slurm with these programs here; None if there can."""
    missing = [program for program in (*PROGRAMS, *more) if shutil.which(program) is None]
    return f"no Slurm here: {', '.join(missing)} not found" if missing else None


@dataclass(frozen=True)
class Slurm:
    """A running one."""

    environ: Mapping[str, str]
    folder: Path

    def call(self, *command: str) -> str:
        """What a command of Slurm prints; it must succeed."""
        done = subprocess.run(
            command, env=dict(self.environ), capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.strip()

    def fails(self, *command: str) -> bool:
        """Whether a command of Slurm does not succeed."""
        environ = dict(self.environ)
        done = subprocess.run(command, env=environ, capture_output=True, timeout=60)
        return done.returncode != 0

    def job(self, job_id: str) -> dict[str, str]:
        """What `scontrol show job` says."""
        words = self.call("scontrol", "show", "job", job_id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def submit(self, script: str, *options: str) -> str:
        """Submit the lines of a batch script; returns the job id. Its output is in the folder."""
        path = self.folder / f"script-{len(list(self.folder.glob('script-*')))}"
        path.write_text(f"#!/bin/bash\n{script}\n")
        where = (f"--chdir={self.folder}", f"--output={self.folder}/%j.out", "--open-mode=append")
        return self.call("sbatch", "--parsable", *where, *options, str(path))

    def said(self, job_id: str) -> str:
        """What a job has written."""
        path = self.folder / f"{job_id}.out"
        return path.read_text() if path.exists() else ""

    def stop_controller(self) -> None:
        """End slurmctld; jobs go on."""
        _end(self.folder, "slurmctld")

    def start_controller(self) -> None:
        """Start it again, with what it knew."""
        self.call("slurmctld")
        wait_until(lambda: not self.fails("scontrol", "ping"), 30, "slurmctld answers")

    def finish(self, job_id: str, timeout_s: float = 100) -> dict[str, str]:
        """Wait for a job's end."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
        wait_until(
            lambda: self.job(job_id)["JobState"] in ended, timeout_s, f"job {job_id} has ended"
        )
        return self.job(job_id)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@contextmanager
def slurm_cluster(
    folder: Path, environ: Mapping[str, str], *, tokens: bool = False, two_nodes: bool = False
) -> Iterator[Slurm]:
    """Start one in an empty folder with a short path: it holds a Unix socket.

    With `tokens` its controller takes JSON web tokens, which `scontrol token` gives. With
    `two_nodes` this machine is another node, too.
    """
    folder.chmod(0o755)  # for slurmrestd, and whoever else a test acts as
    for part in ("state", "spool"):
        (folder / part).mkdir()
    config = folder / "slurm.conf"
    text = (SECOND_NODE if two_nodes else "") + CONFIG + (TOKENS if tokens else "")
    config.write_text(text.format(folder=folder, user=getpass.getuser(), ports=_free_ports(3)))
    if tokens:
        (folder / "jwt.key").write_bytes(os.urandom(32))
        (folder / "jwt.key").chmod(0o600)
    slurm = Slurm({**os.environ, **environ, "SLURM_CONF": str(config)}, folder)
    try:
        slurm.call("mungekey", "--create", f"--keyfile={folder}/munge.key")
        files = {"key-file": "key", "socket": "sock", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={folder}/munge.{name}" for option, name in files.items()]
        # --force: munged refuses a folder below one that is closed to others, as a test's is.
        slurm.call("munged", "--force", f"--pid-file={folder}/munged.pid", *options)
        slurm.call("slurmctld")
        nodes = _NODES if two_nodes else _NODES[:1]
        for node in nodes:
            slurm.call("slurmd", "-N", node)
        idle = ["idle"] * len(nodes)
        wait_until(
            lambda: slurm.call("sinfo", "-hN", "-o", "%T").split() == idle, 30, "nodes are idle"
        )
        yield slurm
    finally:
        _down(slurm, folder)


def _down(slurm: Slurm, folder: Path) -> None:
    with suppress(AssertionError, subprocess.TimeoutExpired):
        # As array and task: `scancel` finds no task by its own id once the array's last has ended.
        for job_id in slurm.call("squeue", "-h", "-o", "%i").split():
            # A job that queues itself again would come back for ever.
            slurm.call("scontrol", "update", f"JobId={job_id}", "Requeue=0")
            slurm.call("scancel", job_id)
        wait_until(lambda: not slurm.call("squeue", "-h", "-o", "%A"), 20, "no job is left")
    for name in (*_NODES, "slurmctld", "munged"):
        _end(folder, name)
    # A slurmstepd whose slurmd is gone waits for ever, and pgid misses what a job let go of.
    wait_until(lambda: not _killed(folder), 30, "no process of the cluster is left")


def processes_of(folder: Path) -> list[psutil.Process]:
    """Processes that work in a cluster's folder, have a file of it open, or were told of it."""
    mine = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    others = (process for process in psutil.process_iter() if process.pid not in mine)
    return [process for process in others if _belongs(process, folder)]


def _belongs(process: psutil.Process, folder: Path) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        # A slurmstepd overwrites its arguments and environment, but holds the log of its slurmd.
        paths = [process.cwd(), *(each.path for each in process.open_files())]
        words = [*process.cmdline(), *process.environ().values()]
    except (psutil.Error, OSError):
        return False
    inside = any(Path(path).is_relative_to(folder) for path in paths)
    return inside or any(f"{folder}/" in word for word in words)


def _killed(folder: Path) -> list[psutil.Process]:
    """Kill what is left of a cluster; returns what there was."""
    left = processes_of(folder)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, 10)
    return left


def _end(folder: Path, name: str) -> None:
    with suppress(OSError, ValueError, psutil.NoSuchProcess):
        process = psutil.Process(int((folder / f"{name}.pid").read_text()))
        process.send_signal(signal.SIGTERM)
        with suppress(psutil.TimeoutExpired):
            process.wait(10)


@contextmanager
def slurm_rest(slurm: Slurm) -> Iterator[str]:
    """Start a slurmrestd for a cluster that takes tokens; gives its URL."""
    (port,) = _free_ports(1)
    # It refuses to run as root, or as the user of Slurm.
    user = ("-u", "nobody", "-g", "nogroup") if os.geteuid() == 0 else ()
    # Only tokens: with munge it would act as the user that it runs as.
    command = (
        "slurmrestd",
        *user,
        "-a",
        "rest_auth/jwt",
        "-s",
        "openapi/v0.0.38",
        f"127.0.0.1:{port}",
    )
    with (slurm.folder / "slurmrestd.log").open("w") as log:
        process = subprocess.Popen(
            command, env={**slurm.environ, "SLURM_JWT": "daemon"}, stdout=log, stderr=log
        )
    try:
        wait_until(lambda: _listens(port), 30, "slurmrestd listens")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
