"""A changed configuration that cannot be used is a line on the terminal of the run."""

from __future__ import annotations

import asyncio
from pathlib import Path

from support.processes.site import embedded_site_in
from support.servers.receiver import Receiver
from support.waiting import wait_until
from tocsin.bus.port import UnknownTopic
from tocsin.bus.urls import open_bus
from tocsin.console.views.bus_view import read_view
from tocsin.schemas.topics import Topics


def test_a_bad_change_is_a_line_on_the_terminal_and_the_run_goes_on(
    tmp_path: Path, receiver: Receiver
) -> None:
    site = embedded_site_in(tmp_path, receiver)
    over = tmp_path / "over"
    job = f"while [ ! -e {over} ]; do sleep 0.1; done"

    async def served() -> bool:
        async with open_bus(site.bus_url) as bus:
            try:
                return bool((await read_view(bus, Topics(site.prefix))).seen)
            except UnknownTopic:
                return False

    running = site.start("sh", "-c", job, run_id="gpt-1")
    wait_until(lambda: asyncio.run(served()))
    good = site.config.read_text()
    site.config.write_text(good.replace("- nonfinite:", "- nonfinit:"))
    wait_until(lambda: "new configuration refused" in running.stderr)
    over.touch()
    finished = running.finish()

    assert finished.exit_code == 0, finished
    said = [line for line in finished.stderr.splitlines() if "configuration" in line]
    assert len(said) == 1, finished
    line = good.splitlines().index("  - nonfinite: [stop, hook]") + 1
    assert said[0].startswith(
        "tocsin: new configuration refused, the old one stays in effect: "
        f"{site.config}:{line}:5: unknown rule 'nonfinit'"
    )
