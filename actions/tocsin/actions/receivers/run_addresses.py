"""Addresses of `--notify` that count for the issues of one launch each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tocsin.actions.receivers.kind import Address
from tocsin.actions.receivers.notify_option import parse_notify
from tocsin.schemas.errors import ConfigurationError

ReadAddresses = Callable[[], Mapping[str, Sequence[str]]]
"""Reads the addresses by incarnation. May block; raises nothing."""


class RunAddresses:
    """The addresses of `--notify` that runs have kept; read again for whatever is not known yet.

    So a worker that runs for long finds the addresses of launches that have started since.
    """

    def __init__(self, read: ReadAddresses) -> None:
        self._read = read
        self._of: Mapping[str, Sequence[str]] = {}

    def addresses_of(self, incarnation: str) -> list[Address]:
        """The addresses for the issues of an incarnation. May block."""
        if incarnation not in self._of:
            self._of = self._read()
        return _parsed(self._of.get(incarnation, ()))

    def find(self, name: str) -> Address | None:
        """The address that the ledger calls so; None if there is none. May block."""
        if (known := self._known(name)) is not None:
            return known
        self._of = self._read()
        return self._known(name)

    def _known(self, name: str) -> Address | None:
        addresses = (one for texts in self._of.values() for one in _parsed(texts))
        return next((one for one in addresses if one.name == name), None)


def _parsed(texts: Sequence[str]) -> list[Address]:
    found = []
    for text in texts:
        try:
            found.append(parse_notify(text))
        except ConfigurationError:
            continue  # kept by a release that knew more kinds
    return found
