"""`tocsin stop`: sends a person's stop and follows what the run answers, on either bus."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from tocsin.actions.delivery.stop_command import signed_record
from tocsin.bus.port import Bus, BusError, BusUnavailable, Outgoing, Reader
from tocsin.console.context import CommandContext
from tocsin.console.person import this_person
from tocsin.console.stop.answers import find_run, find_unanswered, go_back, read_beyond, run_event
from tocsin.console.stop.progress import (
    LISTENERS,
    Answers,
    away_line,
    check_running,
    requested_line,
    stop_event,
    stop_under_way,
    under_way_line,
    unsure_line,
)
from tocsin.console.views.bus_view import read_commands
from tocsin.schemas.configuration.values import parse_duration
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.exit_codes import FAILED
from tocsin.schemas.key_folder import keys_folder, own_key
from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.schemas.records.events import Event, clip
from tocsin.schemas.records.runs_fold import RunSeen
from tocsin.schemas.records.stops.commands import StopRequested

QUIET_S: Final = 5.0
"""After so long without an answer a line reports that."""

BEYOND_GRACE_S: Final = 20.0
"""How much longer than both graces (for the exit point, and after SIGTERM) the default wait is."""

LAUNCHER_S: Final = 2.0
"""How long a launcher may take to answer after all ranks have left."""

_POLL_S: Final = 1.0
_DAY_S: Final = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequest:
    """What the person asked for. `wait_s` None is as long as an escalation takes, 0 not at all;
    `by` None is this person.
    """

    run: str
    reason: str
    grace_s: float
    wait_s: float | None = None
    by: str | None = None


def read_options(
    run: str, reason: str, *, grace: str, wait_s: float | None, by: str | None = None
) -> StopRequest:
    """Check what was asked for.

    Raises:
        ConfigurationError: the reason is empty, or the grace is no time of at most a day.
    """
    if not reason.strip():
        raise ConfigurationError(
            "--reason: expected a few words; the run's summary and `tocsin why` show them"
        )
    try:
        grace_s = parse_duration(grace) / timedelta(seconds=1)
    except ValueError as error:
        raise ConfigurationError(f"--grace {grace}: {error}") from None
    if grace_s > _DAY_S:
        raise ConfigurationError(f"--grace {grace}: expected at most 1d")
    return StopRequest(run=run, reason=reason.strip(), grace_s=grace_s, wait_s=wait_s, by=by)


@dataclass(frozen=True, slots=True)
class StopOutcome:
    """The command's exit code, and its JSON object."""

    exit_code: int
    document: str


async def stop_run(
    context: CommandContext,
    options: StopRequest,
    environ: Mapping[str, str],
    print_line: Callable[[str], None],
) -> StopOutcome:
    """Ask a run to stop, and follow it; `print_line` gets each line for the person as it comes.

    Raises:
        ConfigurationError: there is no such run, it has ended, or no key can be made.
        BusError: the bus cannot be used, and no stop of the run was asked for.
    """
    folder = keys_folder(environ)
    topics = context.topics
    wait_s = options.wait_s
    if wait_s is None:
        wait_s = 2 * options.grace_s + BEYOND_GRACE_S
    async with context.open_bus(create=False) as bus:
        run, reader = await find_run(bus, topics, options.run)
        try:
            await read_beyond(reader, topics, run)
            check_running(run)
            trusted = context.trusted_paths(environ)
            stop = stop_under_way(run) or await find_unanswered(bus, topics, run, trusted)
            command = _command(run, options)
            command_id = command.id if stop is None else stop.command_id
            answers = Answers(run, command_id, key=str(folder / "actions.pub"))
            last = ""
            if stop is None:
                record = signed_record(topics, json.loads(command.encode()), own_key(folder))
                unsure = await _publish(bus, record)
                last = requested_line(run, command_id) if unsure is None else unsure
                print_line(last)
                if unsure is not None:
                    return StopOutcome(FAILED, answers.as_json(sent=False, message=last))
            try:
                seen = (await read_commands(bus, topics, run.run_id)).get(command_id)
                if seen is not None:
                    answers.requested(seen)
                if stop is not None:
                    last = under_way_line(run, stop, seen)
                    print_line(last)
                    known_ms = [*stop.states.values()]
                    if seen is not None:
                        known_ms.append(seen.append_ms)
                    await go_back(reader, topics, run.run_id, known_ms)
                last = await _follow(reader, run, answers, wait_s, print_line) or last
            except BusError as error:
                last = away_line(error)
                print_line(f"  {last}")
        finally:
            await reader.close()
    good = answers.ending == "stopped" or (wait_s == 0 and answers.ending is None)
    return StopOutcome(0 if good else FAILED, answers.as_json(sent=stop is None, message=last))


def _command(run: RunSeen, options: StopRequest) -> Event[StopRequested]:
    return stop_event(
        run,
        clip(options.reason),
        requested_by=options.by or this_person(),
        grace_s=options.grace_s,
        now_ms=unix_ms(),
    )


async def _publish(bus: Bus, record: Outgoing) -> str | None:
    """Put the command on the bus; why it is not known whether it came there, None if it did."""
    producer = await bus.producer()
    try:
        await producer.publish([record])
    except BusUnavailable as error:
        return unsure_line(error)
    finally:
        await producer.close()
    return None


async def _follow(
    reader: Reader, run: RunSeen, answers: Answers, wait_s: float, print_line: Callable[[str], None]
) -> str | None:
    """Until the stop is over or the wait is; the last line that was printed."""
    last: str | None = None
    began_s = time.monotonic()
    all_left_s: float | None = None
    quiet = True
    while answers.ending is None and (left_s := began_s + wait_s - time.monotonic()) > 0:
        for record in await reader.poll(timeout_s=min(_POLL_S, left_s)):
            data = run_event(record, run.run_id)
            line = None if data is None else answers.apply(data, record.append_ms)
            if line is not None:
                last = line
                print_line(f"  {line}")
        if answers.perhaps_over:
            all_left_s = time.monotonic() if all_left_s is None else all_left_s
            if time.monotonic() - all_left_s >= LAUNCHER_S:
                break
        if quiet and not answers.received and time.monotonic() - began_s > QUIET_S:
            quiet = False
            print_line(f"  no reply after {QUIET_S:g} s: {LISTENERS}")
    if answers.perhaps_over:
        answers.conclude()
    if answers.ending is None and wait_s > 0:
        last = answers.unconfirmed(wait_s)
        print_line(f"  {last}")
    return last
