"""What is wrong with a configuration, in the words of its file."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping
from typing import Final, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tocsin.schemas.configuration.problems import Loc, Problem, did_you_mean, quoted
from tocsin.schemas.configuration.yaml_document import Plain, kind_of

ModelT = TypeVar("ModelT", bound=BaseModel)

# Below these keys a value may be a secret that was written out by mistake: never repeat it.
_SECRET_KEYS: Final = frozenset({"url", "headers", "key", "previous_key", "password"})

_EXPECTED: Final = {
    "string_type": "text",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "model_type": "a mapping",
    "dict_type": "a mapping",
    "mapping_type": "a mapping",
    "list_type": "a list",
    "tuple_type": "a list",
}


def problems_of_model(err: ValidationError, model: type[BaseModel], loc: Loc) -> Iterator[Problem]:
    """What pydantic found in the data at `loc`, in the words of the file."""
    errors = err.errors(include_url=False)
    problems = [_problem(error, model, loc) for error in errors]
    # A key with a typing error is also missing under its right name: one of the two is enough.
    meant = {(*f.loc[len(loc) : -1], f.hint) for f in problems if f.code == "unknown_key"}
    for error, problem in zip(errors, problems, strict=True):
        if error["type"] != "missing" or error["loc"] not in meant:
            yield problem


def parse_model(
    model: type[ModelT], raw: Plain, loc: Loc, problems: list[Problem]
) -> ModelT | None:
    """The section or part at `loc` as its model; None, with problems, when it is wrong."""
    try:
        return model.model_validate(raw)
    except ValidationError as err:
        problems.extend(problems_of_model(err, model, loc))
        return None


def expected(what: str, raw: Plain, loc: Loc, *, hint: str | None = None) -> Problem:
    """What was found at `loc` is something else than `what`."""
    return Problem(loc, f"expected {what}, got {kind_of(raw)}", hint=hint, hide_value=_hidden(loc))


def unknown_key(key: str, loc: Loc, known: tuple[str, ...]) -> Problem:
    """A problem for an unknown key; the nearest of the known ones is the hint."""
    hint = did_you_mean(key, known)
    message = f"unknown key {quoted(key)}"
    return Problem(loc, message, "unknown_key", hint, at="key", hide_value=loc[0] == "bus")


def keys_of(model: type[BaseModel]) -> tuple[str, ...]:
    """The keys of a model, as the file has them."""
    return tuple(field.alias or name for name, field in model.model_fields.items())


def _hidden(loc: Loc) -> bool:
    if loc[:1] == ("bus",):
        return "password" in loc
    return loc[:1] == ("secrets",) or any(part in _SECRET_KEYS for part in loc[1:])


def _problem(error: ErrorDetails, model: type[BaseModel], top: Loc) -> Problem:
    inner = error["loc"]
    at: Literal["key", "value"] = "value"
    if inner and inner[-1] == "[key]":
        inner, at = inner[:-1], "key"
    loc = (*top, *inner)
    owner = _owner(model, inner[:-1])
    key = str(inner[-1]) if inner else ""
    raw = error["input"]
    hide = _hidden(loc) or (isinstance(raw, str) and "@" in raw)
    match error["type"]:
        case "extra_forbidden":
            return unknown_key(key, loc, keys_of(owner))
        case "missing":
            message = f"the key {key!r} is missing"
            # In a model of a rule's author it may belong to another part of a union.
            fields = owner.model_fields.items()
            examples = next((f.examples for n, f in fields if key in (n, f.alias)), None)
            hint = f"{key}: {_in_yaml(examples[0])}" if examples else None
            return Problem((*top, *inner[:-1]), message, "missing_key", hint)
        case "literal_error":
            words = error["ctx"]["expected"].replace("'", "")
            known = [word.strip() for word in re.split(r",| or ", words)]
            hint = did_you_mean(raw, known, list_up_to=0) if isinstance(raw, str) else None
            got = repr(raw[:60]) if isinstance(raw, str) and not hide else kind_of(raw)
            return Problem(loc, f"expected {words}, got {got}", hint=hint, at=at, hide_value=hide)
        case "value_error":
            return Problem(loc, str(error["ctx"]["error"]), at=at, hide_value=hide)
        case kind if kind in _EXPECTED:
            return expected(_EXPECTED[kind], raw, loc)
    message = error["msg"].replace("Input should be", "expected a value").replace("String", "text")
    return Problem(loc, message, at=at, hide_value=hide)


def _owner(model: type[BaseModel], loc: Loc) -> type[BaseModel]:
    """The model that the value at `loc` inside `model` belongs to."""
    for part in loc:
        field = model.model_fields.get(str(part))
        model = _model_in(field.annotation) or model if field else model
    return model


def _model_in(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType) or get_origin(annotation) is not None:
        return next(filter(None, map(_model_in, get_args(annotation))), None)
    return None


def _in_yaml(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {_in_yaml(v)}" for k, v in value.items()) + "}"
    return str(value)
