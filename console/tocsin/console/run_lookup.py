"""Looks up the runs of a command: on its bus, and in its store."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from tocsin.bus.port import Bus, MissingBus, UnknownTopic
from tocsin.console.views.bus_view import read_runs
from tocsin.console.views.selection import ambiguous, named
from tocsin.schemas.errors import ConfigurationError

if TYPE_CHECKING:
    from tocsin.console.context import CommandContext
    from tocsin.store.catalog import Store
    from tocsin.store.run import Run

_NAMED: Final = 8


def store_of(context: CommandContext) -> Store | None:
    """The store that the command was given, else the one beside an embedded bus. Reads nothing yet.

    None: the bus is Kafka, and no store was named.

    Raises:
        UnusableStore: its URL is wrong. MissingExtra: a bucket without the extra `store`.
    """
    if context.settings.store.url is None and not context.embedded:
        return None
    return context.open_store()


def run_of(
    context: CommandContext, store: Store | None, run_id: str, incarnation: str | None = None
) -> Run:
    """The run as the store and the bus have it. Blocks. Raises as `open_run` does, but for a bus
    that is not there."""
    from tocsin.store.opening import open_run

    def make_bus() -> Bus:
        return context.open_bus(create=False)

    topics = context.topics
    try:
        return open_run(run_id, store=store, bus=make_bus, incarnation=incarnation, topics=topics)
    except (MissingBus, UnknownTopic):
        if store is None:
            raise
        return open_run(run_id, store=store, incarnation=incarnation, topics=topics)


def run_named(
    context: CommandContext, store: Store | None, text: str, incarnation: str | None = None
) -> Run:
    """The run of that id, else the only one whose id begins so. Blocks.

    Raises:
        UnknownRun, ConfigurationError: there is none, or there are several, or it has no such
            training. As `run_of` does.
    """
    run = _run_begun(context, store, text, incarnation)
    check_training(run, incarnation)
    return run


def check_training(run: Run, incarnation: str | None) -> None:
    """Raise ConfigurationError if the run has no such training; None: any will do."""
    if incarnation is not None and incarnation not in run.incarnations:
        listed = ", ".join(run.incarnations[-_NAMED:]) or "none"
        raise ConfigurationError(
            f"run {run.run_id!r} has no training {incarnation!r}; its newest: {listed}"
        )


def _run_begun(
    context: CommandContext, store: Store | None, text: str, incarnation: str | None
) -> Run:
    from tocsin.store.errors import UnknownRun

    try:
        return run_of(context, store, text, incarnation)
    except UnknownRun:
        known = set() if store is None else {run.run_id for run in store.runs()}
        with suppress(MissingBus, UnknownTopic):
            known |= asyncio.run(_on_bus(context))
        begun = named(text, known)
        if not begun:
            raise
    if len(begun) > 1:
        raise ambiguous(text, begun)
    return run_of(context, store, begun[0], incarnation)


async def _on_bus(context: CommandContext) -> set[str]:
    async with context.open_bus(create=False) as bus:
        return {run.run_id for run in (await read_runs(bus, context.topics)).runs}
