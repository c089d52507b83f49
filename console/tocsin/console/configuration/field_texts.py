"""What a model of the configuration says of its keys, in words and in the form of the file.

The page of the docs, the file that `init` writes and the summary of `check` are made of it, so that
none of them can say anything else than what is read.
"""

from __future__ import annotations

import json
import math
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import PurePath
from typing import (
    Annotated,
    Final,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tocsin.schemas.configuration.capture import Interval, Texts
from tocsin.schemas.configuration.docstrings import field_docstrings
from tocsin.schemas.configuration.routing.matches import Match
from tocsin.schemas.configuration.routing.routes import Notify
from tocsin.schemas.configuration.values import (
    Duration,
    FilePath,
    Moment,
    Name,
    Names,
    Percent,
    Secret,
    SecretRef,
    Size,
    TextOrSecret,
    UrlOrSecret,
    format_duration,
    format_percent,
)
from tocsin.schemas.configuration.yaml_document import load

REQUIRED: Final = "required"

_ALIASES: Final = (
    (Duration, "duration", "ms, s, m, h, d"),
    (Percent, "percentage", "%"),
    (Size, "size", "B, kB, MB, GB, TB"),
    (Interval, "whole number, ≥ 1, or `auto`", ""),
    (Texts, "text or list (text)", ""),
    (Name, "name", ""),
    (Names, "name or list (name)", ""),
    (Moment, "time", ""),
    (Match, "mapping (label: text or list (text))", ""),
    (Notify, "list (name) or mapping (severity: list (name))", ""),
    (FilePath, "path", ""),
    (Secret, "`{secret: NAME}`", ""),
    (TextOrSecret, "text or `{secret: NAME}`", ""),
    (UrlOrSecret, "URL or `{secret: NAME}`", ""),
)
_WORDS: Final[Mapping[object, str]] = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
}
_UNIT: Final = re.compile(r"\s*Unit: ((?:[^.;]|\.(?=\d))+)(?:; ((?:[^.]|\.(?=\d))+))?\.")
"""A point before a digit belongs to a number."""
_PLAIN: Final = re.compile(r"[A-Za-z0-9_./*][A-Za-z0-9_./%:@*-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldText:
    """One key, in words.

    Attributes:
        kind: what kind of value it takes, bounds included.
        unit: the unit of a bare number, or those that a value is written with; "" if it has none.
        default: in the form of the file; "" when absence has a meaning of its own, else `required`.
        example: in the form of the file, or "".
        parts: the models that its value (or each of its values) may be.
    """

    key: str
    kind: str
    unit: str
    default: str
    example: str
    meaning: str
    parts: tuple[type[BaseModel], ...]


def field_texts(model: type[BaseModel]) -> list[FieldText]:
    """All keys of a model, in its order."""
    hints = get_type_hints(model, include_extras=True)
    meanings = field_docstrings(model)
    return [
        _field(field.alias or key, field, hints[key], field.description or meanings.get(key, ""))
        for key, field in model.model_fields.items()
    ]


def in_yaml(value: object) -> str:
    """A value in one line, as the file would have it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, timedelta):
        return format_duration(value)
    if isinstance(value, SecretRef):
        return f"{{secret: {value.name}}}"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f"{value}".replace("inf", ".inf")
    if isinstance(value, int):
        return str(value)
    if isinstance(value, BaseModel):
        return in_yaml(
            {
                field.alias or key: getattr(value, key)
                for key, field in type(value).model_fields.items()
            }
        )
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{in_yaml(k)}: {in_yaml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, str | PurePath):
        return _text(str(value))
    if isinstance(value, Iterable):
        return "[" + ", ".join(map(in_yaml, value)) + "]"
    raise TypeError(f"no value of the configuration: {type(value).__name__}")


def summary_of(model: type[BaseModel]) -> str:
    """The first sentence about a model."""
    return (model.__doc__ or "").strip().splitlines()[0]


def _field(key: str, field: FieldInfo, hint: object, meaning: str) -> FieldText:
    hint = _without_none(hint)
    words, unit = _type(hint)
    meaning = " ".join(meaning.split())
    if (match := _UNIT.search(meaning)) is not None:
        rest = f" {match[2][0].upper()}{match[2][1:]}." if match[2] else ""
        meaning = meaning[: match.start()] + rest + meaning[match.end() :]
        # "a duration" says no more than the type does.
        unit = unit or match[1]
    example = in_yaml(field.examples[0]) if field.examples else ""
    return FieldText(
        key=key,
        kind=words + _bounds(field.metadata),
        unit=unit,
        default=_default(field, hint),
        example=example,
        meaning=meaning.strip(),
        parts=tuple(_parts(hint)),
    )


def _default(field: FieldInfo, hint: object) -> str:
    if field.is_required():
        return REQUIRED
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None or value is PydanticUndefined or isinstance(value, BaseModel):
        return ""
    if hint == Percent and isinstance(value, float):
        return format_percent(value)
    return in_yaml(value)


def _type(hint: object) -> tuple[str, str]:
    """In words, and the units that such a value is written with."""
    for alias, words, unit in _ALIASES:
        if hint == alias:
            return words, unit
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return " or ".join(f"`{in_yaml(value)}`" for value in arguments), ""
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type(part)[0] for part in arguments)), ""
    if origin in (tuple, list):
        return f"list ({_type(arguments[0])[0]})", ""
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"mapping (name: {_type(arguments[1])[0]})", ""
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return "mapping", ""
    return _WORDS.get(hint, "value"), ""


def _bounds(metadata: Iterable[object]) -> str:
    bounds = []
    for item in metadata:
        match item:
            case Ge(ge):
                bounds.append(f"≥ {ge:,}" if isinstance(ge, int) else f"≥ {ge}")
            case Gt(gt):
                bounds.append(f"> {gt:,}" if isinstance(gt, int) else f"> {gt}")
            case Le(le):
                bounds.append(f"≤ {le:,}" if isinstance(le, int) else f"≤ {le}")
            case Lt(lt):
                bounds.append(f"< {lt:,}" if isinstance(lt, int) else f"< {lt}")
    return ", " + ", ".join(bounds) if bounds else ""


def _without_none(hint: object) -> object:
    if get_origin(hint) not in (Union, types.UnionType):
        return hint
    parts = [part for part in get_args(hint) if part is not type(None)]
    if len(parts) == len(get_args(hint)):
        return hint
    rest = parts[0]
    for part in parts[1:]:
        rest = rest | part
    return rest


def _parts(hint: object) -> Iterator[type[BaseModel]]:
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        yield hint
    elif get_origin(hint) is not Literal:
        for argument in get_args(hint):
            yield from _parts(argument)


def _text(text: str) -> str:
    """Bare where every reader takes it for this text, else quoted."""
    if _PLAIN.fullmatch(text) and load(text, source="").data == text:
        return text
    return json.dumps(text, ensure_ascii=False)
