"""The listener of a training that `start()` watches on an embedded bus, as a process of its own.

A training opens no file of the bus, since a process that has SQLite's shared memory mapped dies
when somebody truncates that file. So the control topic is read elsewhere: here, where there is no
launcher. The process takes in what the training writes, too, so `services=False` needs no other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from tocsin.emitter.launch.helper_child import Child
from tocsin.emitter.stop import datagrams
from tocsin.schemas.process.own_python import python_command
from tocsin.schemas.records.frames import RecordOrigin

MODULE: Final = "tocsin.emitter.launch.listener_process"


class ListenerChild(Child):
    """The listener, running. When this process dies it sees the end of its stdin and ends."""

    def __init__(
        self, origin: RecordOrigin, bus_url: str, prefix: str, folder: Path, orders: int | None
    ) -> None:
        """Start it. Ranks can sign on from now on; `orders` is the helper's stdin, if there is
        one.

        Raises OSError.
        """
        endpoint = datagrams.Endpoint(folder / datagrams.LAUNCHER_SOCKET)
        try:
            command = [*python_command(MODULE), "--bus", bus_url, "--prefix", prefix]
            command += ["--origin", json.dumps(origin.fields)]
            command += ["--socket", str(endpoint.path), "--socket-fd", str(endpoint.fileno())]
            passed = [endpoint.fileno()]
            if orders is not None:
                command += ["--orders-fd", str(orders)]
                passed.append(orders)
            super().__init__(command, folder / "listener.log", passed)
        finally:
            endpoint.hand_over()
