"""Sections that a later release reads: their outer shape is checked, and they are refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from tocsin.schemas.configuration.document import Plain
from tocsin.schemas.configuration.problems import Loc, Problem
from tocsin.schemas.configuration.validation import expected, not_supported_yet, unknown_key

_LISTS: Final[Mapping[str, tuple[str, ...]]] = {
    "policy": ("match", "may_stop_on"),
}

LATER_SECTIONS: Final = frozenset({*_LISTS, "targets"})


def later_section(key: str, raw: Plain) -> Iterator[Problem]:
    """What is wrong with such a section; that it is not supported yet, if nothing else is."""
    found = False
    for problem in _wrong(key, raw, (key,)):
        found = True
        yield problem
    if not found:
        yield not_supported_yet((key,), f"the section {key!r}")


def _wrong(key: str, raw: Plain, loc: Loc) -> Iterator[Problem]:
    if raw is None:
        return
    if key in _LISTS:
        if not isinstance(raw, list):
            yield expected("a list", raw, loc, hint="begin each entry with '- '")
            return
        for index, entry in enumerate(raw):
            yield from _keys(entry, (*loc, index), _LISTS[key])
    elif not isinstance(raw, dict):
        yield expected("a mapping of names", raw, loc)
    else:
        for name, entry in raw.items():
            if not isinstance(entry, dict):
                yield expected("a mapping", entry, (*loc, name))


def _keys(raw: Plain, loc: Loc, known: tuple[str, ...]) -> Iterator[Problem]:
    if not isinstance(raw, dict):
        yield expected(f"a mapping with {', '.join(known)}", raw, loc)
        return
    for key in raw:
        if key not in known:
            yield unknown_key(key, (*loc, key), known)
