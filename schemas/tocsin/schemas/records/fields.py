"""Types of fields that several records share: ids, whole numbers, text.

They bound what a record may hold, so that whatever is read fits an int64, a file name, a terminal.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeVar

from pydantic import BeforeValidator, FailFast, Field

T = TypeVar("T")

MAX_TEXT: Final = 4096
"""Longest free text in an event, in characters; the sender cuts longer text with `clip`."""

MAX_ENTRIES: Final = 1024
"""Most entries of a mapping in an event: labels, versions, rules."""

MAX_INT: Final = 2**63 - 1
"""Largest number of a whole-number field: what an int64 and SQLite hold."""

Whole = Annotated[int, Field(ge=0, le=MAX_INT)]
"""A count, a step, an offset or a time: never negative, fits an int64."""

Positive = Annotated[int, Field(ge=1, le=MAX_INT)]
"""A count that begins at one, as a world size does."""

Step = Annotated[Whole, Field(examples=[1200])]
"""0-based count of steps of the primary optimizer in one incarnation."""

MAX_MILLIS: Final = 253_402_300_799_999
"""The last millisecond of the year 9999: what every calendar can show."""

Millis = Annotated[int, Field(ge=0, le=MAX_MILLIS, examples=[1795257600000])]
"""Unix time in milliseconds."""

ExitCode = Annotated[int, Field(ge=-(2**31), lt=2**32, examples=[79])]
"""What a process returned; 128 + n after signal n."""

RunId = Annotated[
    str,
    Field(
        max_length=200,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@+=-]*$",
        description="the run, as `tocsin.schemas.ids.check_run_id` allows it",
        examples=["gpt-2026-11-21"],
    ),
]
"""A run id: part of keys, file names and URLs, so one that could leave its folder is refused."""

Incarnation = Annotated[
    str,
    Field(
        max_length=64,
        pattern=r"^[A-Za-z0-9._:@+=-]*$",
        description="the training of that run: `tocsin.schemas.ids.incarnation_id`",
        examples=["0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11"],
    ),
]
"""The id of one training of one start of one job of a run."""


Id = Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9._:@+=-]+$")]
"""The id of an issue, a delivery or a command: it is in headers and in lines of text."""


def readable(text: str) -> str:
    """`text` with each lone surrogate replaced by `?`.

    Paths and arguments that are not UTF-8 reach python as surrogates, which JSON cannot carry.
    """
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _bounded(value: object) -> object:
    if isinstance(value, dict) and len(value) > MAX_ENTRIES:
        raise ValueError(f"expected at most {MAX_ENTRIES:,} entries, found {len(value):,}")
    return value


def _readable(value: object) -> object:
    return readable(value) if isinstance(value, str) else value


Word = Annotated[str, BeforeValidator(_readable)]
"""A name that comes from outside (a path, a label, a host)."""

Text = Annotated[str, BeforeValidator(_readable), Field(max_length=MAX_TEXT)]
"""Free text of at most `MAX_TEXT` characters."""

# A validator reports each bad element, at about 1 kB each: 2 MB of them took 4 s and 550 MB. So
# long sequences stop at the first one, and mappings are counted before they are looked into.
Many = Annotated[tuple[T, ...], FailFast()]
"""A sequence of any length, refused at its first bad element."""

Mapped = Annotated[dict[str, T], BeforeValidator(_bounded)]
"""A mapping of at most `MAX_ENTRIES` entries."""

Labels = Annotated[
    dict[Word, Word], BeforeValidator(_bounded), Field(examples=[{"env": "prod", "team": "vision"}])
]
"""Labels of a run, as `--label key=value` and the configuration give them."""
