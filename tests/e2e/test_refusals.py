"""A stop for another incarnation never touches the job that runs."""

from __future__ import annotations

import asyncio
import sys
import time

from support.site import SCRIPTS, Site, on_embedded, until
from tocsin.bus.port import Outgoing, Partition
from tocsin.bus.urls import open_bus
from tocsin.console.views.bus_view import read_all
from tocsin.schemas.ids import incarnation_id, new_id
from tocsin.schemas.records.events import Event
from tocsin.schemas.records.stops import StopRefused, StopRequested
from tocsin.schemas.records.wire import decode, meta_of, read_meta, signature_headers
from tocsin.schemas.signing import keys_folder, own_key
from tocsin.schemas.topics import Topics, issue_partition, telemetry_partition


@on_embedded
def test_a_command_for_an_earlier_incarnation_is_refused(site: Site) -> None:
    run_id = f"refusal-{site.kind}"
    running = site.start(
        sys.executable, "-u", str(SCRIPTS / "long_loop.py"), "--steps", "400",
        run_id=run_id, environ={"SLURM_JOB_ID": "2"},
    )  # fmt: skip
    until(lambda: "step 0" in running.stdout, timeout_s=60, what="the job trains")
    asyncio.run(_command(site, run_id, incarnation_id(run_id, "slurm-1", 0, 0)))
    finished = running.finish()
    assert finished.exit_code == 0, finished
    assert "done after 400 steps" in finished.stdout
    assert finished.summary["stop"] is None, finished
    assert asyncio.run(_refusals(site, run_id)) == ["other_incarnation"]


async def _command(site: Site, run_id: str, incarnation: str) -> None:
    """Send what an action worker would: signed by the trusted key, right in all but one."""
    now_ms = time.time_ns() // 1_000_000
    command = StopRequested(
        command_id=new_id(),
        run_id=run_id,
        incarnation=incarnation,
        reason="late",
        requested_ms=now_ms,
        not_after_ms=now_ms + 600_000,
        nonce=new_id(),
    )
    event = Event.of(command, id=command.command_id, source="/actions", time_ms=now_ms)
    key, value = command.key.encode(), event.encode()
    signing = own_key(keys_folder(site.environ))
    headers = (*meta_of(event).headers(), *signature_headers(signing.sign(key, value)))
    topic = Partition(Topics(site.prefix).control, issue_partition(run_id))
    async with open_bus(site.bus_url) as bus:
        producer = await bus.producer()
        await producer.publish([Outgoing(topic, key, value, headers)])
        await producer.close()


async def _refusals(site: Site, run_id: str) -> list[str]:
    topic = Partition(Topics(site.prefix).telemetry, telemetry_partition(run_id))
    found: list[str] = []
    async with open_bus(site.bus_url) as bus:
        async for record in read_all(bus, [topic]):
            if record.key == run_id.encode() and record.value is not None:
                said = decode(read_meta(record.headers), record.value)
                if isinstance(said, Event) and isinstance(said.data, StopRefused):
                    found.append(said.data.why)
    return found
