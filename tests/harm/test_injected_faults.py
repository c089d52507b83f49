"""Whatever breaks in tocsin's own code, at whatever call: the training does not notice.

Short here, a thousand faults and more in the long form (`make torture`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from support.injector import Injector, choose
from support.trainings.captured import Said, captured, said
from support.trainings.small import TRAININGS, Result
from support.waiting import wait_until
from tocsin.emitter.training.context import current
from tocsin.schemas.records.runs import CaptureDegraded, RunEnded

EVERYTHING = (
    '{"collections": {"gradients": {"every": 1}, "weights": {"every": 2}, '
    '"inputs": {"modes": {"global": {"every": 1}}}, '
    '"activations": {"every": 2, "modes": {"eval": {"every": 1}}}}}'
)
EACH = 5
"""Faults planted in one training."""

OUTSIDE = frozenset(
    {
        # Called by torch or the user; the isolation is inside.
        "emitter.probes.activations.call_patches.ModuleCallObserver.called",
        "emitter.probes.activations.call_patches.ModuleCallObserver.traced",
        "emitter.stop.exit_points.check",
        "emitter.hooks.checkpoint_writes.CheckpointWrites._write",
        "emitter.hooks.loss_functions._is_fake",
        "emitter.training.session.Session.__init__",
        "emitter.training.session.Session._watch_the_end",
        "emitter.training.session.Session._watch_the_end_of_a_child",
        "emitter.training.session._set_quit",
        "emitter.training.session.Session.end",
        "emitter.hooks.training_hooks.Hooks.check",
        "emitter.training.training.Training.check",
        "emitter.hooks.training_hooks.Hooks.reset",
        "emitter.hooks.torch_patches._after_step",
        "emitter.hooks.torch_patches._before_step",
        "emitter.hooks.torch_patches._fail",
        "emitter.hooks.torch_patches._has_closure",
        "emitter.hooks.torch_patches._in_child",
        "emitter.hooks.torch_patches._leave_fast_path",
        "emitter.hooks.training_hooks.Hooks._on_local_gradient",
        "emitter.hooks.torch_patches.install",
        # The isolation of threads, and what wakes and ends these: without it they cannot.
        "bus.embedded.doorbell.Doorbell.close",
        "bus.embedded.spool.Spool.close",
        "bus.embedded.spool.SpoolWriter.close",
        "bus.embedded.spool.SpooledBus.__aexit__",
        "bus.embedded.spool.SpooledBus.producer",
        "emitter.send.bus_connection.BusLink.drop",
        "emitter.send.daemon_pool.DaemonPool.shutdown",
        "emitter.send.sender.Sender._notify",
        "emitter.send.sender.Sender._run",
        "emitter.send.sender.Sender.close",
    }
)


@pytest.fixture(scope="module")
def injector(
    expected: Mapping[str, Result], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Injector]:
    # After the trainings without us.
    wrapped = wrap_all(tmp_path_factory.mktemp("modules"))
    yield wrapped
    wrapped.unwrap()


def wrap_all(folder: Path) -> Injector:
    """Wrap all that a training process has loaded, but for what isolates."""
    with captured(folder, TOCSIN_CAPTURE=EVERYTHING):
        for train in TRAININGS.values():
            train(folder)
    injector = Injector(OUTSIDE)
    injector.wrap(
        [
            module
            for name, module in sys.modules.items()
            if name.startswith(("tocsin.emitter.", "tocsin.schemas.", "tocsin.bus."))
            and name != "tocsin.emitter.process.isolation"
        ]
    )
    assert injector.left_out == OUTSIDE, "a function has another name"
    return injector


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Result]:
    return {name: train(tmp_path_factory.mktemp(name)) for name, train in TRAININGS.items()}


def ours() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("tocsin")}


def torment(
    folder: Path,
    injector: Injector,
    expected: Mapping[str, Result],
    seeds: range,
    capsys: pytest.CaptureFixture[str],
) -> int:
    """One training per seed, each with a few faults; how many went off."""
    calls = {}
    for name, train in TRAININGS.items():
        place = folder / f"counting-{name}"
        place.mkdir()
        with injector.planted(()):
            with captured(place, TOCSIN_CAPTURE=EVERYTHING):
                assert train(place).same_as(expected[name])
            calls[name] = dict(injector.calls)
    fired = 0
    for seed in seeds:
        name = sorted(TRAININGS)[seed % len(TRAININGS)]
        place = folder / str(seed)
        place.mkdir()
        faults = choose(seed, calls[name], EACH)
        story = "\n".join(map(str, (f"seed {seed}: {name}", *faults)))
        capsys.readouterr()
        with injector.planted(faults), captured(place, TOCSIN_CAPTURE=EVERYTHING) as hooks:
            result = TRAININGS[name](place)
            off = dict(hooks.isolation.off)
        fired += len(set(map(str, injector.fired)))
        assert result.same_as(expected[name]), story
        told = capsys.readouterr().err
        check_told(place, off, told, story)
    return fired


def check_told(folder: Path, off: Mapping[str, str], told: str, story: str) -> None:
    """What was switched off is said: by a record, or on stderr where no record could be sent."""
    found = Said()
    with suppress(Exception):  # the bus itself was broken, or never made
        found = said(folder)
    reported = {event.probe for event in found.of(CaptureDegraded)}
    missing = [probe for probe in off if probe not in reported and probe not in told]
    if missing and found.of(RunEnded) and " has failed" not in told:
        raise AssertionError((story, off, told))
    assert told or not missing, (story, off)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of sockets made before a planted fault
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_no_fault_of_ours_reaches_a_training(
    tmp_path: Path,
    injector: Injector,
    expected: Mapping[str, Result],
    capsys: pytest.CaptureFixture[str],
) -> None:
    before, children = ours(), set(psutil.Process().children())  # of tests before, in this process
    fired = torment(tmp_path, injector, expected, range(14), capsys)
    assert fired >= 25
    wait_until(lambda: ours() <= before)  # a thread that was told to end needs a moment
    assert set(psutil.Process().children()) <= children
    assert not current.isolation.off


@pytest.mark.torture
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_not_one_of_a_thousand_faults_reaches_a_training(
    tmp_path: Path,
    injector: Injector,
    expected: Mapping[str, Result],
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = ours()
    fired = torment(tmp_path, injector, expected, range(1_000, 1_450), capsys)
    with capsys.disabled():
        print(f"\n{fired:,} faults went off in 450 trainings")
    assert fired >= 1_000
    wait_until(lambda: ours() <= before)  # a thread that was told to end needs a moment
