"""Names that a file refers to: receivers, targets, time windows, secrets; and those given twice."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from tocsin.schemas.configuration.entries import ACTION_WORDS
from tocsin.schemas.configuration.policy import PolicyEntry, policy_problems
from tocsin.schemas.configuration.problems import Loc, Problem, did_you_mean, quoted
from tocsin.schemas.configuration.receivers import ReceiverConfig
from tocsin.schemas.configuration.routing.inhibitions import InhibitEntry
from tocsin.schemas.configuration.routing.routes import RouteEntry
from tocsin.schemas.configuration.sections import RuleEntry
from tocsin.schemas.configuration.values import NAME
from tocsin.schemas.configuration.yaml_document import Plain


class NamedParts:
    """What a file names, as it was written: of what is broken the name counts, too."""

    def __init__(self, raw: Plain) -> None:
        self._raw = raw if isinstance(raw, dict) else {}

    def unknown(
        self,
        rules: Sequence[RuleEntry],
        routes: Sequence[RouteEntry],
        receivers: Mapping[str, ReceiverConfig],
        policy: Sequence[PolicyEntry],
    ) -> Iterator[Problem]:
        """What is referred to and not there."""
        known = self._names("receivers")
        for rule in rules:
            for action in rule.actions or ():
                if action.receiver is not None and action.receiver not in known:
                    yield _unknown_receiver(action.receiver, action.loc, known, ACTION_WORDS)
                via = None if action.options is None else action.options.approve.via
                if via is not None and via not in known:
                    yield _unknown_receiver(via, (*action.loc, "stop", "approve", "via"), known)
                if action.kind == "by_route" and not self._raw.get("routes"):
                    message = "expected a section 'routes', which by_route needs"
                    yield Problem(action.loc, message, "no_routes", "a receiver's name")
        for route in routes:
            for name, loc in route.named():
                if name not in known:
                    yield _unknown_receiver(name, loc, known)
        yield from self._unknown_windows(routes, receivers)
        yield from policy_problems(policy, self._names("targets"))
        secrets = self._names("secrets")
        for section in ("bus", "receivers", "targets", "heartbeat"):
            for loc, name in _secret_references(self._raw.get(section), (section,)):
                if name not in secrets:
                    message = f"unknown secret {quoted(name)}"
                    hint = did_you_mean(name, secrets) or "name it in the section 'secrets'"
                    yield Problem(loc, message, "unknown_secret", hint)

    def _unknown_windows(
        self, routes: Sequence[RouteEntry], receivers: Mapping[str, ReceiverConfig]
    ) -> Iterator[Problem]:
        known = self._names("time_windows")
        users: list[tuple[RouteEntry | ReceiverConfig, Loc]] = [
            *((route, route.loc) for route in routes),
            *((receiver, ("receivers", name)) for name, receiver in receivers.items()),
        ]
        for user, loc in users:
            for key, names in (("active", user.active), ("mute", user.mute)):
                for index, name in enumerate(names):
                    if name not in known:
                        hint = did_you_mean(name, known) or "name it in the section 'time_windows'"
                        message = f"unknown time window {name!r}"
                        yield Problem((*loc, key, index), message, "unknown_time_window", hint)

    def _names(self, section: str) -> set[str]:
        found = self._raw.get(section)
        return set(found) if isinstance(found, dict) else set()


def named_twice(entries: Iterable[RouteEntry | InhibitEntry], what: str) -> Iterator[Problem]:
    """Entries of one list that have the name of an earlier one."""
    seen: set[str] = set()
    for entry in entries:
        if entry.name is not None and entry.name in seen:
            message = f"there is already {what} {entry.name!r}: give this one another name"
            yield Problem((*entry.loc, "name"), message, "duplicate_name")
        seen.add(entry.name or "")


def _unknown_receiver(
    name: str, loc: Loc, known: Collection[str], words: Collection[str] = ()
) -> Problem:
    if NAME.fullmatch(name):
        hint = did_you_mean(name, {*known, *words})
        return Problem(loc, f"unknown receiver {name!r}", "unknown_receiver", hint)
    # Whoever writes an address in the place of a name shows a token, mostly.
    message = "expected 'stop' or the name of a receiver" if words else "expected a receiver's name"
    hint = did_you_mean(name, known, list_up_to=0) or "put it under 'receivers', and its name here"
    return Problem(loc, message, "unknown_receiver", hint, hide_value=True)


def _secret_references(raw: Plain, loc: Loc) -> Iterator[tuple[Loc, str]]:
    if isinstance(raw, dict):
        if set(raw) == {"secret"} and isinstance(name := raw["secret"], str):
            yield (*loc, "secret"), name
            return
        for key, value in raw.items():
            yield from _secret_references(value, (*loc, key))
    elif isinstance(raw, list):
        for index, value in enumerate(raw):
            yield from _secret_references(value, (*loc, index))
