"""Models of answers that are made of the models of records: so none of them can fall behind.

What the bus holds and what a program gets differ by a few fields: a state that is in the type of a
record is a field here, and what a record repeats is left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, Final

from pydantic import create_model

from tocsin.schemas.records.events import Model

Answer = type[Model]
"""What an answer looks like. It describes and checks; the values themselves are plain JSON."""

Fields = Mapping[str, tuple[object, object]]
"""Fields by name: the type, and what `pydantic.Field` returned."""

VERSION: Final = 1
"""The major version of all answers: within it fields are only added."""


def described(
    name: str,
    meaning: str,
    of: type[Model] | None = None,
    *,
    leave_out: Collection[str] = (),
    more: Fields = MappingProxyType({}),
) -> Answer:
    """A model with the fields of `of` but those to leave out, and with more of its own.

    Raises:
        ValueError: a field to leave out is not there, or a field would be there twice (a bug).
    """
    fields: dict[str, Any] = {}
    if of is not None:
        if missing := set(leave_out) - set(of.model_fields):
            raise ValueError(f"{of.__name__} has no {', '.join(sorted(missing))}")
        fields = {
            key: (field.rebuild_annotation(), field)
            for key, field in of.model_fields.items()
            if key not in leave_out
        }
    if twice := fields.keys() & more.keys():
        raise ValueError(f"{name} has {', '.join(sorted(twice))} twice")
    fields |= more
    model: Answer = create_model(name, __base__=Model, __doc__=meaning, **fields)
    return model


def many(of: Answer) -> object:
    """The type of a sequence of these."""
    return tuple.__class_getitem__((of, ...))
