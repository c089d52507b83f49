"""When a notice is sent, with which others, and how often it is repeated: the configuration."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Final

from tocsin.actions.decision.issue_labels import issue_labels
from tocsin.schemas.configuration.receivers import ReceiverConfig, UrgentConfig
from tocsin.schemas.configuration.routing.routes import RouteEntry
from tocsin.schemas.configuration.sections import DefaultsConfig
from tocsin.schemas.records.deliveries import Repeats
from tocsin.schemas.records.issues import SEVERITIES, Issue

_MS: Final = timedelta(milliseconds=1)
_LONGEST: Final = 400


@dataclass(frozen=True, slots=True)
class NoticeTimes:
    """When to send the notices of each receiver, by the configuration.

    Attributes:
        urgent: by receiver.
    """

    group_by: Sequence[str] = ()
    wait_ms: int = 0
    repeat_ms: int | None = None
    urgent: Mapping[str, UrgentConfig] = field(default_factory=dict)

    @classmethod
    def from_config(
        cls, defaults: DefaultsConfig, receivers: Mapping[str, ReceiverConfig]
    ) -> NoticeTimes:
        """The times of a configuration, from its defaults and its receivers."""
        interval = defaults.repeat_interval
        return cls(
            defaults.group_by,
            defaults.group_wait // _MS,
            None if interval is None else interval // _MS,
            {name: one.urgent for name, one in receivers.items() if one.urgent is not None},
        )

    def for_route(self, route: RouteEntry | None) -> NoticeTimes:
        """What applies to the notices of a route; None: of no route."""
        if route is None:
            return self
        wait, interval = route.group_wait, route.repeat_interval
        return replace(
            self,
            group_by=self.group_by if route.group_by is None else route.group_by,
            wait_ms=self.wait_ms if wait is None else wait // _MS,
            repeat_ms=self.repeat_ms if interval is None else interval // _MS,
        )

    def group(self, issue: Issue) -> str:
        """The group of an issue."""
        return group_of(issue_labels(issue), self.group_by)

    def repeats(self, action: str, issue: Issue, now_ms: int, wait_ms: int) -> Repeats | None:
        """How often a receiver is reminded of an issue that fires now, or gets worse."""
        urgent = self.urgent.get(action)
        if urgent is not None:
            least = SEVERITIES.index(urgent.severity)
            if SEVERITIES.index(issue.severity) < least:
                urgent = None
        if urgent is None:
            if self.repeat_ms is None:
                return None
            return Repeats(every_ms=self.repeat_ms, wait_ms=wait_ms)
        return Repeats(
            every_ms=self.repeat_ms,
            urgent_every_ms=urgent.every // _MS,
            urgent_until_ms=now_ms + urgent.lasting // _MS,
            wait_ms=wait_ms,
        )


def group_of(labels: Mapping[str, str], by: Sequence[str]) -> str:
    """The group of an issue, as people read it: `run=gpt-1, rule=nonfinite`."""
    text = ", ".join(f"{name}={labels.get(name, '')}" for name in by) or "all"
    if len(text) <= _LONGEST:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{text[: _LONGEST - len(digest) - 1]}…{digest}"
