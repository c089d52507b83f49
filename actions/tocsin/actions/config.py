"""The parts of the configuration that are ours: receivers, targets, and who is notified."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from tocsin.actions.decision.decide import Decisions
from tocsin.actions.decision.notice_times import NoticeTimes
from tocsin.actions.decision.routing import Routing
from tocsin.actions.decision.silences import configured
from tocsin.actions.decision.stop_guards import StopGuards
from tocsin.actions.decision.time_windows import TimeWindows
from tocsin.actions.digests.intervals import DigestReceiver
from tocsin.actions.receivers.notify_option import parse_addresses
from tocsin.actions.receivers.registry import ReceiverKinds
from tocsin.actions.receivers.run_addresses import RunAddresses
from tocsin.actions.targets.registry import TargetKinds
from tocsin.schemas.configuration.file import Config, SectionValidator
from tocsin.schemas.configuration.problems import Loc, Problem, did_you_mean, quoted
from tocsin.schemas.configuration.sources import Sources, read_files
from tocsin.schemas.configuration.values import format_duration
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.issues import Issue


def receiver_problems(kinds: ReceiverKinds) -> SectionValidator:
    """The validator of the section `receivers`, for `SectionRegistry.register("receivers", …)`.

    It finds what is wrong with receivers, and with the rules' action lists, beyond their shape.
    """

    def find(config: Config) -> Iterator[Problem]:
        for name, receiver in config.receivers.items():
            kind, loc = kinds.kind_of(receiver), ("receivers", name)
            yield from kind.check(receiver, loc)
            if receiver.digest is not None and not kind.digests(receiver):
                message = f"this receiver of the type {receiver.type} cannot show a digest"
                hint = "a receiver of the type email or chat"
                yield Problem((*loc, "digest"), message, "digest_not_shown", hint, at="key")
        for rule in config.rules:
            listed: set[str] = set()
            for action in rule.actions or ():
                what = action.receiver or action.kind
                if what in listed:
                    message = f"{quoted(what)} is already in this list"
                    yield Problem(action.loc, message, "duplicate_action", "remove it")
                listed.add(what)

    return find


def target_problems(kinds: TargetKinds) -> SectionValidator:
    """The validator of the section `targets`: what is wrong with them beyond their shape."""

    def find(config: Config) -> Iterator[Problem]:
        for name, target in config.targets.items():
            yield from kinds.kind_of(target).check(target, ("targets", name))

    return find


def repeat_problems(config: Config) -> Iterator[Problem]:
    """Repeats that would come before the message that they repeat."""
    users: list[tuple[Loc, timedelta | None, timedelta | None]] = [
        (("defaults",), config.defaults.group_wait, config.defaults.repeat_interval),
        *((route.loc, route.group_wait, route.repeat_interval) for route in config.routes),
    ]
    for loc, own_wait, own_interval in users:
        wait = config.defaults.group_wait if own_wait is None else own_wait
        interval = config.defaults.repeat_interval if own_interval is None else own_interval
        if own_wait is None and own_interval is None:
            continue
        if interval is not None and interval <= wait:
            key = "group_wait" if own_interval is None else "repeat_interval"
            message = (
                f"notices repeat every {format_duration(interval)}, but a message waits "
                f"{format_duration(wait)} (group_wait)"
            )
            hint = "make repeat_interval longer than group_wait"
            yield Problem((*loc, key), message, "repeat_before_message", hint)


def window_problems(config: Config) -> Iterator[Problem]:
    """The validator of the section `time_windows`: whether this machine knows the time zones."""
    for name, window in config.time_windows.items():
        try:
            ZoneInfo(window.time_zone)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            zones = available_timezones()
            hint = did_you_mean(window.time_zone, zones, list_up_to=0)
            if not zones:
                hint = "install the package tzdata: this machine has no time zones"
            message = f"unknown time zone {window.time_zone!r}"
            loc = ("time_windows", name, "time_zone")
            yield Problem(loc, message, "unknown_time_zone", hint)


def decisions_of(config: Config, routing: Routing, *, limited: bool = True) -> Decisions:
    """All stages of a configuration, with its routing. `limited`: whether its limits apply."""
    return Decisions(
        routing,
        silences=configured(config.silences, routing.place),
        inhibit=config.inhibit,
        windows=TimeWindows(config.time_windows),
        receivers=config.receivers,
        times=NoticeTimes.from_config(config.defaults, config.receivers),
        guards=StopGuards(
            config.defaults.mode, config.limits.stops if limited else None, routing.place
        ),
    )


def digests_of(config: Config, routing: Routing) -> dict[str, DigestReceiver]:
    """The receivers that are notified once in an interval that all is well."""
    return {
        name: DigestReceiver(
            receiver.type,
            receiver.digest // timedelta(milliseconds=1),
            routing.place(("receivers", name, "digest")),
        )
        for name, receiver in config.receivers.items()
        if receiver.digest is not None
    }


def routing_of(
    config: Config,
    *,
    path: Path | None = None,
    notify: Sequence[str] = (),
    addresses: RunAddresses | None = None,
    stops_off: str | None = None,
) -> Routing:
    """The decisions of a configuration. Reads its file once more, for the places: may block."""
    named = parse_addresses(notify)
    kinds = {name: item.type for name, item in config.receivers.items()}
    kinds |= {name: address.config.type for name, address in named.items()}

    def addresses_of_its_run(issue: Issue) -> list[tuple[str, str]]:
        found = [] if addresses is None else addresses.addresses_of(issue.incarnation)
        return [(address.name, address.config.type) for address in found]

    return Routing(
        {rule.name: rule for rule in config.rules},
        list(named),
        stops_off,
        places(path),
        kinds,
        {
            name: item.send_resolved
            for name, item in config.receivers.items()
            if item.send_resolved is not None
        },
        config.defaults.send_resolved,
        addresses_of_its_run,
        config.routes,
    )


def places(path: Path | None) -> Callable[[Loc], str]:
    """Says `tocsin.yaml:14:3` for a part of a file; without the file, the way to it."""
    try:
        named = None if path is None else read_files(Path(path.name), folder=path.parent)
    except ConfigurationError:
        named = None
    sources = None if named is None else Sources.from_texts(named)

    @cache
    def place(loc: Loc) -> str:
        return "config: " + ".".join(map(str, loc)) if sources is None else str(sources.place(loc))

    return place
