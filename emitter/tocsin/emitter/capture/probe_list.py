"""The probes of a training, in one list, and the calls that reach them.

A probe is called for what its class overrides, and for nothing else; behind a step, only once that
step is due for it. So a probe that has nothing to do costs at most a comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from tocsin.emitter.probes.activations.probe import ActivationProbe
from tocsin.emitter.probes.checksums import ReplicaChecksums
from tocsin.emitter.probes.evaluation_batches import EvaluationBatches
from tocsin.emitter.probes.evaluation_losses import EvaluationLosses
from tocsin.emitter.probes.full_tensors import FullTensors
from tocsin.emitter.probes.inputs.batch_rows import InputProbe
from tocsin.emitter.probes.optimizer_state import OptimizerState
from tocsin.emitter.probes.probe import NEVER, Probe
from tocsin.emitter.probes.program_checks.untracked_gradients import UntrackedGradients
from tocsin.emitter.probes.weight_updates import UpdateProbe
from tocsin.emitter.process.isolation import REST, Isolation
from tocsin.emitter.statistics.tables import Pending

if TYPE_CHECKING:
    from tocsin.emitter.model.optimizers import Optimizers, WatchedOptimizer
    from tocsin.emitter.plan.schedule import Due
    from tocsin.emitter.training.training import Training

PROBES: Final[tuple[type[Probe], ...]] = (
    ReplicaChecksums,
    UpdateProbe,
    OptimizerState,
    EvaluationLosses,
    EvaluationBatches,  # its batches end before the activations of the step are read
    InputProbe,
    ActivationProbe,
    UntrackedGradients,
    FullTensors,
)
"""A line for each, in the order of their calls and of their tables; made anew for each training."""


class ProbeList:
    """The probes of the training of this process."""

    def __init__(self, isolation: Isolation, lasting: tuple[Probe, ...] = ()) -> None:
        """`lasting` are those that hooks call by themselves: they exist before a training begins,
        and come before all others.
        """
        self._isolation: Final = isolation
        self._lasting: Final = lasting
        self._choose(lasting)

    def _choose(self, probes: tuple[Probe, ...]) -> None:
        self.all: tuple[Probe, ...] = probes

        def overriding(method: Callable[..., object]) -> tuple[Probe, ...]:
            name = method.__name__
            return tuple(p for p in probes if p.on and getattr(type(p), name) is not method)

        self.on_batch: tuple[Probe, ...] = overriding(Probe.batch)
        """Those to be called for a batch of training; the hooks call them, isolated."""
        self.on_evaluation_batch: tuple[Probe, ...] = overriding(Probe.evaluation_batch)
        self.on_last_batch: tuple[Probe, ...] = overriding(Probe.last_batch)
        self.on_evaluation_loss: tuple[Probe, ...] = overriding(Probe.evaluation_loss)
        self._preparing = overriding(Probe.prepare)
        self._updating = overriding(Probe.updating)
        self._reading = overriding(Probe.read)
        self._dropping = overriding(Probe.dropped)
        self._stepping = overriding(Probe.stepped)
        self._flushing = overriding(Probe.flush)

    def start(self, training: Training, optimizers: Optimizers) -> None:
        """A training begins on this thread, with these optimizers."""
        probes = (*self._lasting, *(probe() for probe in PROBES))
        for probe in probes:
            self._isolation.run(probe.name, probe.start, training, optimizers)
        self._choose(probes)

    def reset(self) -> None:
        """The training is over; the next begins anew."""
        for probe in self.all:
            self._isolation.run("clean-up", probe.reset)
        self._choose(self._lasting)

    # -- a step ----------------------------------------------------------------------------------

    @property
    def next_read(self) -> int:
        """The first step that one of them reads, whatever is due."""
        first = NEVER
        for probe in self._reading:
            if probe.reads < first:
                first = probe.reads
        return first

    def prepare(self, step: int, due: Due) -> None:
        """The step before this one is over, and these collections are due at this one."""
        for probe in self._preparing:
            if step >= probe.reads or probe.of in due:
                self._isolation.run(probe.name, probe.prepare, step, due)

    def updating(self, watched: WatchedOptimizer, due: Due) -> None:
        """The optimizer whose steps count is about to change its weights, and these are due."""
        for probe in self._updating:
            if probe.of in due:
                self._isolation.run(probe.name, probe.updating, watched, due)

    def read(self, step: int, watched: WatchedOptimizer, due: Due) -> list[tuple[str, Pending]]:
        """The tables of a step that was made, here or on their way, each with the name of the
        collection that bears its cost.
        """
        found: list[tuple[str, Pending]] = []
        for probe in self._reading:
            if step >= probe.reads or probe.of in due:
                read = self._isolation.run(probe.name, probe.read, step, watched, due)
                if read is not None:
                    found.append(read)
                if self._isolation.rests(probe.name):
                    probe.reads = step + REST
        return found

    def dropped(self) -> None:
        """The step in progress is not made."""
        for probe in self._dropping:
            self._isolation.run(probe.name, probe.dropped)

    def wakes(self, step: int) -> bool:
        """Whether `stepped` has something to do behind this step."""
        for probe in self._stepping:  # noqa: SIM110  (a generator is a call more at each step)
            if step >= probe.wakes:
                return True
        return False

    @property
    def next_wake(self) -> int:
        """The first step behind which `stepped` has something to do that cannot wait."""
        return min((probe.wakes for probe in self._stepping if not probe.patient), default=NEVER)

    def stepped(self, training: Training, step: int) -> None:
        """A step of the training is over."""
        for probe in self._stepping:
            if step >= probe.wakes:
                self._isolation.run(probe.name, probe.stepped, training, step)
                if self._isolation.rests(probe.name):
                    probe.wakes = step + REST

    # -- the end ---------------------------------------------------------------------------------

    def flush(self) -> bool:
        """Send what has arrived of evaluations; whether something is still to come."""
        waiting = False
        for probe in self._flushing:
            waiting = bool(self._isolation.run(probe.name, probe.flush)) or waiting
        return waiting

    def close(self, training: Training) -> None:
        """The training is over: have them send what is left."""
        for probe in self.all:
            self._isolation.run(probe.name, probe.close, training)
