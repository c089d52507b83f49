"""`start()` without a launcher: its helper and its ear for stops, in real processes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from support.records.stops import StopSigner, outgoing
from support.trainings.captured import said
from support.waiting import wait_until
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import BusError
from tocsin.emitter.stop.verification import SignedCommand
from tocsin.schemas.records.runs import RunStarted
from tocsin.schemas.records.stops.commands import StopAcknowledged, StopEscalated, StopExited

HANGS = """
import time
from tocsin.emitter import start
run = start("r1")
run.log({"loss": 1.0})
print("stepped", flush=True)
time.sleep(90)
"""

SWALLOWS = """
import time
from tocsin.emitter import StopTraining, start
run = start("r1")
try:
    while True:
        run.log({"loss": 1.0})
        time.sleep(0.01)
except StopTraining:
    print("left", flush=True)
input()
"""


@contextmanager
def training(folder: Path, signer: StopSigner, code: str) -> Iterator[subprocess.Popen[str]]:
    """A script with `start()` on a bus in `folder`, which trusts `signer`; killed at the end."""
    signer.key.write(folder / "keys" / "actions.key")
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TOCSIN_")}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=folder,
        env={
            **kept,
            "TOCSIN_BUS": f"embedded:{folder / 'bus.db'}",
            "TOCSIN_STOP_KEYS": str(folder / "keys"),
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def begun(folder: Path) -> str:
    """The incarnation, once the helper and the rank are there."""
    found: list[RunStarted] = []

    def look() -> bool:
        with suppress(BusError):  # the bus is not made yet
            found.extend(said(folder).of(RunStarted))
        return bool(found)

    wait_until(look, timeout_s=30)
    return found[0].incarnation


def publish(folder: Path, signed: SignedCommand) -> None:
    async def go() -> None:
        async with EmbeddedBus(folder / "bus.db") as bus:
            producer = await bus.producer()
            await producer.publish([outgoing(signed, "r1")])
            await producer.close()

    asyncio.run(go())


def test_the_helper_ends_a_training_that_does_not_leave(tmp_path: Path) -> None:
    signer = StopSigner()
    with training(tmp_path, signer, HANGS) as process:
        command = signer.command("r1", begun(tmp_path), grace_s=0.5)
        publish(tmp_path, signer.sign(command))
        assert process.wait(60) == -15
    wait_until(lambda: said(tmp_path).of(StopExited), timeout_s=30)
    found = said(tmp_path)
    assert found.of(StopAcknowledged)
    assert [each.how for each in found.of(StopEscalated)] == ["SIGTERM"]
    assert [(each.how, each.command_id) for each in found.of(StopExited)] == [
        ("SIGTERM", command.command_id)
    ]


def test_a_script_that_has_left_its_loop_goes_on(tmp_path: Path) -> None:
    signer = StopSigner()
    with training(tmp_path, signer, SWALLOWS) as process:
        publish(tmp_path, signer.sign(signer.command("r1", begun(tmp_path), grace_s=0.5)))
        assert process.stdout is not None
        assert process.stdout.readline() == "left\n"
        with suppress(subprocess.TimeoutExpired):
            process.wait(2.0)
        assert process.poll() is None
        process.communicate("\n", timeout=60)
        assert process.returncode == 0
    assert said(tmp_path).of(StopEscalated) == []
