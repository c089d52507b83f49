"""Debian's real Alertmanager (package prometheus-alertmanager), one process for one test."""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

PROGRAM = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")

CONFIG_FILE = "alertmanager.yml"
"""In the folder of one; `/-/reload` reads it again."""

needs_alertmanager = pytest.mark.skipif(
    PROGRAM is None,
    reason="there is no Alertmanager on this machine (Debian: prometheus-alertmanager)",
)


@asynccontextmanager
async def running_alertmanager(config: str, folder: Path) -> AsyncIterator[str]:
    """Its URL, while it runs with this configuration."""
    assert PROGRAM is not None
    file = folder / CONFIG_FILE
    file.write_text(config)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        PROGRAM,
        f"--config.file={file}",
        f"--storage.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            if await _ready(url):
                break
            assert process.returncode is None, "it ended"
            await asyncio.sleep(0.05)
        yield url
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _ready(url: str) -> bool:
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/-/ready") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False
