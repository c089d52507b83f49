"""The text of a tocsin.yaml from entries that were converted. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tocsin.console.configuration.field_texts import in_yaml

_WIDTH: Final = 100
_OTHERS: Final = (
    "Rules that are not listed here run as well, at their defaults; critical issues of some stop "
    "their run: docs/rules. With `rules: none` only those below do."
)
_ONLY: Final = "Only the rules that are listed here run. With `rules: all` the others do as well."


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry of `rules`, or only a comment in the place of one.

    Attributes:
        actions: None: what its severity asks for.
    """

    comment: Sequence[str]
    name: str = ""
    use: str = ""
    preset: str | None = None
    params: Mapping[str, object] = field(default_factory=dict)
    actions: Sequence[str] | None = None


def as_yaml(
    entries: Sequence[Entry],
    receivers: Mapping[str, Mapping[str, object]],
    capture: Mapping[str, object],
    *,
    source: str,
    only: bool,
    left_out: Sequence[str] = (),
) -> str:
    """The file; `left_out`: of `capture`, in words."""
    lines = [f"# Made from {_plain(source)} by `tocsin convert sagemaker`.", "version: 1"]
    lines += [
        "",
        *_comment(_ONLY if only else _OTHERS, ""),
        "defaults:",
        f"  rules: {'none' if only else 'all'}",
    ]
    if receivers:
        lines += ["", "receivers:"]
        lines += [f"  {name}: {in_yaml(options)}" for name, options in receivers.items()]
    if capture or left_out:
        comments = [line for text in left_out for line in _comment(f"not converted: {text}", "")]
        lines += ["", *comments, *(["capture:"] if capture else ()), *_block(capture, "  ")]
    rules = [entry for entry in entries if entry.name]
    lines += ["", "rules:" if rules else "rules: []"]
    for entry in entries:
        lines += _entry(entry)
    return "\n".join(lines) + "\n"


def _entry(entry: Entry) -> Iterator[str]:
    for text in entry.comment:
        yield from _comment(text, "  ")
    if not entry.name:
        return
    yield f"  - name: {in_yaml(entry.name)}"
    if entry.use != entry.name:
        yield f"    use: {entry.use}"
    if entry.preset is not None:
        yield f"    preset: {entry.preset}"
    if entry.params:
        yield "    params:"
        yield from (f"      {key}: {in_yaml(value)}" for key, value in entry.params.items())
    if entry.actions is not None:
        yield f"    actions: {in_yaml(list(entry.actions))}"


def _block(values: Mapping[str, object], before: str) -> Iterator[str]:
    """A section with one line for each collection."""
    for key, value in values.items():
        if key == "collections" and isinstance(value, Mapping):
            yield f"{before}{key}:"
            yield from (f"{before}  {name}: {in_yaml(one)}" for name, one in value.items())
        else:
            yield f"{before}{key}: {in_yaml(value)}"


def _comment(text: str, before: str) -> Iterator[str]:
    inner = len(text) - len(text.lstrip())
    start = f"{before}# {' ' * inner}"
    yield from textwrap.wrap(
        _plain(text.strip()), _WIDTH, initial_indent=start, subsequent_indent=start
    )


def _plain(text: str) -> str:
    """One line, with nothing that could end a comment."""
    return "".join(char if char.isprintable() else "?" for char in text)
