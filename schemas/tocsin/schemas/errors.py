"""Errors of the whole project, grouped by what the caller does about them.

TocsinError
├── ConfigurationError      fix the configuration (or the command line), then start again
├── RecordError             skip this record: it goes to the dead letters, the service goes on
│   ├── MalformedRecord     the bytes are not of their type
│   ├── UnknownRecord       a type or major version that this release does not read
│   └── RecordTooLarge      over the limit of the bus
├── SignatureError          do not obey; answer with a refusal
└── UnavailableError        try again later
"""

from __future__ import annotations

import importlib.util
from typing import TypeVar

E = TypeVar("E", bound=BaseException)


class TocsinError(Exception):
    """Something went wrong in tocsin."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or type(self).__name__).splitlines()[0])


class ConfigurationError(TocsinError):
    """The configuration or the command line is wrong; nothing was started."""


class MissingExtra(ConfigurationError):
    """A part of tocsin that is installed on request is not there."""

    def __init__(self, extra: str, needed_for: str) -> None:
        super().__init__(
            f"{needed_for} needs the extra {extra!r}, which is not installed: "
            f"in the clone that you installed from, run: pip install '.[{extra}]'"
        )
        self.extra = extra


def require_extra(extra: str, needed_for: str, *libraries: str) -> None:
    """Raises MissingExtra: one of the libraries, which the extra brings, is not installed."""
    try:
        missing = any(importlib.util.find_spec(library) is None for library in libraries)
    except ModuleNotFoundError:
        # Of one that is within another.
        missing = True
    if missing:
        raise MissingExtra(extra, needed_for)


def first_error(group: BaseExceptionGroup[E]) -> E:
    """The first error of a group, however deep."""
    first = group.exceptions[0]
    return first_error(first) if isinstance(first, BaseExceptionGroup) else first


class RecordError(TocsinError):
    """This record cannot be used; it belongs in the dead letters."""


class MalformedRecord(RecordError):
    """The bytes of a record are not of its type."""


class UnknownRecord(RecordError):
    """The type or the major version of a record is not one that this release reads."""


class RecordTooLarge(RecordError):
    """A record is larger than the bus accepts."""

    def __init__(self, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"a record of {size_bytes:,} bytes is over the limit of {limit_bytes:,}")
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


class SignatureError(TocsinError):
    """A signature is missing, or not made by a trusted key over these bytes."""


class UnavailableError(TocsinError):
    """Something outside this process does not answer now; try again later."""
