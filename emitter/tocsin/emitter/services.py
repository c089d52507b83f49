"""What `start()` runs where there is no launcher: the environment, the helper, an ear for stops."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Final

from tocsin.bus.place import default_place
from tocsin.bus.port import Bus
from tocsin.emitter import facts, link
from tocsin.emitter.enforcer import StopOrder
from tocsin.emitter.helper_child import HelperChild, helper_command
from tocsin.emitter.identity import (
    rank_of,
    resolve_job_id,
    resolve_run_id,
    restart_count,
    scheduler_job,
)
from tocsin.emitter.listener import ThreadListener
from tocsin.emitter.members import Trainer
from tocsin.emitter.node_folder import Entry, NodeFolder, Registration
from tocsin.emitter.node_report import NodePlan, NodeReport
from tocsin.emitter.sender import say
from tocsin.emitter.settings import (
    BUS,
    CAPTURE,
    JOB_ID,
    LAUNCHER,
    PREFIX,
    RUN_ID,
    RUNTIME_DIR,
    lay_over,
)
from tocsin.emitter.stop_command import STOP, STOP_KEYS, trusted_paths
from tocsin.emitter.training import Training, bus_opener
from tocsin.schemas.config import LoadedConfig
from tocsin.schemas.config_settings import resolve_settings
from tocsin.schemas.control import StopRequested
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.identity import incarnation_id
from tocsin.schemas.topics import Topics

FIRST_RECORD_S: Final = 1.5
"""How long the listener waits for the sender's first record before it opens the bus, seconds."""

LEFTOVERS: Final = 3
"""Exit code of a helper that leaves something in the ledger."""


def environment(
    run_id: str | None, loaded: LoadedConfig, base: Mapping[str, str], *, capture: str = ""
) -> dict[str, str]:
    """What a launcher would have put into the environment of this process.

    `capture` is JSON, laid over the section of the file.

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
    job_id = resolve_job_id(base)
    found = {
        RUN_ID: resolve_run_id(run_id, base),
        PREFIX: settings.bus.prefix,
        CAPTURE: lay_over(loaded.config.capture.model_dump_json(exclude_defaults=True), capture),
        RUNTIME_DIR: str(link.shared_job_folder(base, job_id)),
    }
    if not several or JOB_ID in base or scheduler_job(base) is not None:
        # Else rank 0's is handed to all when the process group is made.
        found[JOB_ID] = job_id
    url = settings.bus.url
    if url.startswith("embedded:"):
        if settings.bus_origin == "default":
            place = default_place(facts.working_folder())
            if place.notice:
                say(place.notice)
            path = place.path
        else:
            origin = loaded.folder if settings.bus_origin == "file" else facts.working_folder()
            path = origin / Path(url.removeprefix("embedded:")).expanduser()
        url = f"embedded:{os.path.abspath(path)}"
    found[BUS] = url
    if loaded.config.stop.trusted_keys is not None:
        keys = tuple(loaded.folder / key for key in loaded.config.stop.trusted_keys)
        found[STOP_KEYS] = os.pathsep.join(str(key) for key in trusted_paths(base, keys))
    return found


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
        environ[LAUNCHER] = str(self._folder / link.LAUNCHER_SOCKET)
        self._listener: ThreadListener | None = None
        self._helper: HelperChild | None = None
        self._entry: Entry | None = None
        self._base: Final = loaded.folder
        # Where others judge the run nobody else looks at this node.
        self._samples = helper and not added[BUS].startswith("embedded:")
        if helper and self._mine and added[BUS].startswith("embedded:"):
            command = helper_command(
                added[RUN_ID],
                added[BUS],
                since_ms=time.time_ns() // 1_000_000,
                config=loaded.path,
                stop=environ.get(STOP) != "off",
                incarnation=_first_incarnation(added, environ),
            )
            self._helper = HelperChild(command, self._log)

    def listen(self, training: Training) -> None:
        """Hear stops, once the training's identity is known. Raises OSError."""
        if self._helper is None and not (self._samples and self._mine):
            self._register(training)
        if not self._mine:
            return
        open_bus = bus_opener(self._environ.get(BUS), self._environ)

        def open_after_the_first_record() -> Bus:
            # It is the sender that makes the topics of an embedded bus. In the listener's thread.
            until = time.monotonic() + FIRST_RECORD_S
            while training.sender.records == 0 and time.monotonic() < until:
                time.sleep(0.01)
            return open_bus()

        async def sample(bus: Bus) -> None:
            topics = Topics(self._environ[PREFIX])
            plan = NodePlan.read(self._environ.get(CAPTURE, ""), self._base)
            folder = facts.working_folder()
            report = NodeReport(
                bus, topics, training.speaker, folder=folder, plan=plan, environ=self._environ
            )
            report.node.root_pid = os.getpid()
            await report.run()

        self._listener = ThreadListener(
            open_after_the_first_record,
            Topics(self._environ[PREFIX]),
            training.speaker,
            training.emit,
            self._folder,
            on_obeyed=None if self._helper is None else self._enforce,
            on_left=None if self._helper is None else self._helper.left,
            beside=sample if self._samples else None,
        )
        self._listener.start()

    def _register(self, training: Training) -> None:
        """For whoever samples this node: this process is one of the run's."""
        registration = Registration(
            run_id=training.speaker.run_id,
            incarnation=training.speaker.incarnation,
            bus=self._environ[BUS],
            prefix=self._environ[PREFIX],
            job_pid=os.getpid(),
            folder=str(facts.working_folder()),
            visible=self._environ.get("CUDA_VISIBLE_DEVICES", ""),
        )
        try:
            self._entry = NodeFolder.of(self._environ).leave(registration)
        except OSError as error:
            say(f"this process is not registered for `tocsin sample`: {error}")

    def _enforce(self, trainer: Trainer, command: StopRequested) -> None:
        """Without a launcher it is the helper that ends a rank which does not leave."""
        if self._helper is not None:
            self._helper.stop(
                StopOrder(
                    pid=trainer.pid,
                    rank=trainer.rank,
                    world_size=trainer.world_size,
                    incarnation=command.incarnation,
                    command_id=command.command_id,
                    issue_id=command.issue_id,
                    grace_s=command.grace_s,
                )
            )

    def close(self) -> None:
        """End both, and take the environment back; waits for the helper's deliveries."""
        try:
            if self._entry is not None:
                self._entry.remove()
            if self._helper is not None:
                self._report(self._helper.drain())
            if self._listener is not None:
                self._listener.close()
            if self._mine:
                link.remove_folder(self._folder)
        finally:
            for name, value in self._before.items():
                if value is None:
                    self._environ.pop(name, None)
                else:
                    self._environ[name] = value

    def _report(self, code: int | None) -> None:
        if code == LEFTOVERS:
            say("some deliveries are not done; `tocsin actions` on the same bus finishes them")
        elif code != 0:
            try:
                lines = self._log.read_text(errors="replace").strip().splitlines()
            except OSError:
                lines = []
            last = f": {lines[-1]}" if lines else ""
            say(f"the helper with rules and actions ended with {code}{last}")


def _first_incarnation(added: Mapping[str, str], environ: Mapping[str, str]) -> str | None:
    """Of this job's first training; None while the job is not known yet."""
    if JOB_ID not in added:
        return None
    return incarnation_id(added[RUN_ID], added[JOB_ID], restart_count(environ), 0)
