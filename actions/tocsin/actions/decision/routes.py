"""The stage of the routes: who is notified of an issue. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tocsin.actions.decision.planned import Place
from tocsin.schemas.configuration.routing.matches import labels_fit
from tocsin.schemas.configuration.routing.routes import RouteEntry
from tocsin.schemas.records.issues import Severity


@dataclass(frozen=True, slots=True)
class Routed:
    """A receiver that a route asks for, and the line that names it."""

    receiver: str
    route: RouteEntry
    decided_by: str


def matching(routes: Sequence[RouteEntry], labels: Mapping[str, str]) -> Iterator[RouteEntry]:
    """The routes that decide: the first that matches, and further ones after `also: true`."""
    for route in routes:
        if labels_fit(route.match, labels):
            yield route
            if not route.also:
                return


def routed(
    routes: Sequence[RouteEntry], labels: Mapping[str, str], severity: Severity, place: Place
) -> list[Routed]:
    """Whom the routes notify of an issue with these labels, each receiver once."""
    found: dict[str, Routed] = {}
    for route in matching(routes, labels):
        for receiver, loc in route.receivers(severity):
            found.setdefault(receiver, Routed(receiver, route, place(loc)))
    return list(found.values())
