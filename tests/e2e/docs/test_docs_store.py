"""The Python of docs/how-to/store.md is one story: it runs beside a run that was archived."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from support.records.made_runs import made_run
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.schemas.topics import Topics
from tocsin.store import open_store
from tocsin.store.archive.once import archive_run

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "store.md"
RUN = "gpt-2026-11-21"


def test_what_the_page_shows_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".tocsin").mkdir(mode=0o700)

    async def fill() -> None:
        async with EmbeddedBus(tmp_path / ".tocsin" / "bus.db") as bus:
            await made_run(RUN).publish(bus, stop=40)
            await archive_run(bus, open_store(), RUN, topics=Topics(), now_ms=lambda: 1)
            await made_run(RUN).publish(bus, start=40)

    asyncio.run(fill())
    text = PAGE.read_text().replace(r"\.bias$", r"\.0\.bias$")
    story = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(story) >= 6

    exec(compile("\n".join(story), str(PAGE), "exec"), {})

    shown = capsys.readouterr().out
    assert f"{RUN}  14 {{'team': 'vision'}}" in shown
    assert "critical nonfinite 3" in shown
    assert "completed 1 7" in shown
    assert "0.05" in shown
