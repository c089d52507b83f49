"""Under torchrun: no worker is started again once the job got a stop.

torchrun's agent sees a worker's exit code 79 as a failure and would start all workers again while
restarts are left. The agent is a python with our hook, so it can be reached: the launcher sends
`no_restart` and waits for `restart_blocked` before any rank hears of the stop.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

from tocsin.emitter.stop import datagrams

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerGroup

logger = logging.getLogger(__name__)

AGENT_MODULE: Final = "torch.distributed.elastic.agent.server.api"
"""The module whose import means that this process may be an agent."""


class AgentGuard:
    """Keeps an agent from further restarts once the launcher asks for that."""

    def __init__(self, agent: SimpleElasticAgent, launcher: str, folder: Path) -> None:
        """Listen in `folder` and sign on. Raises OSError."""
        self.blocked = False
        self._agent = agent
        self._launcher = launcher
        self._closed = False
        self._endpoint = datagrams.Endpoint(folder / f"a-{os.getpid()}.sock")
        self._endpoint.set_blocking()
        threading.Thread(target=self._listen, name="tocsin-agent", daemon=True).start()
        hello: datagrams.Message = {
            "kind": "hello",
            "role": "agent",
            "pid": os.getpid(),
            "socket": str(self._endpoint.path),
        }
        datagrams.send(launcher, hello)

    def block(self) -> None:
        """No restart from now on."""
        self.blocked = True
        self._agent._remaining_restarts = 0

    def close(self) -> None:
        """Stop listening."""
        self._closed = True
        datagrams.send(self._endpoint.path, {"kind": "close"})

    def _listen(self) -> None:
        while not self._closed:
            try:
                message = self._endpoint.receive()
            except OSError:
                break
            if message is not None and message["kind"] == "no_restart":
                self.block()
                datagrams.send(self._launcher, {"kind": "restart_blocked", "pid": os.getpid()})
        self._endpoint.close()


_guard: AgentGuard | None = None


def guard_agents(module: ModuleType) -> None:
    """Patch the agent class of `AGENT_MODULE`, once imported. Costs nothing until one runs."""
    agent_class = module.SimpleElasticAgent
    original_run, original_restart = agent_class._invoke_run, agent_class._restart_workers
    if getattr(original_run, "_tocsin", False):
        return

    @functools.wraps(original_run)
    def run(self: SimpleElasticAgent, *args: object, **kwargs: object) -> object:
        global _guard
        _guard = _listen_for(self)
        try:
            return original_run(self, *args, **kwargs)
        finally:
            if _guard is not None:
                _guard.close()

    @functools.wraps(original_restart)
    def restart(self: SimpleElasticAgent, group: WorkerGroup) -> None:
        if _guard is not None and _guard.blocked:
            # Decided before the request came, or another node came: end the workers, start none.
            logger.warning("workers are not restarted: the job received a stop")
            self._stop_workers(group)
            return
        original_restart(self, group)

    run._tocsin = True  # type: ignore[attr-defined]  # marks it as wrapped
    agent_class._invoke_run = run
    agent_class._restart_workers = restart


def _listen_for(agent: SimpleElasticAgent) -> AgentGuard | None:
    launcher, folder = os.environ.get("TOCSIN_LAUNCHER"), os.environ.get("TOCSIN_RUNTIME_DIR")
    if not launcher or not folder:
        return None
    try:
        return AgentGuard(agent, launcher, Path(folder))
    except Exception:
        # An emitter hook's isolation: an agent that we cannot guard must run as without us.
        logger.warning("the agent's restarts cannot be blocked", exc_info=True)
        return None
