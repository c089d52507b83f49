"""`tocsin sample`: samples this node for the runs that are here, until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Final

from tocsin.bus.configured import open_configured_bus
from tocsin.bus.port import Bus, BusError, BusUnavailable
from tocsin.console.context import CommandContext
from tocsin.console.views.bus_view import read_view
from tocsin.emitter.node.agent import NodeAgent
from tocsin.emitter.node.publisher import NodePlan
from tocsin.emitter.node.registry import NodeFolder, Registration
from tocsin.runtime.shutdown import stop_signals
from tocsin.schemas.configuration.capture import SystemConfig
from tocsin.schemas.configuration.values import parse_duration
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.exit_codes import FAILED

logger = logging.getLogger(__name__)

VIEW_S: Final = 30.0
"""How often the bus is asked which incarnation of a run is the newest, seconds."""


def plan_samples(context: CommandContext, interval: str | None) -> NodePlan:
    """What `--interval` and the configuration say. Raises ConfigurationError."""
    plan = NodePlan.from_section(context.config.capture.system, context.loaded.folder)
    if interval is None:
        return plan
    try:
        section = SystemConfig(interval=parse_duration(interval))
    except ValueError as error:
        raise ConfigurationError(
            f"--interval {interval}: expected a duration from 100ms to 60s, for example 500ms"
        ) from error
    return replace(plan, interval_s=section.interval / timedelta(seconds=1))


async def sample_node(context: CommandContext, run_id: str | None, plan: NodePlan) -> int:
    """Sample until SIGTERM or SIGINT. The exit code.

    Raises:
        ConfigurationError: the node's folder cannot be made.
    """
    try:
        folder = NodeFolder.from_environ(os.environ)
    except OSError as error:
        raise ConfigurationError(
            f"no folder for this node's runs and locks: {error}; "
            "try TOCSIN_NODE_FOLDER=/a/folder/of/your/own"
        ) from error
    finder = _Finder(context, folder, run_id)
    agent = NodeAgent(folder, finder.find, lambda found: _open(context, found), plan=plan)
    stopping = asyncio.Event()
    with stop_signals(stopping):
        whom = "each run that registers" if run_id is None else f"run {run_id}"
        logger.info(
            "sampling this node every %g s for %s in %s",
            plan.interval_s,
            whom,
            folder.path,
            extra={"action": "start"},
        )
        task = asyncio.create_task(agent.run(), name="agent")
        ended = asyncio.create_task(stopping.wait(), name="signal")
        await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if task.done():
            task.result()
            return FAILED
        task.cancel()
        await asyncio.wait({task})
    return 0


def _open(context: CommandContext, found: Registration) -> Bus:
    """The bus that a run's records go to; how to log in is in this command's configuration."""
    config = context.settings.bus.model_copy(update={"url": found.bus, "prefix": found.prefix})
    return open_configured_bus(config, context.secrets, folder=context.loaded.folder, explicit=True)


class _Finder:
    """Which runs are to be sampled: those that are registered, or one that was named."""

    def __init__(self, context: CommandContext, folder: NodeFolder, run_id: str | None) -> None:
        self._context = context
        self._folder = folder
        self._run_id = run_id
        self._asked_s = float("-inf")
        self._seen: Registration | None = None
        self._away = False

    async def find(self) -> Sequence[Registration]:
        """As `NodeAgent` asks for it."""
        found = self._folder.registrations()
        if self._run_id is None:
            return found
        own = [registration for registration in found if registration.run_id == self._run_id]
        if own:
            return own
        # Nobody on this node speaks for it: what the bus says of it is all there is.
        if time.monotonic() - self._asked_s >= VIEW_S:
            self._asked_s = time.monotonic()
            await self._inspect(self._run_id)
        return [] if self._seen is None else [self._seen]

    async def _inspect(self, run_id: str) -> None:
        context = self._context
        try:
            async with context.open_bus(create=False) as bus:
                view = (await read_view(bus, context.topics, run_id)).run(run_id)
                url = bus.url
        except BusError as error:
            if isinstance(error, ConfigurationError):
                raise
            logger.log(
                logging.DEBUG if self._away else logging.WARNING,
                "cannot look up run %s on the bus: %s",
                run_id,
                error,
                extra={"action": "sample"},
            )
            self._away = isinstance(error, BusUnavailable)
            return
        self._away = False
        if view is None:
            logger.info(
                "no run %s on %s yet; sampling starts once it is there",
                run_id,
                url,
                extra={"action": "sample"},
            )
            return
        self._seen = None
        if view.state != "ended":
            self._seen = Registration(
                run_id=run_id,
                incarnation=view.incarnation,
                bus=url,
                prefix=context.topics.prefix,
                folder=str(Path.cwd()),
                visible=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            )
