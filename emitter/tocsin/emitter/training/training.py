"""One training of this process: its identity, its sender, its life from the first step to the end.

Knows nothing of torch. Capture adds the numbers, `start()` the user's own.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from threading import Thread
from typing import Final, Literal, NoReturn, TypedDict

from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.embedded.spool import SpooledBus
from tocsin.bus.port import Bus, Outlet
from tocsin.bus.urls import open_bus
from tocsin.emitter.plan.schedule import CaptureSchedule
from tocsin.emitter.plan.settings import CaptureSettings
from tocsin.emitter.process import run_facts
from tocsin.emitter.process.environment import (
    AFTER_STOP,
    BUS,
    DEFAULT_BUS,
    DEFAULT_PREFIX,
    HEARTBEAT_S,
    LAUNCHER,
    PREFIX,
    labels_of_job,
)
from tocsin.emitter.process.identity import Identity
from tocsin.emitter.process.isolation import Isolation, switched_off
from tocsin.emitter.process.run_queue import RunQueue
from tocsin.emitter.process.scheduler import scheduler_of
from tocsin.emitter.process.stderr import print_line
from tocsin.emitter.send.encoding import Address
from tocsin.emitter.send.outbox import StepRow
from tocsin.emitter.send.sender import FLUSH_S, Sender
from tocsin.emitter.stop import before_update, datagrams, exit_points, verification
from tocsin.emitter.stop.exception import StopTraining
from tocsin.emitter.stop.leave_report import ExitPoint
from tocsin.schemas.monotonic_clock import unix_ms, unix_us
from tocsin.schemas.records.checkpoints import Checkpoint, CheckpointWritten
from tocsin.schemas.records.events import Data, clip
from tocsin.schemas.records.frames import TensorFrame, Who
from tocsin.schemas.records.program_facts import TrainingPlanned
from tocsin.schemas.records.runs import (
    CaptureDegraded,
    CaptureFigures,
    Group,
    Heartbeat,
    Outcome,
    PhaseMark,
    RunEnded,
    RunStarted,
)
from tocsin.schemas.topics import Topics

logger = logging.getLogger(__name__)


SETTINGS: Final = "settings"
"""What is off where settings cannot be read: they, and nothing that is watched."""


class Shape(TypedDict, total=False):
    """What is known of the model and its optimizer when the training begins."""

    optimizer: str | None
    optimizers: int
    groups: tuple[Group, ...]
    tensors: int
    parameters: int
    versions: Mapping[str, str | None]
    devices: Mapping[str, int]
    loaded: tuple[str, ...]
    environment: bool


class Training:
    """A training under way. Counts steps; `next_step` is the one in progress, from 0."""

    def __init__(
        self,
        identity: Identity,
        settings: CaptureSettings,
        isolation: Isolation,
        environ: Mapping[str, str],
        *,
        after: Sequence[Thread] = (),
    ) -> None:
        """Start the sender's thread, which sends once those of `after` have ended: they send the
        rest of the training before. Raises ConfigurationError, RuntimeError.
        """
        self.identity: Final = identity
        self.settings: Final = settings
        self.isolation: Final = isolation
        self.origin: Final = identity.origin
        self.next_step = 0
        self.step_at_us = 0
        """The time in the row of the last step, µs: other rows of that step bear the same."""
        self.activity = 0
        """Backward calls and batches of data loaders so far: that something goes on."""
        self.activity_at_step = 0
        """The same when the last step ended."""
        self.is_evaluating: Callable[[], bool] = lambda: False
        self.is_finite: Callable[[], bool] = lambda: False
        """Whether the weights are, now; on the training's thread. Waits for a GPU."""
        self.skipped_tensors: Callable[[], int] = lambda: 0
        self.evaluated_step: int | None = None
        """The last step behind which a loss of an evaluation was seen."""
        self.phases: list[str] = []
        self.schedule: Final = CaptureSchedule(settings, held_up=RunQueue().share)
        self.left = False
        self._labels = labels_of_job(environ)
        self._launcher = environ.get(LAUNCHER, "")
        self.bus_url: Final = environ.get(BUS, DEFAULT_BUS)
        self._wall_before = 0.0
        self._began = time.monotonic()
        self._stepping_s = 0.0
        self._ended = False
        self.sender: Final = Sender(
            outlet_opener(environ.get(BUS), environ),
            Address(
                topics=Topics(environ.get(PREFIX, DEFAULT_PREFIX)),
                origin=self.origin,
                source=f"/runs/{identity.run_id}/ranks/{identity.rank}",
                create_topics=not environ.get(BUS, DEFAULT_BUS).startswith("kafka:"),
            ),
            heartbeat=self.heartbeat,
            heartbeat_s=HEARTBEAT_S,
            after=after,
        )
        self.sender.start()
        isolation.report = self._report

    @property
    def who(self) -> Who:
        """The fields that each event of a run begins with."""
        return self.origin.fields

    @property
    def last_step(self) -> int | None:
        """The last finished step; None before it."""
        return self.next_step - 1 if self.next_step else None

    def start(self, shape: Shape, labels: Mapping[str, str]) -> None:
        """Say that it has begun, and listen for stops."""
        self.emit(self._started(shape, labels))
        for probe, reason in list(self.isolation.off.items()):
            self._degraded(probe, reason)
        self.isolation.run(
            "stop",
            exit_points.started,
            self.origin,
            self.emit,
            flush=self.sender.flush,
            local_rank=self.identity.local_rank,
            restart_count=self.identity.restart_count,
            training=self.identity.training,
            request_detail=self.capture_closely,
            finite=lambda: self.is_finite(),
        )

    def capture_closely(self, steps: int, reason: str) -> None:
        """A rule asks for more of the next `steps` steps, which the launcher has bounded; from
        another thread.
        """
        logger.info("looking closer", extra={"steps": steps, "reason": reason})
        self.schedule.ask(steps)

    def saved(self, checkpoint: Checkpoint, duration_s: float) -> None:
        """Report a checkpoint; who listens on this node has it read, apart from the training. One
        rank reports a folder that all have written to.
        """
        self.emit(CheckpointWritten(**self.who, checkpoint=checkpoint, duration_s=duration_s))
        if self._launcher and (self.identity.rank == 0 or not os.path.isdir(checkpoint.path)):
            datagrams.send(
                self._launcher,
                {
                    "kind": "saved", "pid": os.getpid(), "rank": self.origin.rank,
                    "world_size": self.origin.world_size,
                    "incarnation": self.origin.incarnation, "path": checkpoint.path,
                    "step": checkpoint.step, "size_bytes": checkpoint.size_bytes,
                },
            )  # fmt: skip

    def emit(self, data: Data) -> None:
        """Put an event on the telemetry topic; never waits."""
        self.sender.publish(data)

    def plan(self, total_steps: int | None, done_steps: int | None, source: str) -> None:
        """Say how many steps are planned, over all incarnations, and how many of them were made
        before this one; None: not known. `source` is where that comes from.
        """
        planned = TrainingPlanned(
            **self.who, total_steps=total_steps, done_steps=done_steps, source=source
        )
        self.emit(planned)

    def row(
        self, columns: Sequence[str], values: Sequence[float], *, step: int, urgent: bool = False
    ) -> None:
        """Send scalars of training as of now; never waits."""
        self.step_row(StepRow(step, unix_us(), tuple(columns), tuple(values)), urgent=urgent)

    def step_row(self, row: StepRow, *, urgent: bool = False) -> None:
        """Send scalars; never waits. `urgent`: something is wrong with them, and a stop may follow,
        for which the ranks get ready.
        """
        if urgent:
            exit_points.alert()
        self.sender.row(row, urgent=urgent)

    def frame(self, frame: TensorFrame, *, urgent: bool = False) -> None:
        """Send a summary; never waits. `urgent` as for `step_row`."""
        if urgent:
            exit_points.alert()
        self.sender.frame(frame, urgent=urgent)

    def stepped(self, step_time_s: float | None) -> int:
        """Count a step of the primary optimizer; return its number."""
        step = self.next_step
        self.next_step = step + 1
        self.activity_at_step = self.activity
        if step <= 1:
            # The first step pays for imports and names once: that is not what watching costs.
            self._wall_before = self.isolation.seconds
        elif step_time_s is not None:
            self._stepping_s += step_time_s
        return step

    def passed_together(self, seconds: float) -> None:
        """Steps that were counted without `stepped` have taken that long."""
        self._stepping_s += seconds

    def check(self, exit_point: ExitPoint) -> None:
        """An exit point of the loop; not isolated: raises StopTraining on purpose. Then it waits
        for other ranks, and for a checkpoint.
        """
        try:
            exit_points.check(exit_point, max(0, self.next_step - 1))
        except StopTraining:
            self.left = True
            raise

    def leave_before_update(self, reason: str, policy: before_update.CheckpointPolicy) -> NoReturn:
        """Leave the loop instead of making the next step; not isolated: raises StopTraining. Waits
        for a checkpoint that is being written, or is to be.
        """
        rank = exit_points.listening()
        assert rank is not None
        self.left = True
        rank.leave_before_update(reason, self.next_step - 1, policy)

    def phase(self, name: str, edge: str, duration_s: float | None = None) -> None:
        """Mark the begin or the end of a phase."""
        if edge == "begin":
            self.phases.append(name)
            mark = PhaseMark(**self.who, name=clip(name, 100), edge="begin", step=self.last_step)
        else:
            if name in self.phases:
                self.phases.remove(name)
            mark = PhaseMark(
                **self.who,
                name=clip(name, 100),
                edge="end",
                step=self.last_step,
                duration_s=duration_s,
            )
        self.emit(mark)

    def figures(self) -> CaptureFigures:
        """What watching has cost so far, and what it sent."""
        spent = self.isolation.seconds - self._wall_before
        lasted = self._stepping_s
        return CaptureFigures(
            overhead_percent=round(100 * spent / lasted, 3) if lasted > 0 else 0.0,
            budget_percent=100 * self.settings.budget,
            spent_s=round(self.isolation.seconds, 3),
            stepping_s=round(lasted, 3),
            step_s=lasted / (self.next_step - 2) if self.next_step > 2 else None,
            intervals=self.schedule.intervals(),
            records=self.sender.records,
            dropped=self.sender.dropped,
            skipped_tensors=self.skipped_tensors(),
            degraded=tuple(
                clip(f"{probe}: {reason}", 500)
                for found in (self.isolation.off, self.isolation.came_back)
                for probe, reason in list(found.items())
            )[:64],
            not_watched=tuple(
                clip(probe, 100) for probe in list(self.isolation.off) if probe != SETTINGS
            )[:64],
        )

    def heartbeat(self) -> Heartbeat:
        """Send a heartbeat of this rank; called on the sender's thread."""
        busy = self.phases[-1] if self.phases else ("evaluation" if self.is_evaluating() else None)
        return Heartbeat(
            **self.who,
            last_step=self.last_step,
            steps_in_flight=self.activity > self.activity_at_step,
            busy=None if busy is None else clip(busy, 100),
            forward_calls=self.activity,
            capture=self.figures(),
        )

    def end(self, outcome: Outcome, reason: str = "", *, timeout_s: float = FLUSH_S) -> None:
        """Say that it is over, wait for acknowledgement up to `timeout_s`, and stop sending."""
        if not self._ended:
            self.isolation.run("end of stop", exit_points.await_command)
            self.emit_end(outcome, reason)
            self.sender.close(timeout_s)

    def emit_end(self, outcome: Outcome, reason: str = "") -> None:
        """Say that it is over, once; does not wait."""
        if self._ended:
            return
        self._ended = True
        # First: a stop that is heard from here on would be acknowledged into a closed sender.
        self.isolation.run("end of stop", exit_points.finished)
        if self.left:
            outcome = "stopped"
        self.sender.end_heartbeats()
        self.emit(
            RunEnded(
                **self.who,
                outcome=outcome,
                reason=clip(reason),
                last_step=self.last_step,
                duration_s=time.monotonic() - self._began,
                capture=self.figures(),
            )
        )

    def _started(self, shape: Shape, labels: Mapping[str, str]) -> RunStarted:
        return RunStarted(
            **self.who,
            job_id=self.identity.job_id,
            scheduler=scheduler_of(os.environ),
            restart_count=self.identity.restart_count,
            training=self.identity.training,
            labels={**self._labels, **labels},
            node=socket.gethostname()[:255],
            pid=os.getpid(),
            command=run_facts.command_line(sys.orig_argv),
            folder=clip(str(run_facts.working_folder())),
            git_commit=run_facts.git_commit(run_facts.script_folder())
            or run_facts.git_commit(run_facts.working_folder()),
            versions=run_facts.versions(shape.get("versions", {})),
            optimizer=shape.get("optimizer"),
            optimizers=shape.get("optimizers", 0),
            groups=shape.get("groups", ()),
            tensors=shape.get("tensors", 0),
            parameters=shape.get("parameters", 0),
            collections=self.settings.collections,
            heartbeat_s=HEARTBEAT_S,
            stop=stop_state(os.environ),
            after_stop=clip(os.environ.get(AFTER_STOP, "")),
            devices=dict(shape.get("devices", {})),
            loaded=shape.get("loaded", ()),
            environment=shape.get("environment", False),
            ends_by_ms=run_facts.ends_by_ms(os.environ),
        )

    def _report(self, probe: str, reason: str) -> None:
        if not self._launcher:  # a launcher sends it itself
            print_line(switched_off(probe, reason))
        self._degraded(probe, reason)

    def _degraded(self, probe: str, reason: str) -> None:
        self.emit(
            CaptureDegraded(
                **self.who, probe=clip(probe, 100), reason=clip(reason, 500), step=self.last_step
            )
        )


def stop_state(environ: Mapping[str, str]) -> Literal["trusted_key", "no_trusted_key", "off"]:
    """Whether this process would obey a stop."""
    if environ.get(verification.STOP) == "off":
        return "off"
    keys = verification.read_keys(verification.trusted_paths(environ))
    return "trusted_key" if keys else "no_trusted_key"


def outlet_opener(url: str | None, environ: Mapping[str, str]) -> Callable[[], Outlet]:
    """Opens the way to the bus of that URL, again and again; a relative path means today's working
    folder.

    No file of an embedded bus is opened in a training's process: it writes to a spool.
    """
    if url is not None and url.startswith("kafka:"):
        return kafka_opener(url, environ)
    folder = run_facts.working_folder()

    def open_spool() -> Outlet:
        bus = open_bus(url, folder=folder, explicit=url is not None)
        assert isinstance(bus, EmbeddedBus)
        return SpooledBus(bus.path, unix_ms)

    return open_spool


def kafka_opener(url: str, environ: Mapping[str, str]) -> Callable[[], Bus]:
    """Opens the Kafka bus of that URL, again and again.

    How to log in is in the configuration (TOCSIN_CONFIG, else ./tocsin.yaml), which
    is read whenever the bus is opened.
    """
    folder = run_facts.working_folder()

    def open_kafka() -> Bus:
        # They need YAML, of which a job may have a module of its own.
        from tocsin.bus.configured import open_configured_bus
        from tocsin.schemas.configuration.file import load_config
        from tocsin.schemas.configuration.settings import resolve_secrets, resolve_settings

        loaded = load_config(None, environ, folder=folder)
        bus = resolve_settings(loaded.config, environ, bus=url).bus
        secrets = resolve_secrets(loaded.config, environ, folder=loaded.folder)
        return open_configured_bus(bus, secrets, folder=loaded.folder, explicit=True)

    return open_kafka
