"""Puts hostile text into each field of a record that may hold it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from pydantic import BaseModel, JsonValue, ValidationError

M = TypeVar("M", bound=BaseModel)


def poisoned(model: M, text: str) -> M:
    """With `text` in front of each text that may hold anything."""
    facts = model.model_dump(mode="json")
    for holder, key in list(_texts(facts)):
        before = holder[key]
        holder[key] = f"{text}{before}"
        try:
            type(model).model_validate(facts)
        except ValidationError:
            holder[key] = before
    return type(model).model_validate(facts)


def _texts(value: JsonValue) -> Iterator[tuple[dict[str, JsonValue], str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(inner, str):
                yield value, key
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
