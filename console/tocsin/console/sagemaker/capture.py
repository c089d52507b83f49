"""SageMaker Debugger's collections and profiler interval as the section `capture`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from tocsin.console.sagemaker.reading import Found, Notes, Placed
from tocsin.console.sagemaker.values import COLLECTIONS, Unconvertible, convert_value, texts_of
from tocsin.schemas.configuration.capture import capture_config
from tocsin.schemas.configuration.problems import Loc
from tocsin.schemas.configuration.yaml_document import Plain
from tocsin.schemas.errors import ConfigurationError

_SCHEDULE: Final = {
    "save_interval": "every",
    "start_step": "start",
    "end_step": "end",
    "save_steps": "steps",
}
_IN_EVALUATIONS: Final = ("losses", "activations", "inputs")
_INTERVAL_THERE: Final = 500
_INTERVAL: Final = "ProfilingIntervalInMilliseconds"
_PATHS: Final = ("S3OutputPath", "LocalPath")

Section = dict[str, object]


def capture_of(found: Found, notes: Notes) -> Section:
    """The section; empty if the file says nothing of it."""
    section: Section = {}
    collections: dict[str, Section] = {}
    for placed in found.collections:
        _collection(placed, collections, notes)
    if kept := dict(_valid(collections, notes)):
        section["collections"] = kept
    for hook in found.hooks:
        _hook(hook, notes)
    for placed, what in (*((hook, "hook") for hook in found.hooks), (found.profiler, "profiler")):
        _paths(placed, what, notes)
    interval = found.profiler.data.get(_INTERVAL)
    if interval is not None:
        _interval(interval, (*found.profiler.loc, _INTERVAL), section, notes)
    return section


def _valid(collections: Mapping[str, Section], notes: Notes) -> Iterator[tuple[str, Section | str]]:
    """Those with a value, in the form of the configuration."""
    for name, options in collections.items():
        if options.get("end") == 0 and "steps" not in options:
            yield name, "off"
            continue
        if "steps" in options and not options.keys().isdisjoint({"start", "end"}):
            # There, the steps come beside the interval; here, in its place.
            options.setdefault("every", _INTERVAL_THERE)
        try:
            capture_config({"collections": {name: options}})
        except ConfigurationError as error:
            notes.add((), f"the collection {name} is left out: {error}")
            continue
        if options:
            yield name, options


def _collection(placed: Placed, collections: dict[str, Section], notes: Notes) -> None:
    name = placed.text("CollectionName") or ""
    ours = COLLECTIONS.get(name)
    if ours is None:
        message = f"there is no collection like {name[:60]!r}"
        notes.add(
            placed.loc,
            message,
            "capture.collections can have your own: docs/reference/configuration.md",
        )
        return
    if ours == "losses":
        # Losses are captured at every step, in every mode: they cost next to nothing.
        return
    options: Section = {}
    parameters = placed.inner("CollectionParameters")
    # That of a mode is more specific than that of all, whichever comes first.
    for key, value in sorted(parameters.data.items(), key=lambda item: "." in item[0]):
        mode, _, rest = key.rpartition(".")
        loc: Loc = (*parameters.loc, key)
        if rest not in _SCHEDULE:
            if rest not in ("include_regex", "save_histogram", "save_raw_tensor"):
                notes.add(loc, f"{key} has no counterpart: all statistics are captured")
            elif rest == "include_regex":
                notes.add(loc, f"all tensors of {ours} are captured, whatever their names")
            continue
        if mode in ("eval", "predict"):
            if ours not in _IN_EVALUATIONS:
                notes.add(loc, f"{ours} are captured in training only")
                continue
            modes = options.setdefault("modes", {})
            assert isinstance(modes, dict)
            _schedule(modes.setdefault(mode, {}), rest, value, loc, notes)
        else:
            _schedule(options, rest, value, loc, notes)
    before = collections.get(ours)
    collections[ours] = options if before is None else _together(before, options)


def _together(first: Section, second: Section) -> Section:
    """The schedule of two collections that are one here: as often as either asks."""
    if not first or not second:
        return first or second
    found = {**first, **second}
    both = [
        [one[key] for one in (first, second) if key in one] for key in ("every", "start", "end")
    ]
    every, start, end = ([n for n in numbers if isinstance(n, int)] for numbers in both)
    if every:
        found["every"] = min(every)
    for key, numbers, chosen in (("start", start, min), ("end", end, max)):
        # Of one that has none the first or the last step is captured.
        if len(numbers) == 2:
            found[key] = chosen(numbers)
        else:
            found.pop(key, None)
    modes = [one["modes"] for one in (first, second) if "modes" in one]
    if len(modes) == 2:
        (a, b) = modes
        assert isinstance(a, dict)
        assert isinstance(b, dict)
        found["modes"] = {mode: _together(a.get(mode, {}), b.get(mode, {})) for mode in a | b}
    return found


def _schedule(options: Section, key: str, value: Plain, loc: Loc, notes: Notes) -> None:
    try:
        if key == "save_steps":
            options["steps"] = [convert_value(item, "whole") for item in texts_of(value)]
            return
        number = convert_value(value, "whole")
    except Unconvertible as error:
        notes.add(loc, f"{key}: {error}")
        return
    assert isinstance(number, int)
    if number < (1 if key == "save_interval" else 0):
        notes.add(loc, f"{key}: expected a larger number")
    else:
        options[_SCHEDULE[key]] = number


def _hook(hook: Placed, notes: Notes) -> None:
    parameters = hook.inner("HookParameters")
    settings: Iterable[str] = parameters.data
    for key in settings:
        message = f"{key} of the hook is left out"
        notes.add((*parameters.loc, key), message, "say it for a collection: capture.collections")


def _paths(placed: Placed, what: str, notes: Notes) -> None:
    for key in _PATHS:
        if key in placed.data:
            message = f"{key} of the {what} is left out: records go to the bus and the store"
            notes.add((*placed.loc, key), message, "store.url names a folder or a bucket")


def _interval(value: Plain, loc: Loc, section: Section, notes: Notes) -> None:
    try:
        number = convert_value(value, "whole")
    except Unconvertible as error:
        notes.add(loc, f"{_INTERVAL}: {error}")
        return
    assert isinstance(number, int)
    if 100 <= number <= 60_000:
        section["system"] = {"interval": f"{number}ms"}
    else:
        notes.add(loc, f"{_INTERVAL}: expected 100 to 60,000 milliseconds")
