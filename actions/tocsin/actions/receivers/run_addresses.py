"""Addresses of `--notify` that count for the issues of one launch each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tocsin.actions.receivers.notify_option import Notified, parse_notify
from tocsin.schemas.errors import ConfigurationError

ReadAddresses = Callable[[], Mapping[str, Sequence[str]]]
"""Reads the addresses by incarnation. May block; raises nothing."""


class RunAddresses:
    """Those that were kept somewhere; read again for whatever is not known yet.

    So a worker that runs for long finds the addresses of launches that have begun since.
    """

    def __init__(self, read: ReadAddresses) -> None:
        self._read = read
        self._of: Mapping[str, Sequence[str]] = {}

    def of(self, incarnation: str) -> list[Notified]:
        """The addresses for the issues of an incarnation. May block."""
        if incarnation not in self._of:
            self._of = self._read()
        return _parsed(self._of.get(incarnation, ()))

    def text_of(self, name: str) -> str | None:
        """The address that the ledger calls so; None if there is none. May block."""
        if (known := self._find(name)) is not None:
            return known
        self._of = self._read()
        return self._find(name)

    def _find(self, name: str) -> str | None:
        texts = (text for those in self._of.values() for text in those)
        return next((text for text in texts if any(a.name == name for a in _parsed([text]))), None)


def _parsed(texts: Sequence[str]) -> list[Notified]:
    found = []
    for text in texts:
        try:
            found.append(parse_notify(text))
        except ConfigurationError:
            continue  # kept by a release that knew more kinds
    return found
