"""Whoever harms the files of an embedded bus under a running training does not harm the training.

SQLite maps `-shm` into each process that has the bus open, and the system kills a process by SIGBUS
when what it has mapped is truncated.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from support.waiting import wait_until

STEPS = 160

TRAINING = f"""
import os, sys, time
from tocsin.emitter import start
run = start("r1", services=False)
weight = 1.0
for step in range({STEPS}):
    weight = weight * 1.01 - step % 7
    run.log({{"loss": abs(weight)}})
    if step % 20 == 0:
        print("step", step, flush=True)
        sys.stdin.readline()
    time.sleep(0.002)
opened = [os.path.realpath(f"/proc/self/fd/{{each}}") for each in os.listdir("/proc/self/fd")]
with open("/proc/self/maps") as maps:
    mapped = maps.read()
print("opened", [path for path in opened if "bus.db" in path and "bus.db.spool" not in path])
print("mapped", "bus.db" in mapped)
print("END", weight, flush=True)
sys.exit(3)
"""


def weight() -> float:
    """What the training comes to."""
    value = 1.0
    for step in range(STEPS):
        value = value * 1.01 - step % 7
    return value


def truncate(suffix: str) -> Callable[[Path], None]:
    def harm(path: Path) -> None:
        os.truncate(path.with_name(path.name + suffix), 0)

    return harm


def overwrite(suffix: str) -> Callable[[Path], None]:
    def harm(path: Path) -> None:
        with path.with_name(path.name + suffix).open("r+b") as file:
            file.write(b"harm" * 20_000)

    return harm


def remove(path: Path) -> None:
    path.unlink()


def remove_all(path: Path) -> None:
    # The processes of the run go on making files in it meanwhile.
    while path.parent.exists():
        shutil.rmtree(path.parent, ignore_errors=True)


ATTACKS: tuple[Callable[[Path], None], ...] = (
    truncate("-shm"), truncate("-wal"), overwrite("-wal"), truncate(""), overwrite(""),
    remove, remove_all,
)  # fmt: skip
"""In this order, one for each twentieth step."""


@pytest.mark.parametrize("launcher", [False, True], ids=["start", "run"])
def test_a_training_ends_as_it_would_have(tmp_path: Path, launcher: bool) -> None:
    path = tmp_path / ".tocsin" / "bus.db"
    command = [sys.executable, "-c", TRAINING]
    if launcher:
        command = [sys.executable, "-m", "tocsin.console", "run", "--run-id", "r1", "--", *command]
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("TOCSIN_", "PYTHONPATH"))}
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**environ, "XDG_CONFIG_HOME": str(tmp_path / "config")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        for attack in (*ATTACKS, None):
            assert process.stdout.readline().startswith("step ")
            if attack is not None:
                if attack is ATTACKS[0]:
                    wait_until(path.with_name("bus.db-shm").exists, timeout_s=60)
                # The processes that had the bus open may be gone, and its log with them.
                with suppress(FileNotFoundError):
                    attack(path)
            process.stdin.write("\n")
            process.stdin.flush()
        said = process.stdout.read()
        process.wait(60)
    finally:
        process.kill()
        process.communicate()
    assert re.findall("^END (.*)$", said, re.MULTILINE) == [str(weight())], said
    assert "opened []" in said
    assert "mapped False" in said
    assert process.returncode == 3
