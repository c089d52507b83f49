"""What is done to torch when a process imports it: called by the hook, or by `start()`.

Imports only what is cheap; the rest follows when a training begins.
"""

from __future__ import annotations

import os
from types import ModuleType

from tocsin.emitter.settings import RUN_ID


def torch_loaded(torch: ModuleType) -> None:
    """Put the hooks into torch, once per process. `torch` has just been executed."""
    from tocsin.emitter import torch_hooks

    torch_hooks.install()
    if os.environ.get(RUN_ID) and torch.distributed.is_available():
        from tocsin.emitter import agreement

        agreement.wrap_init_process_group(torch.distributed)


def agent_loaded(module: ModuleType) -> None:
    """torchrun's agent class was imported: this process may be an agent."""
    from tocsin.emitter import elastic

    elastic.guard_agents(module)
