"""A plugin of pytest: a test that fails ends what it started, and hands nothing on to the next one.

What a failed test held open lives on in its traceback, which Python keeps until the next failure or
the next test. It would be closed there, with a warning that fails that test instead.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import warnings
from collections.abc import Generator

import psutil
import pytest

from support.processes.forking import Forked

_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Processes that were started in a test which fails are killed; fixtures end their own."""
    item.stash[_FAILED] = False
    before = set(Forked.started)
    try:
        return (yield)
    except BaseException:
        item.stash[_FAILED] = True
        for process in set(Forked.started) - before:
            _kill(process)
        raise


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """After the fixtures' end nothing is left of a failure but its report."""
    try:
        return (yield)
    finally:
        if item.stash.get(_FAILED, False):
            forget()


def _kill(process: Forked) -> None:
    """It and what it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for descendant in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                descendant.kill()
    process.kill()
    process.wait(10)


def forget() -> None:
    """Let go of the last failure's traceback and of all that it holds, without a word."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
    hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gc.collect()
    finally:
        sys.unraisablehook = hook
