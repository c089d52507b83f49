"""What to capture: the section `capture` of the configuration, handed down as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

from tocsin.emitter.plan.collections import DEFAULT_PLANS, NEVER, CollectionPlan, Schedule
from tocsin.schemas.records.collections import MODES, Kind, modes_of

Pacing = Literal["time", "steps"]
"""What decides how often is looked where no interval is given: what a look takes and what the
budget allows, or the number of the step alone. By steps the same training is looked at in the same
places on any machine, whatever that costs: for recordings that are compared.
"""


DEFAULT_BUDGET: Final = 0.005

FULL_BYTES: Final = 1_000_000_000
"""What a run may save of tensors in full."""

_SIZE: Final = re.compile(r"([0-9.]+)(B|kB|MB|GB|TB)")
_SIZES: Final = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True, slots=True)
class FullTensors:
    """Where tensors that are saved in full go.

    Attributes:
        url: a folder or the URL of a bucket; None: the store beside an embedded bus.
        budget_bytes: what a run may save, over all ranks and incarnations.
        options: of a bucket: `endpoint`, `region`.
    """

    url: str | None = None
    budget_bytes: int = FULL_BYTES
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    """What is captured.

    Attributes:
        budget: the share of the step time that capture may take, above 0 and at most 1.
        plans: the collections by name, those that are off too.
        pacing: what decides the intervals that are not given.
        full: where tensors go that are saved in full.
    """

    budget: float = DEFAULT_BUDGET
    plans: Mapping[str, CollectionPlan] = field(default_factory=lambda: DEFAULT_PLANS)
    pacing: Pacing = "time"
    full: FullTensors = field(default_factory=FullTensors)

    @property
    def collections(self) -> tuple[str, ...]:
        """What is captured in any mode, by name."""
        return tuple(name for name, plan in self.plans.items() if plan.on)

    def plan(self, name: str) -> CollectionPlan | None:
        """The collection of that name, if there is one."""
        return self.plans.get(name)

    def plans_of(self, kind: Kind) -> tuple[CollectionPlan, ...]:
        """The collections made of that kind that are captured in any mode."""
        return tuple(plan for plan in self.plans.values() if plan.of == kind and plan.on)


def capture_settings(text: str) -> CaptureSettings:
    """Read the section `capture` as JSON: as `tocsin.schemas.configuration.capture` has checked it,
    with `pacing`, which the file has not.

    Empty text gives the defaults. Keys that this release does not know are left out: a newer one
    may have launched the job.

    Raises:
        ValueError: it is not JSON of that form.
    """
    if not text:
        return CaptureSettings()
    try:
        section = json.loads(text)
        budget, pacing = section.get("budget"), section.get("pacing", "time")
        if pacing not in get_args(Pacing):
            raise ValueError(f"unknown pacing {pacing!r}")
        plans = dict(DEFAULT_PLANS)
        for name, options in section.get("collections", {}).items():
            if options != "off":
                plans[name] = _plan(name, options)
            elif name in DEFAULT_PLANS:
                plans[name] = replace(DEFAULT_PLANS[name], schedules=NEVER)
        share = DEFAULT_BUDGET if budget is None else float(budget.removesuffix("%")) / 100
        full = _full(section.get("full_tensors", {}))
        return CaptureSettings(share, MappingProxyType(plans), pacing, full)
    except (AttributeError, KeyError, TypeError, ValueError, re.error) as error:
        raise ValueError(
            f"expected the section `capture` as JSON that tocsin has checked: {error}"
        ) from error


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


def _mapping(raw: object, where: str) -> Mapping[str, object]:
    if not isinstance(raw, dict):
        raise ValueError(f"{where}: expected a mapping, found {type(raw).__name__}")
    return raw


# What is read below was checked before: here it is JSON of any kind.
def _plan(name: str, options: Mapping[str, Any]) -> CollectionPlan:
    default = DEFAULT_PLANS.get(name)
    of: Kind = options["of"] if default is None else default.of
    schedules = dict(NEVER if default is None else default.schedules)
    saves: frozenset[int] = frozenset()
    if options.get("save") == "full":
        saves = frozenset(options.get("steps", ()))
        options = {key: value for key, value in options.items() if key != "steps"}
    # One that is named is on while training, unless its modes switch it off.
    beside = schedules["train"] = _schedule(options)
    modes = options.get("modes", {})
    for mode in MODES:
        if mode in modes:
            schedules[mode] = None if modes[mode] == "off" else _schedule(modes[mode])
    if "global" in modes:
        # It applies to each mode without a section, and is none of its own.
        named = {*modes, *(("train",) if beside != Schedule() else ())}
        schedules |= {mode: schedules["global"] for mode in modes_of(of) if mode not in named}
        schedules["global"] = None
    columns = options.get("columns")
    return CollectionPlan(
        name,
        of,
        MappingProxyType(schedules),
        columns=None if columns is None else _texts(columns),
        match=tuple(map(re.compile, _texts(options.get("match", ())))),
        module_types=_texts(options.get("module_types", ())),
        tensors=frozenset(_texts(options.get("tensors", ()))),
        saves=saves,
    )


def _full(options: Mapping[str, Any]) -> FullTensors:
    budget, size_bytes = options.get("budget"), FULL_BYTES
    if budget is not None:
        match = _SIZE.fullmatch(budget)
        if match is None:
            raise ValueError(f"full_tensors: {budget!r} is not a size")
        size_bytes = round(float(match[1]) * _SIZES[match[2]])
    given = {key: options[key] for key in ("endpoint", "region") if options.get(key) is not None}
    return FullTensors(options.get("url"), size_bytes, given)


def _schedule(options: Mapping[str, Any]) -> Schedule:
    every = options.get("every")
    return Schedule(
        every=None if every == "auto" else every,
        start=options.get("start", 0),
        end=options.get("end"),
        steps=frozenset(options.get("steps", ())),
    )


def _texts(given: str | Iterable[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)
