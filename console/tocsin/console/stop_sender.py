"""`tocsin stop`: sends a person's stop and follows what the run answers, on either bus.

The answers are read from the run's telemetry, where the run itself puts them: the run's view needs
a rules worker that lives. The view, where there is one, says which training is meant; what
telemetry has beyond it is read first.
"""

from __future__ import annotations

import getpass
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from tocsin.actions.stop import signed_record
from tocsin.bus.port import Bus, From, Partition, Reader, Record
from tocsin.bus.reading import read_to_end
from tocsin.console.issue_choice import choose_run
from tocsin.console.setting import Setting
from tocsin.console.stop_request import (
    LISTENERS,
    Answers,
    Target,
    requested_line,
    stop_event,
    under_way_line,
)
from tocsin.console.views import CommandSeen, event_data, read_commands, read_runs
from tocsin.schemas.config_values import parse_duration
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.events import clip
from tocsin.schemas.runs import RunData
from tocsin.schemas.signing import keys_folder, own_key
from tocsin.schemas.topics import Topics, telemetry_partition
from tocsin.schemas.wire import TYPE

QUIET_S: Final = 5.0
"""After so long without an answer a line says so."""

BEYOND_GRACE_S: Final = 20.0
"""How much longer than both graces (for the edge, and after SIGTERM) the default wait is."""

_HEARD_MS: Final = 60_000
_POLL_S: Final = 1.0
_DAY_S: Final = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StopOptions:
    """What the person said. `wait_s` None is as long as an escalation takes, 0 not at all."""

    run: str
    reason: str
    grace_s: float
    wait_s: float | None = None


def read_options(run: str, reason: str, *, grace: str, wait_s: float | None) -> StopOptions:
    """Check what was said.

    Raises:
        ConfigurationError: the reason is empty, or the grace is no time of at most a day.
    """
    if not reason.strip():
        raise ConfigurationError(
            "--reason: expected a few words; they stand in the run's summary and in `tocsin why`"
        )
    try:
        grace_s = parse_duration(grace) / timedelta(seconds=1)
    except ValueError as error:
        raise ConfigurationError(f"--grace {grace}: {error}") from None
    if grace_s > _DAY_S:
        raise ConfigurationError(f"--grace {grace}: expected at most 1d")
    return StopOptions(run=run, reason=reason.strip(), grace_s=grace_s, wait_s=wait_s)


@dataclass(frozen=True, slots=True)
class StopOutcome:
    """The command's exit code, and its JSON object."""

    exit_code: int
    document: str


async def stop_run(
    setting: Setting,
    options: StopOptions,
    environ: Mapping[str, str],
    say: Callable[[str], None],
) -> StopOutcome:
    """Ask a run to stop, and follow it; `say` gets each line for the person as it comes.

    Raises:
        ConfigurationError: there is no such run, it has ended, or no key can be made.
        BusUnavailable: the bus does not answer.
    """
    folder = keys_folder(environ)
    key = own_key(folder)
    topics = setting.topics
    async with setting.open_bus(create=False) as bus:
        target, reader = await _find(bus, topics, options.run)
        try:
            async for data, at_ms in _read_what_is_there(reader, topics, target.run_id):
                target = target.after(data, at_ms)
            target.check()
            commands = await read_commands(bus, topics, target.run_id)
            stop = target.under_way
            asked: CommandSeen | None
            if stop is not None:
                asked = commands.get(stop.command_id)
                answers = Answers(stop.command_id, asked, stop, key=str(folder / "actions.pub"))
                first = under_way_line(target, stop, asked)
            else:
                now_ms = time.time_ns() // 1_000_000
                event = stop_event(
                    target,
                    clip(options.reason),
                    requested_by=_requested_by(),
                    grace_s=options.grace_s,
                    now_ms=now_ms,
                )
                producer = await bus.producer()
                try:
                    await producer.publish([signed_record(topics, json.loads(event.encode()), key)])
                finally:
                    await producer.close()
                asked = CommandSeen(event.data, now_ms)
                command_id = event.data.command_id
                answers = Answers(command_id, asked, None, key=str(folder / "actions.pub"))
                first = requested_line(target, command_id)
            say(first)
            wait_s = options.wait_s
            if wait_s is None:
                wait_s = 2 * options.grace_s + BEYOND_GRACE_S
            last = await _follow(reader, target, answers, wait_s, say)
        finally:
            await reader.close()
    good = answers.ending == "stopped" or (wait_s == 0 and answers.ending is None)
    document = answers.as_json(target, sent=stop is None, said=last or first)
    return StopOutcome(0 if good else 1, document)


async def _find(bus: Bus, topics: Topics, text: str) -> tuple[Target, Reader]:
    """The training that is meant, and a reader of all that the run says beyond its view."""
    runs = await read_runs(bus, topics)
    try:
        view = choose_run(runs, text)
    except ConfigurationError:
        # No rules worker has made a view of it. A run that lives says so every ten seconds.
        since = From.time(time.time_ns() // 1_000_000 - _HEARD_MS)
        reader = await bus.reader({Partition(topics.telemetry, telemetry_partition(text)): since})
        found = [data async for data, _ in _read_what_is_there(reader, topics, text)]
        if not found:
            await reader.close()
            raise
        target = Target(text, found[0].incarnation)
        for data in found:
            target = target.after(data, 0)
        return target, reader
    place = Partition(topics.telemetry, telemetry_partition(view.run_id))
    return Target.of(view), await bus.reader({place: From.offset(view.next_offset)})


async def _read_what_is_there(
    reader: Reader, topics: Topics, run_id: str
) -> AsyncIterator[tuple[RunData, int]]:
    ends = await reader.ends([Partition(topics.telemetry, telemetry_partition(run_id))])
    async for records in read_to_end(reader, ends):
        for record in records:
            if (data := _said(record, run_id)) is not None:
                yield data, record.append_ms


async def _follow(
    reader: Reader, target: Target, answers: Answers, wait_s: float, say: Callable[[str], None]
) -> str | None:
    """Until the stop is over or the wait is; the last line that was said."""
    last: str | None = None
    began_s = time.monotonic()
    quiet = True
    while answers.ending is None and (left_s := began_s + wait_s - time.monotonic()) > 0:
        for record in await reader.poll(timeout_s=min(_POLL_S, left_s)):
            data = _said(record, target.run_id)
            line = None if data is None else answers.take(data, record.append_ms)
            if line is not None:
                last = line
                say(f"  {line}")
        if quiet and not answers.heard and time.monotonic() - began_s > QUIET_S:
            quiet = False
            say(f"  no answer after {QUIET_S:g} s: {LISTENERS}")
    if answers.ending is None and wait_s > 0:
        last = answers.unconfirmed(wait_s)
        say(f"  {last}")
    return last


def _said(record: Record, run_id: str) -> RunData | None:
    """An event of that run; the numbers, which are most of telemetry, are not decoded."""
    if record.key != run_id.encode():
        return None
    if not (record.header(TYPE) or b"").startswith((b"tocsin.run.", b"tocsin.stop.")):
        return None
    data = event_data(record)
    return data if isinstance(data, RunData) and data.run_id == run_id else None


def _requested_by() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "somebody"  # a user without a name, as in some containers
    return clip(f"{user}@{socket.gethostname()}", 200)
