"""The Python API: watch a training from its own code.

    from tocsin.emitter import start

    with start(labels={"team": "vision"}) as run:
        for batch in data:
            ...
            run.log({"accuracy": accuracy})

Under `tocsin run`, `start()` joins the launcher's run. Otherwise, on an embedded bus, it starts the
same helper process (rules and actions) unless `services=False`; on Kafka they run elsewhere. The
only exceptions are `ConfigurationError` for wrong arguments and `StopTraining` for a stop.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tocsin.emitter.capture import user_values
from tocsin.emitter.hooks import on_import
from tocsin.emitter.launch.in_process import Services, environment, stopped_before
from tocsin.emitter.process.environment import AFTER_STOP, LAUNCHER, RUN_ID
from tocsin.emitter.process.stderr import print_line
from tocsin.emitter.run import Run
from tocsin.emitter.stop.exception import StopTraining
from tocsin.emitter.training.context import current
from tocsin.emitter.training.session import Session
from tocsin.schemas.configuration.capture import capture_config
from tocsin.schemas.configuration.file import load_config, shared_config
from tocsin.schemas.errors import ConfigurationError

_run: Run | None = None
_inherited: Final[list[Run]] = []


def _in_child() -> None:
    # The parent's run is not this process's: `start()` here begins a training of its own. What was
    # inherited is kept: to end it, the spool's file or the Kafka client in it, is up to the parent.
    global _run
    if _run is not None:
        _inherited.append(_run)
    _run = None
    current.session = None


os.register_at_fork(after_in_child=_in_child)


def start(
    run_id: str | None = None,
    *,
    labels: Mapping[str, str] | None = None,
    config: str | Path | None = None,
    services: bool = True,
    capture: Mapping[str, object] | None = None,
) -> Run:
    """Monitor the training of this process.

    A second call returns the same run until `finish`.

    Args:
        run_id: id of the run; by default TOCSIN_RUN_ID, else the scheduler's id, else a new one.
        labels: labels of the run, in addition to TOCSIN_LABELS and those of the configuration.
        config: the configuration file; by default TOCSIN_CONFIG, else ./tocsin.yaml if it exists.
        services: start the helper (rules and actions) if there is no launcher. On an embedded bus,
            a small process that receives stops is started in any case.
        capture: the section `capture` of the configuration, for example
            `{"budget": "1%", "collections": {"gradients": {"every": 5}}}`. Its keys, and single
            collections, override those of the file or of the launcher.

    Raises:
        ConfigurationError: an argument or the configuration is wrong; nothing was started.
        StopTraining: this run was stopped before, and `stop.on_restart` is `hold`; nothing was
            started.
    """
    global _run
    if _run is not None and not _run.finished:
        return _run
    given = user_values.check_labels(labels)
    over = "" if capture is None else _capture(capture)
    launched = os.environ.get(RUN_ID) if os.environ.get(LAUNCHER) else None
    services_here: Services | None = None
    if launched is None:
        loaded = load_config(None if config is None else Path(config), os.environ)
        if loaded.shared is not None:
            print_line(shared_config(loaded.shared))
        given = {**loaded.config.labels, **given}
        try:
            added = environment(run_id, loaded, os.environ, capture=over, labels=given)
            before = stopped_before(run_id, added, os.environ)
            if before is not None:
                if loaded.config.stop.on_restart == "hold":
                    print_line(before.held("run id"))
                    raise StopTraining(before.reason)
                print_line(before.line)
                added[AFTER_STOP] = before.reason
            services_here = Services(os.environ, added, loaded, helper=services)
        except OSError as error:
            print_line(
                "start(): could not start the rule and action services; no rules will run for "
                f"this training: {error}"
            )
    elif run_id is not None and run_id != launched:
        raise ConfigurationError(
            f"this job was launched as run {launched!r}: start() cannot call it {run_id!r}; "
            "leave run_id out, or give it to `tocsin run --run-id`"
        )
    elif capture is not None and "system" in capture:
        raise ConfigurationError(
            "start: capture.system: the launcher samples this node; write it into tocsin.yaml"
        )
    session = current.session or Session(os.environ, current.isolation)
    session.labels.update(given)
    if launched is not None:
        session.capture = over
    if over and session.training is not None:
        print_line("start(): training is already running, so its capture settings were not changed")
    current.session = session
    _run = Run(session)
    if services_here is not None:
        session.after_begin = services_here.listen
        # At the end of the process the services are ended with the training.
        session.on_exit = services_here.close
    current.isolation.run("torch", on_import.when_torch_is_there)
    return _run


def _capture(capture: Mapping[str, object]) -> str:
    if not isinstance(capture, Mapping):
        raise ConfigurationError(
            f"start: capture: expected a mapping, found {type(capture).__name__}"
        )
    try:
        return capture_config(capture).model_dump_json(exclude_unset=True)
    except ConfigurationError as error:
        raise ConfigurationError(f"start: {error}") from error
