"""What `start()` runs where there is no launcher: environment, helper, and listener for stops."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Final

from tocsin.bus.embedded.location import default_place
from tocsin.bus.port import Bus
from tocsin.emitter.checkpoints.pins import PIN, Pins, how_to_pin
from tocsin.emitter.checkpoints.reader import CheckpointReader
from tocsin.emitter.launch.helper import DRAIN_S
from tocsin.emitter.launch.helper_child import HelperChild, helper_command, helper_words
from tocsin.emitter.launch.listener_child import ListenerChild
from tocsin.emitter.launch.predecessor import Predecessor
from tocsin.emitter.launch.predecessor_search import find_predecessor
from tocsin.emitter.node.publisher import NodePlan, NodeReport
from tocsin.emitter.node.registry import Entry, NodeFolder, Registration
from tocsin.emitter.plan.settings import lay_over
from tocsin.emitter.process import run_facts, runtime_folder
from tocsin.emitter.process.environment import (
    BUS,
    CAPTURE,
    JOB_ID,
    LAUNCHER,
    PREFIX,
    RUN_ID,
    RUNTIME_DIR,
)
from tocsin.emitter.process.identity import (
    launch_job_id,
    node_key,
    rank_of,
    resolve_run_id,
    restart_count,
    scheduler_job,
)
from tocsin.emitter.process.stderr import print_line
from tocsin.emitter.stop import before_update, datagrams
from tocsin.emitter.stop.before_update_policy import before_update_policy
from tocsin.emitter.stop.listener import ThreadListener
from tocsin.emitter.stop.verification import STOP, STOP_KEYS, trusted_paths
from tocsin.emitter.training.training import Training, kafka_opener
from tocsin.schemas.configuration.file import LoadedConfig
from tocsin.schemas.configuration.settings import resolve_settings
from tocsin.schemas.configuration.store import capture_json
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.ids import incarnation_id
from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.schemas.topics import Topics

LEFTOVERS: Final = 3
"""Exit code of a helper that leaves something in the ledger."""


def environment(
    run_id: str | None,
    loaded: LoadedConfig,
    base: Mapping[str, str],
    *,
    capture: str = "",
    labels: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """What a launcher would have put into the environment of this process.

    `capture` is JSON, laid over the section of the file; `labels` are those given in the code.

    Raises:
        ConfigurationError: no run id that all ranks would agree on, or a wrong one.
        OSError: no private folder can be made.
    """
    several = rank_of(base)[2] > 1
    if several and run_id is None and RUN_ID not in base and scheduler_job(base) is None:
        raise ConfigurationError(
            "this training has several ranks, and they need the same run id: "
            "try start(run_id=...), or TOCSIN_RUN_ID"
        )
    settings = resolve_settings(loaded.config, base)
    # Of several ranks each has its own at first; they agree when their process group is made, and
    # again when a training begins.
    job_id = launch_job_id(base)
    run_id = resolve_run_id(run_id, base)
    folder = node_key(base, run_id) if several else job_id
    found = {
        RUN_ID: run_id,
        JOB_ID: job_id,
        PREFIX: settings.bus.prefix,
        CAPTURE: lay_over(
            capture_json(loaded.config.capture, loaded.config.store, loaded.folder), capture
        ),
        RUNTIME_DIR: str(runtime_folder.shared_job_folder(base, folder)),
    }
    url = settings.bus.url
    if url.startswith("embedded:"):
        if settings.bus_origin == "default":
            place = default_place(run_facts.working_folder())
            if place.notice:
                print_line(place.notice)
            path = place.path
        else:
            origin = loaded.folder if settings.bus_origin == "file" else run_facts.working_folder()
            path = origin / Path(url.removeprefix("embedded:")).expanduser()
        url = f"embedded:{os.path.abspath(path)}"
    found[BUS] = url
    policy = before_update_policy(loaded.config, {**settings.labels, **(labels or {})})
    if policy.why_not:
        print_line(f"stop.before_update has no effect: {policy.why_not}")
    elif policy.checkpoint is not None and base.get(STOP) != "off":
        found[before_update.VARIABLE] = policy.checkpoint
    if loaded.config.stop.pin != "off":
        found[PIN] = loaded.config.stop.pin
    if loaded.config.stop.trusted_keys is not None:
        keys = tuple(loaded.folder / key for key in loaded.config.stop.trusted_keys)
        found[STOP_KEYS] = os.pathsep.join(str(key) for key in trusted_paths(base, keys))
    return found


def stopped_before(
    run_id: str | None, added: Mapping[str, str], base: Mapping[str, str]
) -> Predecessor | None:
    """The incarnation of this run before this one, if a stop ended it. A run with a new id has
    none; for others this may block for `predecessor_search.TIMEOUT_S`.
    """
    if run_id is None and RUN_ID not in base and scheduler_job(base) is None:
        return None
    url = added[BUS]
    return find_predecessor(url, added[PREFIX], added[RUN_ID], base, kafka_opener(url, base))


class Services:
    """Helper, listener and, on Kafka, sampler of this node; they live on its local rank 0."""

    def __init__(
        self,
        environ: MutableMapping[str, str],
        added: Mapping[str, str],
        loaded: LoadedConfig,
        *,
        helper: bool,
    ) -> None:
        """Lay `added` over `environ`, and start the helper. Raises OSError."""
        self._environ = environ
        self._before = {name: environ.get(name) for name in (*added, LAUNCHER)}
        environ.update(added)
        self._folder: Final = Path(added[RUNTIME_DIR])
        self._log: Final = self._folder / "helper.log"
        self._mine = rank_of(environ)[1] == 0
        environ[LAUNCHER] = str(self._folder / datagrams.LAUNCHER_SOCKET)
        self._listener: ThreadListener | ListenerChild | None = None
        self._helper: HelperChild | None = None
        self._entry: Entry | None = None
        self._base: Final = loaded.folder
        # Where others judge the run nobody else looks at this node.
        self._samples = helper and not added[BUS].startswith("embedded:")
        if helper and self._mine and added[BUS].startswith("embedded:"):
            words = helper_words(
                added[RUN_ID],
                added[BUS],
                since_ms=unix_ms(),
                config=loaded.path,
                stop=environ.get(STOP) != "off",
                incarnation=incarnation_id(added[RUN_ID], added[JOB_ID], restart_count(environ), 0),
            )
            self._helper = HelperChild(helper_command(words), self._log)

    def listen(self, training: Training) -> None:
        """Hear stops, once the training's identity is known. Raises OSError."""
        if self._helper is None and not (self._samples and self._mine):
            self._register(training)
        if not self._mine:
            return
        url = self._environ[BUS]
        if url.startswith("embedded:"):
            orders = None if self._helper is None else self._helper.orders
            self._listener = ListenerChild(
                training.origin, url, self._environ[PREFIX], self._folder, orders
            )
            return

        reader = CheckpointReader(training.origin.run_id, training.emit)
        pins = Pins(training.origin.run_id, how_to_pin(self._environ), training.emit)

        async def sample(bus: Bus) -> None:
            topics = Topics(self._environ[PREFIX])
            plan = NodePlan.read(self._environ.get(CAPTURE, ""), self._base)
            folder = run_facts.working_folder()
            report = NodeReport(
                bus, topics, training.origin, folder=folder, plan=plan, environ=self._environ
            )
            report.node.root_pid = os.getpid()
            await report.run()

        async def beside(bus: Bus) -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(reader.run(), name="checkpoints")
                if self._samples:
                    tasks.create_task(sample(bus), name="sample")

        listener = ThreadListener(
            kafka_opener(url, self._environ),
            Topics(self._environ[PREFIX]),
            training.origin,
            training.emit,
            datagrams.Endpoint(self._folder / datagrams.LAUNCHER_SOCKET),
            on_obeyed=lambda trainer, command: pins.keep(
                command.last_good_checkpoint, command.incarnation
            ),
            on_saved=reader.receive,
            beside=beside,
        )
        self._listener = listener
        listener.start()

    def _register(self, training: Training) -> None:
        """For whoever samples this node: this process is one of the run's."""
        registration = Registration(
            run_id=training.origin.run_id,
            incarnation=training.origin.incarnation,
            bus=self._environ[BUS],
            prefix=self._environ[PREFIX],
            job_pid=os.getpid(),
            folder=str(run_facts.working_folder()),
            visible=self._environ.get("CUDA_VISIBLE_DEVICES", ""),
        )
        try:
            self._entry = NodeFolder.from_environ(self._environ).leave(registration)
        except OSError as error:
            print_line(f"this process is not registered for `tocsin sample`: {error}")

    def close(self) -> None:
        """End both, and take the environment back; waits for the helper's deliveries."""
        try:
            if self._entry is not None:
                self._entry.remove()
            helper = self._helper if self._helper is not None and self._helper.is_ours else None
            code = None if helper is None else helper.drain()
            if self._listener is not None:
                # Before the helper's fallback: the listener holds the pipe on which it sees EOF.
                self._listener.close()
            if helper is not None:
                helper.close()
                self._report(code)
            if self._mine:
                runtime_folder.remove_folder(self._folder)
        finally:
            for name, value in self._before.items():
                if value is None:
                    self._environ.pop(name, None)
                else:
                    self._environ[name] = value

    def _report(self, code: int | None) -> None:
        if code == LEFTOVERS:
            print_line(
                "some deliveries are pending; to finish, run `tocsin actions` on the same bus"
            )
        elif code is None:
            print_line(
                f"rules and actions did not finish within {DRAIN_S:g} s; "
                "to finish, run `tocsin rules` and `tocsin actions` on the same bus"
            )
        elif code != 0:
            try:
                lines = self._log.read_text(errors="replace").strip().splitlines()
            except OSError:
                lines = []
            last = f": {lines[-1]}" if lines else ""
            print_line(f"the helper, which runs rules and actions, exited with {code}{last}")
