"""Reads the control topic for a training without a launcher; see
`tocsin.emitter.launch.listener_child`.

Ends with its stdin. What is to be done about a rank that does not leave goes to the helper, as
orders on its stdin (`tocsin.emitter.launch.helper`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from tocsin.bus.port import Bus, BusError
from tocsin.bus.urls import open_bus
from tocsin.emitter.checkpoints.pins import Pins, how_to_pin
from tocsin.emitter.checkpoints.reader import CheckpointReader
from tocsin.emitter.launch.enforcer import StopOrder
from tocsin.emitter.send.publisher import Publisher
from tocsin.emitter.stop import datagrams
from tocsin.emitter.stop.listener import ThreadListener
from tocsin.emitter.stop.processes import Trainer
from tocsin.schemas.records.frames import RecordOrigin
from tocsin.schemas.records.stops.commands import StopRequested
from tocsin.schemas.topics import Topics


class Orders:
    """The helper's stdin, which does not block; None where there is no helper.

    Used on the listener's loop alone. What a helper that is frozen does not take waits for it.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._waiting: deque[bytes] = deque()

    def obeyed(self, trainer: Trainer, command: StopRequested) -> None:
        """A rank got a stop: let the helper end it if it does not leave."""
        order = StopOrder(
            pid=trainer.pid,
            rank=trainer.rank,
            world_size=trainer.world_size,
            incarnation=command.incarnation,
            command_id=command.command_id,
            issue_id=command.issue_id,
            grace_s=command.grace_s,
        )
        self._write(f"stop {order.model_dump_json()}")

    def left(self, pid: int) -> None:
        """Note that a rank has left its loop."""
        self._write(f"left {pid}")

    def saving(self, pid: int, on: bool) -> None:
        """Note that a rank begins to write a checkpoint, or has ended it."""
        self._write(f"{'saving' if on else 'saved'} {pid}")

    def _write(self, order: str) -> None:
        if self._descriptor is not None:
            self._waiting.append(f"{order}\n".encode())
            self._write_out(self._descriptor)

    def _write_out(self, descriptor: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                # Shorter than PIPE_BUF: all of it, or nothing.
                os.write(descriptor, self._waiting[0])
                self._waiting.popleft()
        except BlockingIOError:
            loop.add_writer(descriptor, self._write_out, descriptor)
            return
        except OSError:  # the helper has ended
            self._waiting.clear()
        loop.remove_writer(descriptor)


def main(argv: Sequence[str] | None = None) -> None:
    """Listen until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bus", required=True)
    parser.add_argument("--prefix", required=True)
    parser.add_argument("--origin", required=True, type=json.loads, metavar="JSON")
    parser.add_argument("--socket", required=True, type=Path)
    parser.add_argument("--socket-fd", required=True, type=int)
    parser.add_argument("--orders-fd", type=int)
    arguments = parser.parse_args(argv)
    for passed in (arguments.socket_fd, arguments.orders_fd):
        if passed is not None:
            os.set_inheritable(passed, False)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    topics, origin = Topics(arguments.prefix), RecordOrigin(**arguments.origin)
    publisher, orders = (
        Publisher(topics, origin.run_id, who="listener"),
        Orders(arguments.orders_fd),
    )

    reader = CheckpointReader(origin.run_id, publisher.publish)
    pins = Pins(origin.run_id, how_to_pin(os.environ), publisher.publish)

    def obeyed(trainer: Trainer, command: StopRequested) -> None:
        orders.obeyed(trainer, command)
        pins.keep(command.last_good_checkpoint, command.incarnation)

    async def publish(bus: Bus) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(reader.run(), name="checkpoints")
            await publisher.run(await bus.producer())

    listener = ThreadListener(
        lambda: open_bus(arguments.bus),
        topics,
        origin,
        publisher.publish,
        datagrams.Endpoint.inherited(arguments.socket, arguments.socket_fd),
        on_obeyed=obeyed,
        on_left=orders.left,
        on_saved=reader.receive,
        on_saving=orders.saving,
        beside=publish,
    )
    with contextlib.suppress(BusError):
        asyncio.run(_init(arguments.bus, topics))
    listener.start()
    while sys.stdin.buffer.read(4_096):
        continue
    listener.close()


async def _init(url: str, topics: Topics) -> None:
    async with open_bus(url) as bus:
        await bus.init(topics.specs())


if __name__ == "__main__":
    main()
