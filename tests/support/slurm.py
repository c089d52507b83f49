"""A Slurm of one node with two cores for the tests: munged, slurmctld and slurmd in a folder.

Needs the Debian packages slurm-wlm and munge (or their like); no systemd, no database, no root.
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
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
ReturnToService=2
KillWait=5
MinJobAge=300
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName=localhost NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def unavailable() -> str | None:
    """Why there can be no Slurm here; None if there can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"no Slurm here: {', '.join(missing)} not found" if missing else None


@dataclass(frozen=True)
class Slurm:
    """A running one."""

    environ: Mapping[str, str]

    def call(self, *command: str) -> str:
        """What a command of Slurm prints; it must succeed."""
        done = subprocess.run(
            command, env=dict(self.environ), capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.strip()

    def job(self, job_id: str) -> dict[str, str]:
        """What `scontrol show job` says."""
        words = self.call("scontrol", "show", "job", job_id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

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
def slurm_cluster(folder: Path, environ: Mapping[str, str]) -> Iterator[Slurm]:
    """Start one in an empty folder with a short path: it holds a Unix socket."""
    for part in ("state", "spool"):
        (folder / part).mkdir()
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(folder=folder, user=getpass.getuser(), ports=_free_ports(2)))
    slurm = Slurm({**os.environ, **environ, "SLURM_CONF": str(config)})
    try:
        slurm.call("mungekey", "--create", f"--keyfile={folder}/munge.key")
        files = {"key-file": "key", "socket": "sock", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={folder}/munge.{name}" for option, name in files.items()]
        # --force: munged refuses a folder below one that is closed to others, as a test's is.
        slurm.call("munged", "--force", f"--pid-file={folder}/munged.pid", *options)
        slurm.call("slurmctld")
        slurm.call("slurmd", "-N", "localhost")
        wait_until(lambda: slurm.call("sinfo", "-h", "-o", "%T") == "idle", 30, "the node is idle")
        yield slurm
    finally:
        _down(slurm, folder)


def _down(slurm: Slurm, folder: Path) -> None:
    with suppress(AssertionError, subprocess.TimeoutExpired):
        for job_id in slurm.call("squeue", "-h", "-o", "%A").split():
            # A job that queues itself again would come back for ever.
            slurm.call("scontrol", "update", f"JobId={job_id}", "Requeue=0")
            slurm.call("scancel", job_id)
        wait_until(lambda: not slurm.call("squeue", "-h", "-o", "%A"), 20, "no job is left")
    for name in ("slurmd", "slurmctld", "munged"):
        with suppress(OSError, ValueError, psutil.NoSuchProcess):
            process = psutil.Process(int((folder / f"{name}.pid").read_text()))
            process.send_signal(signal.SIGTERM)
            with suppress(psutil.TimeoutExpired):
                process.wait(10)
