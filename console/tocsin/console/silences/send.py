"""`tocsin silence`: puts signed silences on the bus, lists them, ends them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from rich.table import Table

from tocsin.actions.delivery.silence_records import read_silence
from tocsin.bus.port import Bus, Partition
from tocsin.console.context import CommandContext
from tocsin.console.person import reason_given
from tocsin.console.publication import publish_signed
from tocsin.console.views.bus_view import read_all
from tocsin.emitter.stop.verification import read_keys
from tocsin.schemas.configuration.entries import parse_label_key
from tocsin.schemas.configuration.routing.silences import Muted
from tocsin.schemas.configuration.values import parse_duration, parse_moment
from tocsin.schemas.errors import ConfigurationError, RecordError, SignatureError
from tocsin.schemas.ids import new_id
from tocsin.schemas.records.silences import SilenceSet
from tocsin.schemas.text import plain_line, time_text
from tocsin.schemas.topics import ISSUE_PARTITIONS, Topics

_SHORT: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SilenceRequest:
    """What a person wants to silence."""

    match: Mapping[str, tuple[str, ...]]
    until_ms: int
    by: str
    why: str
    mutes: tuple[Muted, ...]


def read_request(
    match: Sequence[str],
    *,
    lasts: str | None,
    until: str | None,
    by: str,
    why: str,
    mutes: Sequence[Muted],
    now_ms: int,
) -> SilenceRequest:
    """Check what was typed.

    Raises:
        ConfigurationError: a part of it is not one; the message names it.
    """
    if (lasts is None) == (until is None):
        raise ConfigurationError("expected either --for, like 2h, or --until")
    try:
        if lasts is not None:
            until_ms = now_ms + parse_duration(lasts) // timedelta(milliseconds=1)
        else:
            until_ms = round(1000 * parse_moment(until).timestamp())
    except ValueError as error:
        option = f"--for {lasts}" if lasts is not None else f"--until {until}"
        raise ConfigurationError(f"{option}: {error}") from None
    if until_ms <= now_ms:
        raise ConfigurationError("the silence has ended before it starts: expected a later end")
    if not reason_given(why):
        raise ConfigurationError("--why: expected a few words; `tocsin why` shows them")
    return SilenceRequest(
        match=_match(match),
        until_ms=until_ms,
        by=by,
        why=why.strip(),
        mutes=tuple(dict.fromkeys(mutes)) or ("notify",),
    )


async def add_silence(
    context: CommandContext, request: SilenceRequest, environ: Mapping[str, str], now_ms: int
) -> SilenceSet:
    """Put a new silence on the bus; returns once it is there.

    Raises:
        ConfigurationError: the key cannot be read or made.
        BusError: the bus does not answer.
    """
    silence = SilenceSet(
        silence_id=new_id(),
        match=dict(request.match),
        from_ms=now_ms,
        until_ms=request.until_ms,
        by=request.by,
        why=request.why,
        mutes=request.mutes,
        set_ms=now_ms,
    )
    async with context.open_bus(create=False) as bus:
        await _publish(bus, context.topics, silence, environ)
    return silence


async def list_silences(context: CommandContext, environ: Mapping[str, str]) -> list[SilenceSet]:
    """The silences of the bus that are signed by a key that is trusted here, by their end.

    Raises:
        BusError: the bus does not answer.
    """
    async with context.open_bus(create=False) as bus:
        return await _read(bus, context, environ)


async def expire_silence(
    context: CommandContext, text: str, *, by: str, environ: Mapping[str, str], now_ms: int
) -> SilenceSet:
    """End a silence now, by its id or the beginning of it.

    Raises:
        ConfigurationError: there is no such silence, there are several, or it has ended.
        BusError: the bus does not answer.
    """
    async with context.open_bus(create=False) as bus:
        silence = _chosen(await _read(bus, context, environ), text)
        if silence.until_ms <= now_ms:
            ended = time_text(silence.until_ms)
            raise ConfigurationError(f"silence {silence.silence_id[:_SHORT]} has ended at {ended}")
        # The newest record counts, and clocks differ.
        set_ms = max(now_ms, silence.set_ms + 1)
        changes = {"until_ms": now_ms, "set_ms": set_ms, "ended_by": by}
        silence = silence.model_copy(update=changes)
        await _publish(bus, context.topics, silence, environ)
    return silence


def silence_line(silence: SilenceSet, now_ms: int) -> str:
    """A silence in one line: `1a2b3c4d run=sweep-* until …, by ana: known bad rates`."""
    state = "until" if silence.until_ms > now_ms else "ended"
    what = "" if silence.mutes == ("notify",) else f", mutes {' and '.join(silence.mutes)}"
    why = f": {plain_line(silence.why)}" if silence.why else ""
    return (
        f"silence {silence.silence_id[:_SHORT]} {_match_text(silence)} {state} "
        f"{time_text(silence.until_ms)}{what}, by {plain_line(silence.by)}{why}"
    )


def silence_table(silences: Sequence[SilenceSet], now_ms: int) -> Table:
    """The silences, one in a row."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("id", "matches", "state", "mutes", "by", "why"):
        table.add_column(column, overflow="fold")
    for one in silences:
        table.add_row(
            one.silence_id[:_SHORT],
            _match_text(one),
            _state(one, now_ms),
            ", ".join(one.mutes),
            plain_line(one.by),
            plain_line(one.why),
        )
    return table


def as_json(silences: Sequence[SilenceSet]) -> str:
    """The silences for programs: one object with `version` and `silences`."""
    found = [one.model_dump(mode="json") for one in silences]
    return json.dumps({"version": 1, "silences": found}, indent=2, ensure_ascii=False)


def _state(silence: SilenceSet, now_ms: int) -> str:
    if silence.until_ms > now_ms:
        return f"until {time_text(silence.until_ms)}"
    by = f" by {plain_line(silence.ended_by)}" if silence.ended_by else ""
    return f"ended {time_text(silence.until_ms)}{by}"


def _match_text(silence: SilenceSet) -> str:
    return plain_line(
        " ".join(f"{key}={'|'.join(some)}" for key, some in sorted(silence.match.items()))
    )


def _match(pairs: Sequence[str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for pair in pairs:
        key, equals, pattern = pair.partition("=")
        try:
            if not equals or not pattern:
                raise ValueError("expected KEY=PATTERN, like run=sweep-* or rule=loss_spike")
            found[parse_label_key(key)] = (*found.get(key, ()), pattern)
        except ValueError as error:
            raise ConfigurationError(f"{pair[:200]!r}: {error}") from None
    if not found:
        raise ConfigurationError("expected KEY=PATTERN, like run=sweep-* or rule=loss_spike")
    return found


def _chosen(silences: Sequence[SilenceSet], text: str) -> SilenceSet:
    found = [one for one in silences if one.silence_id.startswith(text)] if text else []
    if len(found) != 1:
        what = "several silences begin" if found else "no silence begins"
        raise ConfigurationError(f"{what} with {text[:100]!r}; `tocsin silence list` lists them")
    return found[0]


async def _read(bus: Bus, context: CommandContext, environ: Mapping[str, str]) -> list[SilenceSet]:
    trusted = read_keys(context.trusted_paths(environ))
    found: dict[str, SilenceSet] = {}
    partitions = [Partition(context.topics.control, n) for n in range(ISSUE_PARTITIONS)]
    async for record in read_all(bus, partitions):
        try:
            one = read_silence(record, trusted)
        except (SignatureError, RecordError):
            continue  # the action service ignores it, too
        if one is not None and one.set_ms >= getattr(found.get(one.silence_id), "set_ms", 0):
            found[one.silence_id] = one
    return sorted(found.values(), key=lambda one: (one.until_ms, one.silence_id))


async def _publish(
    bus: Bus, topics: Topics, silence: SilenceSet, environ: Mapping[str, str]
) -> None:
    await publish_signed(bus, topics, silence, silence.key, environ, now_ms=silence.set_ms)
