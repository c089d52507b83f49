"""The part of the configuration that is ours: receivers, and the rules' action lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tocsin.actions.delivery.routing import Routing
from tocsin.actions.receivers.notify_option import parse_addresses
from tocsin.actions.receivers.registry import ReceiverKinds
from tocsin.actions.receivers.run_addresses import RunAddresses
from tocsin.schemas.configuration.file import Config, SectionValidator
from tocsin.schemas.configuration.problems import Loc, Problem, quoted
from tocsin.schemas.configuration.sources import Sources, read_files
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.issues import Issue


def receiver_problems(kinds: ReceiverKinds) -> SectionValidator:
    """The validator of the section `receivers`, for `SectionRegistry.register("receivers", …)`.

    It finds what is wrong with receivers, and with the rules' action lists, beyond their shape.
    """

    def find(config: Config) -> Iterator[Problem]:
        for name, receiver in config.receivers.items():
            yield from kinds.kind_of(receiver).check(receiver, ("receivers", name))
        for rule in config.rules:
            listed: set[str] = set()
            for action in rule.actions or ():
                what = action.receiver or action.kind
                if what in listed:
                    message = f"{quoted(what)} is in this list already"
                    yield Problem(action.loc, message, "duplicate_action", "remove it")
                listed.add(what)

    return find


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

    def of_its_run(issue: Issue) -> list[tuple[str, str]]:
        found = [] if addresses is None else addresses.of_run(issue.incarnation)
        return [(address.name, address.config.type) for address in found]

    return Routing(
        {rule.name: rule for rule in config.rules},
        list(named),
        stops_off,
        places(path),
        kinds,
        [name for name, item in config.receivers.items() if not item.send_resolved],
        of_its_run,
    )


def places(path: Path | None) -> Callable[[Loc], str]:
    """Says `tocsin.yaml:14:3` for a part of a file; without the file, the way to it."""
    try:
        named = None if path is None else read_files(Path(path.name), folder=path.parent)
    except ConfigurationError:
        named = None
    sources = None if named is None else Sources.of(named)

    def place(loc: Loc) -> str:
        return "config: " + ".".join(map(str, loc)) if sources is None else str(sources.place(loc))

    return place
