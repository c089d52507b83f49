"""What pydantic finds, in the words of the file."""

from __future__ import annotations

import pytest
from pydantic import AliasChoices, BaseModel, Field, ValidationError

from tocsin.schemas.configuration.validation import problems_of_model


class Circle(BaseModel):
    """One kind of shape."""

    radius: float


class Box(BaseModel):
    """Another kind."""

    width: float


class Params(BaseModel):
    """Parameters as the author of a rule may write them."""

    shape: Circle | Box = Circle(radius=1)
    size: float = Field(validation_alias=AliasChoices("length", "height"))


def test_a_missing_key_of_any_model_is_a_problem_with_its_place() -> None:
    with pytest.raises(ValidationError) as caught:
        Params.model_validate({"shape": {}})

    problems = list(problems_of_model(caught.value, Params, ("params",)))

    assert [(one.code, one.message, one.hint) for one in problems] == [
        ("missing_key", "the key 'radius' is missing", None),
        ("missing_key", "the key 'width' is missing", None),
        ("missing_key", "the key 'length' is missing", None),
    ]
    assert [one.loc[:2] for one in problems] == [
        ("params", "shape"),
        ("params", "shape"),
        ("params",),
    ]
