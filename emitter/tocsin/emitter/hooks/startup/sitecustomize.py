"""Runs at the start of each python of a launched job: the folder of this file is on PYTHONPATH.

It waits for torch to be imported and only then imports tocsin; a python that never imports torch
is left alone. It reports to the launcher that a python with the hook was there, and hands on to the
`sitecustomize` that would have run without it. Standard library only, and nothing here may raise.
"""

# ruff: noqa: INP001  (this folder must hold no package: it is on sys.path itself)

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # as type checkers know it; `typing` would take longer than all the rest here
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_TORCH = "torch"
_AGENT = "torch.distributed.elastic.agent.server.api"


def _report_start() -> None:
    launcher = os.environ.get("TOCSIN_LAUNCHER")
    if not launcher:
        return
    import _socket  # `socket` and `json` would cost more than all the rest here

    try:
        sender = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM)
    except OSError:
        return
    try:
        sender.setblocking(False)
        sender.sendto(b'{"kind":"hello","role":"python","pid":%d}' % os.getpid(), launcher)
    except OSError:
        return
    finally:
        sender.close()


def _report(text: str) -> None:
    try:
        sys.stderr.write(f"tocsin: {text}\n")
    except Exception:  # closed, or None
        return


class _Watcher:
    """A finder that finds nothing itself: it lets the others find, and adds a step to loading."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _TORCH and name != _AGENT:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    _follow(spec, name)
                return spec
        return None


def _follow(spec: ModuleSpec, name: str) -> None:
    """Have `_loaded` called once the module has been executed."""
    loader = spec.loader
    execute = loader.exec_module  # type: ignore[union-attr]  # the caller has looked

    def exec_module(module: ModuleType) -> None:
        # Ours, on this instance: torch must not keep us alive, nor a reload call us again.
        vars(loader).pop("exec_module", None)
        execute(module)
        _loaded(name, module)

    try:
        loader.exec_module = exec_module  # type: ignore[union-attr, method-assign]
    except AttributeError:  # a loader with slots: torch stays unwatched
        return


def _loaded(name: str, module: ModuleType) -> None:
    import gc

    # Beside torch's objects a collection of all takes a fifth of a second, and what we import would
    # bring one more of them.
    collecting = gc.isenabled()
    gc.disable()
    try:
        from tocsin.emitter.hooks import on_import

        if name == _TORCH:
            on_import.torch_loaded(module)
        else:
            on_import.agent_loaded(module)
    except ModuleNotFoundError as error:
        if name == _TORCH and (error.name or "").partition(".")[0] == "tocsin":
            _report(
                f"{sys.executable} has torch but not tocsin, so this training is not watched; "
                f"in the clone that you installed from, run: {sys.executable} -m pip install ."
            )
    except Exception as error:
        _report(f"this training is not watched: {error!r}")
    finally:
        if collecting:
            gc.enable()


def _hand_on() -> None:
    """Run the sitecustomize that stands behind this one on sys.path, in its place."""
    # What importlib.machinery and .util hand on; those would have to be read from files.
    from _frozen_importlib import module_from_spec
    from _frozen_importlib_external import PathFinder

    here = os.path.realpath(os.path.dirname(__file__))
    others = [entry for entry in sys.path if os.path.realpath(entry or os.curdir) != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    # What it raises is its own affair: Python reports it as it would without us.
    spec.loader.exec_module(module)


if os.environ.get("TOCSIN_RUN_ID"):
    try:
        _report_start()
        sys.meta_path.insert(0, _Watcher())
    except Exception as error:
        _report(f"the hook has failed: {error!r}")

_hand_on()
