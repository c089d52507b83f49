"""Pythons of ours, started beside a job: they import what is installed, and nothing of the user's.

A job's folder and the user's PYTHONPATH hold modules with any name: `statistics.py`, `yaml.py`,
`sitecustomize.py`. A process of ours must not import them in the place of those that it needs. So
it is started without the working folder on its path (`-P`), and of PYTHONPATH it gets the folders
that packages are installed in, and those of tocsin itself. This module imports next to nothing, so
that a process can clean its path before it imports the rest.
"""

from __future__ import annotations

import os
import site
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Final

LEFT_OUT: Final = "TOCSIN_PYTHONPATH"
"""Variable: the user's folders that were left out of PYTHONPATH, for those who run his code."""

_PATH: Final = "PYTHONPATH"
_FOR_THE_JOB: Final = ("PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONWARNINGS")
"""With `-W error` for the job, a warning of a library would end us."""

_PORTIONS: Final = (
    "schemas",
    "bus",
    "runtime",
    "emitter",
    "stream_rules",
    "actions",
    "store",
    "console",
)


def python_command(module: str, *words: str) -> tuple[str, ...]:
    """The command line that runs a module of ours, for `python_environment`."""
    # Where nothing is needed of the user's site-packages, a `usercustomize` there stays away too.
    options = ("-P",) if _user_site_is_used() else ("-P", "-s")
    return (sys.executable, *options, "-m", module, *words)


def python_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for a Python of ours. Lists folders: may block."""
    found = {name: value for name, value in environ.items() if name not in _FOR_THE_JOB}
    kept, left_out = _sorted_path(found.pop(_PATH, ""))
    if kept:
        found[_PATH] = os.pathsep.join(kept)
    if left_out:
        before = found.get(LEFT_OUT)
        found[LEFT_OUT] = os.pathsep.join([*left_out, *([before] if before else [])])
    return found


def leave_users_modules() -> None:
    """Take what `python_environment` leaves out, and the working folder, off this process's path.

    For a process that the user starts, before it imports anything else.
    """
    _, unwanted = _sorted_path(os.environ.get(_PATH, ""))
    # `python -m` puts it there.
    here = _absolute("")
    if not sys.flags.safe_path and not _is_installed(here):
        unwanted.append(here)
    sys.path[:] = [entry for entry in sys.path if _absolute(entry) not in unwanted]


def has_users_modules() -> bool:
    """Whether something of the user's acts in this process that `python_command` leaves out: one of
    his modules was imported before `leave_users_modules`, or he has set how warnings are taken.
    """
    _, unwanted = _sorted_path(os.environ.get(_PATH, ""))
    here = _absolute("")
    roots = {*unwanted, *([] if _is_installed(here) else [here])}
    return (
        bool(sys.warnoptions)
        or any(name in os.environ for name in _FOR_THE_JOB)
        or any(_root(module) in roots for name, module in [*sys.modules.items()] if "." not in name)
    )


def _root(module: object) -> str | None:
    """The folder on the path that a module at the top was imported from."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        return None
    folder, name = os.path.split(_absolute(file))
    return os.path.dirname(folder) if name.startswith("__init__.") else folder


def append_users_modules(environ: Mapping[str, str]) -> None:
    """Let this process import the user's modules too, where none of those on its path is meant."""
    left_out = environ.get(LEFT_OUT, "").split(os.pathsep)
    sys.path += [entry for entry in left_out if entry and entry not in sys.path]


def _sorted_path(text: str) -> tuple[list[str], list[str]]:
    """The folders of a PYTHONPATH, absolute: those to keep, and those to leave out."""
    # An empty one is the working folder.
    entries = [_absolute(entry) for entry in text.split(os.pathsep)] if text else []
    kept = [entry for entry in entries if _is_installed(entry)]
    return kept, [entry for entry in entries if entry not in kept]


def _absolute(entry: str) -> str:
    try:
        return os.path.abspath(entry)
    except OSError:  # the working folder was removed
        return entry


def _is_installed(folder: str) -> bool:
    """Whether packages are installed there, or tocsin is imported from there."""
    own = os.path.join(folder, "tocsin")
    if any(os.path.isfile(os.path.join(own, portion, "py.typed")) for portion in _PORTIONS):
        return True
    try:
        return any(name.endswith(".dist-info") for name in os.listdir(folder))
    except OSError:
        return False


def _user_site_is_used() -> bool:
    """Whether packages are installed for this user alone, in ~/.local, and can be imported here."""
    folder = site.getusersitepackages()
    return folder in sys.path and _is_installed(folder)
