"""Which run, and which of its trainings, a command reads."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from support.records.made_runs import made_run
from tocsin.console.context import read_context
from tocsin.console.run_lookup import run_named
from tocsin.schemas.errors import ConfigurationError


def test_a_training_that_a_run_does_not_have_is_refused_with_those_that_it_has(
    tmp_path: Path,
) -> None:
    made = made_run("gpt-1", steps=2)
    context = read_context(None, f"embedded:{tmp_path / 'bus.db'}", environ={})

    async def publish() -> None:
        async with context.open_bus() as bus:
            await made.publish(bus)

    asyncio.run(publish())

    assert run_named(context, None, "gpt", made.incarnation).incarnation == made.incarnation
    with pytest.raises(ConfigurationError, match=f"no training 'typo'; .*{made.incarnation}"):
        run_named(context, None, "gpt-1", "typo")
