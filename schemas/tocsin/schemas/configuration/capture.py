"""The section `capture`: its values, and how they are read, each mistake with its place.

The file has it, and `start(capture=…)` takes it in the same form.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Annotated, Final, Literal

from pydantic import Field, PlainSerializer, PlainValidator, WithJsonSchema, field_validator

from tocsin.schemas.configuration.problems import Loc, Problem, did_you_mean, quoted
from tocsin.schemas.configuration.sections import Section
from tocsin.schemas.configuration.validation import expected, parse_model, unknown_key
from tocsin.schemas.configuration.values import (
    Duration,
    FilePath,
    FolderOrBucket,
    Name,
    Percent,
    Size,
    parse_name,
)
from tocsin.schemas.configuration.yaml_document import Plain
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.collections import (
    KINDS,
    MODES,
    OWN_FRAMES,
    Kind,
    Mode,
    columns_of,
    modes_of,
)

Off = Literal["off"]

DEFAULT_BUDGET: Final = 0.005
MAX_STEP: Final = 1_000_000_000_000
MAX_COLLECTIONS: Final = 100

_SCHEDULE: Final = ("every", "start", "end", "steps")
_SELECTORS: Final = ("match", "module_types", "tensors")
_TEXT: Final = {"type": "string", "minLength": 1}
_CLASS: Final = re.compile(r"[^\W\d]\w*")


def _interval(value: object) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1_000_000_000:
        raise ValueError("expected a whole number of steps, at least 1, or auto")
    return value


def _texts(value: object) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not 1 <= len(texts) <= 1_000:
        raise ValueError("expected text, or a list of 1 to 1,000 texts")
    if not all(isinstance(text, str) and 1 <= len(text) <= 400 for text in texts):
        raise ValueError("expected texts of 1 to 400 characters")
    return tuple(texts)


_AS_IS: Final = PlainSerializer(lambda value: value)

Interval = Annotated[
    int | Literal["auto"],
    PlainValidator(_interval),
    _AS_IS,
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 10**9}, {"const": "auto"}]}
    ),
]
"""Steps between two summaries."""

Texts = Annotated[
    tuple[str, ...],
    PlainValidator(_texts),
    _AS_IS,
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}]}),
]
"""One text or several."""

StepNumber = Annotated[int, Field(strict=True, ge=0, le=MAX_STEP)]


class ScheduleConfig(Section):
    """When a collection is summarised in one mode."""

    every: Interval = Field(default="auto", examples=[10])
    """Summarise each n-th step, counted from `start`; `auto`: as often as the budget allows. Unit:
    steps."""
    start: StepNumber = Field(default=0, examples=[1000])
    """The first step. Unit: steps."""
    end: StepNumber | None = Field(default=None, examples=[2000])
    """The first step that is no longer captured; absent: never. Unit: steps."""
    steps: tuple[StepNumber, ...] = Field(
        default=(), strict=False, max_length=10_000, examples=[[0, 1, 500]]
    )
    """Steps that are summarised in any case; without `every`, only those. Unit: steps."""


SAVED_KINDS: Final[tuple[Kind, ...]] = ("gradients", "weights", "biases")
"""Of these the tensors themselves can be saved."""


class FullTensorsConfig(Section):
    """Where tensors that are saved in full go, and how much of them a run may save."""

    url: FolderOrBucket | None = Field(default=None, examples=["s3://ml-runs/tocsin"])
    """A folder, or `s3://BUCKET/PREFIX` (also `gs://` and `az://`). Absent: the store."""
    budget: Size = Field(default=1_000_000_000, examples=["20GB"])
    """What a run may save, over all ranks and restarts; beyond it nothing more is saved. Unit: a
    size."""


class CollectionConfig(ScheduleConfig):
    """What is summarised of one kind of tensors; the schedule beside `modes` is that of `train`."""

    of: (
        Literal["gradients", "weights", "biases", "activations", "inputs", "optimizer_state"] | None
    ) = Field(default=None, examples=["weights"])
    """The source of a custom collection. It needs one of the three keys below."""
    match: Texts = Field(default=(), examples=["(query|key)"])
    """Regular expressions, one of which is found in the tensor's name."""
    module_types: Texts = Field(default=(), examples=[["LayerNorm", "Embedding"]])
    """Class names of the modules whose tensors belong to it."""
    tensors: Texts = Field(default=(), examples=[["head.weight"]])
    """Names of tensors that belong to it."""
    columns: tuple[str, ...] | None = Field(default=None, strict=False, examples=[["l2", "absmax"]])
    """Statistics and counts that are computed; absent: all of its kind."""
    save: Literal["full"] | None = Field(default=None, examples=["full"])
    """`full`: save the tensors themselves at the steps in `steps`, within
    `capture.full_tensors.budget`; summaries continue as without it. Of gradients, weights and
    biases."""
    modes: Mapping[Mode, Off | ScheduleConfig] = Field(
        default_factory=dict, examples=[{"eval": "off"}]
    )
    """`train`, `eval`, `predict` and `global`, each with its schedule or `off`; `global` applies to
    every mode without its own section. In `eval` and `predict` there are `losses`,
    `activations` and `inputs`; the latter two count batches of these evaluations, not steps."""


class SystemConfig(Section):
    """How the node is sampled."""

    interval: Duration = Field(
        default=timedelta(milliseconds=500), examples=["500ms"], validate_default=True
    )
    """Time between two samples, 100ms to 60s."""
    folders: tuple[FilePath, ...] = Field(default=(), strict=False, examples=[["/data"]])
    """Folders whose free disk space is sampled, beside the job's working folder; of several on one
    disk, the first."""

    @field_validator("interval")
    @classmethod
    def _bounded(cls, interval: timedelta) -> timedelta:
        if not timedelta(milliseconds=100) <= interval <= timedelta(seconds=60):
            raise ValueError("expected an interval of 100ms to 60s")
        return interval


class CaptureConfig(Section):
    """What the training process records."""

    budget: Percent = Field(default=DEFAULT_BUDGET, examples=["1%"])
    """What capture may cost, as a share of the step time: 0.01% to 100%. It decides how often
    collections with `every: auto` are summarised."""
    collections: Mapping[Name, Off | CollectionConfig] = Field(
        default_factory=dict,
        examples=[{"gradients": {"every": 10}}],
        json_schema_extra={"properties": {kind: {} for kind in KINDS}},
    )
    """Kinds of tensors by name (`losses`, `gradients`, `weights`, `biases`, `activations`,
    `inputs`, `optimizer_state`), and such of your own, each with its settings or `off`; those that
    are not named keep their defaults."""
    full_tensors: FullTensorsConfig = Field(default_factory=FullTensorsConfig)
    """Tensors that are saved in full: those of collections with `save: full`."""
    system: SystemConfig = Field(default_factory=SystemConfig)
    """How the node is sampled."""

    @field_validator("budget")
    @classmethod
    def _bounded(cls, budget: float) -> float:
        if not 0.0001 <= budget <= 1:
            raise ValueError("expected a budget of 0.01% to 100%")
        return budget


def parse_capture(raw: Plain, loc: Loc, problems: list[Problem]) -> CaptureConfig:
    """The section at `loc`; what is wrong in it is left out, and goes into `problems`."""
    if not isinstance(raw, dict):
        if raw is not None:
            problems.append(expected("a mapping", raw, loc))
        return CaptureConfig()
    rest: dict[str, Plain] = {key: value for key, value in raw.items() if key != "collections"}
    section = parse_model(CaptureConfig, rest, loc, problems) or CaptureConfig()
    listed, here = raw.get("collections"), (*loc, "collections")
    if not isinstance(listed, dict):
        if listed is not None:
            problems.append(expected("a mapping", listed, here))
        return section
    if len(listed) > MAX_COLLECTIONS:
        problems.append(Problem(here, f"expected at most {MAX_COLLECTIONS} collections"))
        return section
    collections = {}
    for name, options in listed.items():
        found = _collection(name, options, (*here, name), problems)
        if found is not None:
            collections[name] = found
    return section.model_copy(update={"collections": collections}) if collections else section


def capture_config(raw: Mapping[str, object]) -> CaptureConfig:
    """The section as code gives it, in the form of the file.

    Raises:
        ConfigurationError: something in it is wrong; all of it is in the message, key by key.
    """
    problems: list[Problem] = []
    section = parse_capture(_plain(raw), ("capture",), problems)
    if problems:
        raise ConfigurationError("; ".join(map(_in_words, problems)))
    return section


def _plain(value: object) -> Plain:
    """As the file would have it; what a file cannot hold as the text of its kind."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset | range):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise ConfigurationError(
        f"capture: expected mappings, lists, text and numbers, found {type(value).__name__}"
    )


def _in_words(problem: Problem) -> str:
    hint = f" (try: {problem.hint})" if problem.hint else ""
    return f"{'.'.join(map(str, problem.loc))}: {problem.message}{hint}"


# -- one collection


def _collection(
    name: str, raw: Plain, loc: Loc, problems: list[Problem]
) -> Off | CollectionConfig | None:
    before = len(problems)
    problems.extend(_wrong_name(name, raw, loc))
    if raw == "off":
        return "off"
    if not isinstance(raw, dict):
        problems.append(expected("a mapping, or off", raw, loc, hint="{every: 10}"))
        return None
    rest = {key: value for key, value in raw.items() if key != "modes"}
    found = parse_model(CollectionConfig, rest, loc, problems)
    modes = _modes(raw.get("modes"), (*loc, "modes"), problems)
    kind = name if name in KINDS else None if found is None else found.of
    for mode, entry in modes.items():
        if kind is not None and entry != "off" and mode not in ("global", *modes_of(kind)):
            message = f"{kind} cannot have a schedule in {mode}: only training steps change them"
            problems.append(Problem((*loc, "modes", mode), message, hint="remove it", at="key"))
    if "train" in modes and any(key in raw for key in _SCHEDULE):
        message = "train already has a schedule outside 'modes'"
        hint = "remove one of the two"
        problems.append(Problem((*loc, "modes", "train"), message, hint=hint, at="key"))
    if found is not None:
        problems.extend(_wrong_schedule(found, loc))
        problems.extend(_wrong_saving(found, kind, loc))
        problems.extend(_wrong_choice(name, found, raw, loc))
    if found is None or len(problems) > before:
        return None
    return found.model_copy(update={"modes": modes}) if modes else found


def _modes(raw: Plain, loc: Loc, problems: list[Problem]) -> dict[Mode, Off | ScheduleConfig]:
    if not isinstance(raw, dict):
        if raw is not None:
            problems.append(expected("a mapping like {eval: off}", raw, loc))
        return {}
    found: dict[Mode, Off | ScheduleConfig] = {}
    for key, value in raw.items():
        here = (*loc, key)
        mode = next((mode for mode in MODES if mode == key), None)
        if mode is None:
            problems.append(unknown_key(key, here, MODES))
        elif value == "off":
            found[mode] = "off"
        elif not isinstance(value, dict):
            problems.append(expected("a mapping, or off", value, here, hint="{every: 50}"))
        elif (schedule := parse_model(ScheduleConfig, value, here, problems)) is not None:
            problems.extend(_wrong_schedule(schedule, here))
            found[mode] = schedule
    return found


def _wrong_name(name: str, raw: Plain, loc: Loc) -> Iterator[Problem]:
    """What is wrong with the name, and with a collection of that name being there at all."""
    if name in KINDS:
        return
    try:
        parse_name(name)
    except ValueError as error:
        yield Problem(loc, str(error), "name", at="key")
        return
    if name in OWN_FRAMES:
        message = f"{name!r} is the name of a built-in collection"
        yield Problem(loc, message, "name", "another name", at="key")
    elif not isinstance(raw, dict) or "of" not in raw:
        near = did_you_mean(name, KINDS, list_up_to=0)
        if near is None and isinstance(raw, dict):
            message = "a custom collection needs the key 'of'"
            yield Problem(loc, message, "missing_key", "of: weights")
        else:
            message = f"unknown collection {quoted(name)}"
            yield Problem(
                loc, message, "unknown_collection", near or did_you_mean(name, KINDS), at="key"
            )


def _wrong_schedule(schedule: ScheduleConfig, loc: Loc) -> Iterator[Problem]:
    given = schedule.model_fields_set
    if schedule.end is not None and schedule.end <= schedule.start:
        yield Problem((*loc, "end"), f"expected an end after the start, which is {schedule.start}")
    if not schedule.steps or schedule.every != "auto":
        return
    if isinstance(schedule, CollectionConfig) and schedule.save is not None:
        # These are the steps that are saved; `every` decides those that are summarised.
        return
    if "every" in given:
        message = "with 'steps', 'every' must be a number"
        hint = "omit it to capture only these steps"
        yield Problem((*loc, "every"), message, hint=hint)
        return
    for key in ("start", "end"):
        if key in given:
            message = f"{key!r} limits 'every', which is missing; it does not apply to 'steps'"
            yield Problem((*loc, key), message, hint="every: 10", at="key")


def _wrong_saving(found: CollectionConfig, kind: str | None, loc: Loc) -> Iterator[Problem]:
    """What is wrong with tensors that are to be saved in full."""
    if found.save is None:
        return
    if kind is not None and kind not in SAVED_KINDS:
        message = f"{kind} cannot be saved in full: expected {', '.join(SAVED_KINDS)}"
        yield Problem((*loc, "save"), message, hint="remove it", at="key")
    if not found.steps:
        message = "'save' needs the steps at which to save"
        yield Problem((*loc, "save"), message, "missing_key", "steps: [0, 500]", at="key")


def _wrong_choice(
    name: str, found: CollectionConfig, raw: Mapping[str, Plain], loc: Loc
) -> Iterator[Problem]:
    """What is wrong with the tensors and columns that are chosen."""
    if name in KINDS:
        for key in ("of", *_SELECTORS):
            if key in found.model_fields_set:
                message = f"{key!r} is only for custom collections"
                hint = f"my-{name}: {{of: {name}, match: …}}"
                yield Problem((*loc, key), message, hint=hint, at="key")
        kind: Kind = name
    elif found.of is None:
        return
    else:
        kind = found.of
        if not any(getattr(found, key) for key in _SELECTORS):
            message = "expected at least one of 'match', 'module_types' and 'tensors'"
            yield Problem(loc, message, "missing_key", "match: attention")
    for index, text in enumerate(found.match):
        if (wrong := _wrong_pattern(text)) is not None:
            yield Problem(
                _item(raw, "match", index, loc), f"expected a regular expression: {wrong}"
            )
    for index, text in enumerate(found.module_types):
        if not _CLASS.fullmatch(text):
            message = "expected the name of a module's class, like LayerNorm"
            yield Problem(_item(raw, "module_types", index, loc), message)
    if found.columns == ():
        yield Problem((*loc, "columns"), "expected at least one column", hint="[l2]")
    known = columns_of(kind)
    for index, column in enumerate(found.columns or ()):
        if column not in known:
            message = f"unknown column {quoted(column)} of {kind}"
            near = did_you_mean(column, known, list_up_to=30)
            yield Problem((*loc, "columns", index), message, hint=near)


def _wrong_pattern(text: str) -> str | None:
    with warnings.catch_warnings():
        # What Python warns of here (a set within a set) it will read otherwise one day.
        warnings.simplefilter("error")
        try:
            re.compile(text)
        except (re.error, OverflowError, RecursionError, Warning) as error:
            return str(error)
    return None


def _item(raw: Mapping[str, Plain], key: str, index: int, loc: Loc) -> Loc:
    """Where one of several texts stands, or the only one."""
    return (*loc, key, index) if isinstance(raw[key], list) else (*loc, key)
