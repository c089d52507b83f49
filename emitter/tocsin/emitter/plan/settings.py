"""What to capture, as the section `capture` of the configuration says it, handed down as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, Literal, cast, get_args

from tocsin.emitter.plan.collections import DEFAULT_PLANS, NEVER, CollectionPlan, Schedule
from tocsin.schemas.records.collections import KINDS, MODES, Kind, modes_of

Pacing = Literal["time", "steps"]
"""What decides how often is looked where no interval is given: what a look takes and what the
budget allows, or the number of the step alone. By steps the same training is looked at in the same
places on any machine, whatever that costs: for recordings that are compared.
"""


DEFAULT_BUDGET: Final = 0.005


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    """What is captured.

    Attributes:
        budget: the share of the step time that capture may take, above 0 and at most 1.
        plans: the collections by name, those that are off too.
        pacing: what decides the intervals that are not given.
    """

    budget: float = DEFAULT_BUDGET
    plans: Mapping[str, CollectionPlan] = field(default_factory=lambda: DEFAULT_PLANS)
    pacing: Pacing = "time"

    @property
    def collections(self) -> tuple[str, ...]:
        """What is captured in any mode, by name."""
        return tuple(name for name, plan in self.plans.items() if plan.on)

    def plan(self, name: str) -> CollectionPlan | None:
        """The collection of that name, if there is one."""
        return self.plans.get(name)

    def of(self, kind: Kind) -> tuple[CollectionPlan, ...]:
        """The collections made of that kind that are captured in any mode."""
        return tuple(plan for plan in self.plans.values() if plan.of == kind and plan.on)


def capture_settings(text: str) -> CaptureSettings:
    """Read the section `capture` as JSON, in the form of the configuration file; `pacing`, which
    that has not, too.

    Empty text gives the defaults. Keys that this release does not know are left out: it may be a
    newer one that has launched the job, and it has checked them.

    Raises:
        ValueError: it is not JSON of that shape; the message says where.
    """
    if not text:
        return CaptureSettings()
    section = _mapping(json.loads(text), "capture")
    budget = _share(section["budget"]) if "budget" in section else DEFAULT_BUDGET
    plans = dict(DEFAULT_PLANS)
    for name, options in _mapping(section.get("collections", {}), "collections").items():
        if options == "off":
            plans.pop(name, None)
            if name in DEFAULT_PLANS:
                plans[name] = replace(DEFAULT_PLANS[name], schedules=NEVER)
        else:
            plans[name] = _plan(name, options)
    return CaptureSettings(budget, MappingProxyType(plans), _pacing(section.get("pacing", "time")))


def lay_over(text: str, over: str) -> str:
    """A section as JSON with another laid over it: its keys hold, and its collections one by one.

    Raises:
        ValueError: one of them is not JSON of that shape.
    """
    if not over:
        return text
    below = _mapping(json.loads(text or "{}"), "capture")
    above = _mapping(json.loads(over), "capture")
    collections = [_mapping(part.get("collections", {}), "collections") for part in (below, above)]
    return json.dumps({**below, **above, "collections": {**collections[0], **collections[1]}})


def _plan(name: str, raw: object) -> CollectionPlan:
    where = f"collection {name!r}"
    default = DEFAULT_PLANS.get(name)
    options = _mapping(raw, where)
    of = default.of if default is not None else _kind(options.get("of"), where)
    schedules = dict(NEVER if default is None else default.schedules)
    # One that is named is on while training, unless its modes say otherwise.
    beside = schedules["train"] = _schedule(options, where)
    modes = _mapping(options.get("modes", {}), f"{where}: modes")
    for mode in MODES:
        if mode in modes:
            here = f"{where}, mode {mode!r}"
            entry = modes[mode]
            schedules[mode] = None if entry == "off" else _schedule(_mapping(entry, here), here)
    if "global" in modes:
        # What holds in each mode of which nothing is said; none of its own.
        said = {*modes, *(("train",) if beside != Schedule() else ())}
        schedules |= {mode: schedules["global"] for mode in modes_of(of) if mode not in said}
        schedules["global"] = None
    columns = options.get("columns")
    return CollectionPlan(
        name,
        of,
        MappingProxyType(schedules),
        columns=None if columns is None else _texts(columns, f"{where}: columns"),
        match=tuple(_pattern(text, where) for text in _texts(options.get("match", ()), where)),
        module_types=_texts(options.get("module_types", ()), f"{where}: module_types"),
        tensors=frozenset(_texts(options.get("tensors", ()), f"{where}: tensors")),
    )


def _schedule(options: Mapping[str, object], where: str) -> Schedule:
    every, end = options.get("every"), options.get("end")
    steps = options.get("steps", [])
    if not isinstance(steps, list):
        raise ValueError(f"{where}: expected 'steps' as a list")
    return Schedule(
        every=None if every in (None, "auto") else _count(every, f"{where}: 'every'", 1),
        start=_count(options.get("start", 0), f"{where}: 'start'", 0),
        end=None if end is None else _count(end, f"{where}: 'end'", 1),
        steps=frozenset(_count(step, f"{where}: 'steps'", 0) for step in steps),
    )


def _mapping(raw: object, where: str) -> Mapping[str, object]:
    if not isinstance(raw, dict):
        raise ValueError(f"{where}: expected a mapping, found {type(raw).__name__}")
    return raw


def _count(raw: object, where: str, least: int) -> int:
    if not isinstance(raw, int) or isinstance(raw, bool) or raw < least:
        raise ValueError(f"{where}: expected a whole number of at least {least}")
    return raw


def _texts(raw: object, where: str) -> tuple[str, ...]:
    texts = [raw] if isinstance(raw, str) else raw
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{where}: expected text, or a list of texts")
    return tuple(texts)


def _pattern(text: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"{where}: 'match' is no regular expression: {error}") from error


def _kind(raw: object, where: str) -> Kind:
    for kind in KINDS:
        if raw == kind:
            return kind
    raise ValueError(f"{where}: expected 'of' as one of {', '.join(KINDS)}")


def _pacing(raw: object) -> Pacing:
    for pacing in get_args(Pacing):
        if raw == pacing:
            return cast("Pacing", pacing)
    raise ValueError(f"pacing: expected one of {', '.join(get_args(Pacing))}, found {raw!r}")


def _share(raw: object) -> float:
    try:
        share = float(raw.removesuffix("%")) / 100 if isinstance(raw, str) else -1.0
    except ValueError:
        share = -1.0
    if not isinstance(raw, str) or not raw.endswith("%") or not 0 < share <= 1:
        raise ValueError(f"budget: expected a percentage like 0.5%, found {raw!r}")
    return share
