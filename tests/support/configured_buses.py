"""A configuration whose bus is one of those that the contract is tried on."""

from __future__ import annotations

from pathlib import Path

from support.buses import World
from tocsin.console.context import CommandContext, read_context


def context_on(world: World, folder: Path, more: str = "") -> CommandContext:
    """That of a configuration file with that bus, topics of its own, and `more` sections."""
    file = folder / "tocsin.yaml"
    bus = f'bus: {{url: "{world.url}", prefix: {world.prefix}}}'
    file.write_text(f"version: 1\n{bus}\n{more}", encoding="utf-8")
    return read_context(file, None, environ={})
