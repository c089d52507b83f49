"""Values of SageMaker Debugger's parameters, which are all texts, as values of ours. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Final

from tocsin.console.sagemaker.tables import Kind
from tocsin.schemas.configuration.values import format_duration
from tocsin.schemas.configuration.yaml_document import Plain
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.ids import check_run_id

COLLECTIONS: Final[Mapping[str, str]] = {
    "losses": "losses",
    "gradients": "gradients",
    "weights": "weights",
    "biases": "biases",
    "optimizer_variables": "optimizer_state",
    "inputs": "inputs",
    "input_image": "inputs",
    "input_sequence": "inputs",
    "outputs": "activations",
    "layers": "activations",
    "relu_output": "activations",
    "relu_input": "activations",
    "tanh_input": "activations",
    "sigmoid_input": "activations",
}
"""Its collections, and what holds the same here."""

# The first word that is found in a regular expression says what it is about.
_WORDS: Final = (
    ("gradient", "gradients/*"),
    ("bias", "weights/*bias*"),
    ("weight", "weights/*weight*"),
    ("input", "inputs/*"),
    ("output", "activations/*"),
    ("relu", "activations/*"),
    ("tanh", "activations/*"),
    ("sigmoid", "activations/*"),
)
_MODES: Final = {"EVAL": "eval", "TRAIN": "train", "GLOBAL": "train"}


class Unconvertible(ValueError):
    """A value that has no counterpart; the text says what was expected."""


def texts_of(value: Plain) -> list[str]:
    """A list, or a text with commas, as texts without white space around them."""
    items: Iterable[Plain] = value if isinstance(value, list) else str(value).split(",")
    return [text for item in items if (text := str(item).strip())]


def convert_value(value: Plain, kind: Kind) -> object:
    """The value as the configuration has it.

    Raises:
        Unconvertible: it is not of that kind, or there is no such value here.
    """
    match kind:
        case "number":
            return _number(value)
        case "whole":
            return _whole(value)
        case "flag":
            return _flag(value)
        case "seconds":
            return _duration(timedelta(seconds=1), value)
        case "minutes":
            return _duration(timedelta(minutes=1), value)
        case "numbers":
            return [_number(item) for item in texts_of(value)]
        case "mode":
            return _mode(value)
        case "tensors":
            return [_collection(name) for name in texts_of(value)]
        case "regex":
            return _patterns(value)
        case "run":
            return _run(value)


def _number(value: Plain) -> int | float:
    try:
        number = float(str(value).strip())
    except ValueError:
        raise Unconvertible("expected a number") from None
    if not math.isfinite(number):
        raise Unconvertible("expected a finite number")
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


def _whole(value: Plain) -> int:
    number = _number(value)
    if not isinstance(number, int):
        raise Unconvertible("expected a whole number")
    return number


def _flag(value: Plain) -> bool:
    word = str(value).strip().lower()
    if word not in ("true", "false", "1", "0"):
        raise Unconvertible("expected True or False")
    return word in ("true", "1")


def _duration(unit: timedelta, value: Plain) -> str:
    number = _number(value)
    try:
        return format_duration(number * unit)
    except OverflowError:
        raise Unconvertible("expected a shorter time") from None


def _mode(value: Plain) -> str:
    mode = _MODES.get(str(value).strip().upper().removeprefix("MODEKEYS."))
    if mode is None:
        raise Unconvertible("expected EVAL, TRAIN or GLOBAL")
    return mode


def _collection(name: str) -> str:
    if name not in COLLECTIONS:
        raise Unconvertible(f"there is no collection like {name!r}; name tensors in `tensors`")
    return f"{COLLECTIONS[name]}/*"


def _patterns(value: Plain) -> list[str]:
    found: list[str] = []
    for part in re.split(r"[|,]", str(value)):
        pattern = next((ours for word, ours in _WORDS if word in part.lower()), None)
        if pattern is None:
            raise Unconvertible("names of tensors are others here; name them in `tensors`")
        found.append(pattern)
    return list(dict.fromkeys(found))


def _run(value: Plain) -> str:
    names = texts_of(value)
    if len(names) != 1:
        raise Unconvertible("expected one run; for further ones, add entries with names")
    try:
        return check_run_id(names[0])
    except ConfigurationError:
        # A path in S3, as its libraries write it: a rule would look for a run of that name.
        raise Unconvertible("expected the id of a run on the bus") from None
