"""What only the process that made it may destroy, over a fork."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tocsin.emitter.hooks.torch_patches import hooks, install
from tocsin.emitter.probes.cuda_timing import CudaTiming
from tocsin.emitter.process.isolation import Isolation
from tocsin.emitter.statistics.driver_objects import DriverObjects


class DriverEvent:
    """As an event of CUDA: to destroy one in a forked child ends the process."""

    destroyed = 0

    def __init__(self) -> None:
        self._maker = os.getpid()

    def __del__(self) -> None:
        type(self).destroyed += 1
        if os.getpid() != self._maker:
            os.abort()

    def query(self) -> bool:
        return False

    def elapsed_time(self, end_event: object, /) -> float:
        raise AssertionError("it has not come by")


class Holder(DriverObjects):
    def __init__(self) -> None:
        super().__init__()
        self.events = [DriverEvent()]


def exit_of_child(work: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_child_keeps_what_its_parent_destroys() -> None:
    held = [Holder()]
    before = DriverEvent.destroyed

    assert exit_of_child(held.clear) == 0

    held.clear()
    assert DriverEvent.destroyed == before + 1


def test_a_child_that_is_forked_while_a_step_is_timed_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install()
    timer = CudaTiming(
        lambda *_: None, DriverEvent, isolation=Isolation(), is_recording=lambda: False
    )
    timer.forward()
    timer.backward()
    timer.close_step(0)
    timer.forward()
    phases = hooks.hook_probes.phases
    monkeypatch.setattr(phases, "timer", timer)
    phases.device = timer
    del timer

    assert exit_of_child(lambda: None) == 0

    phases.reset()
