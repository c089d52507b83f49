"""What the fields of a model mean, from the docstrings below them: read when somebody asks.

pydantic can take them itself (`use_attribute_docstrings`), but then reads and parses the source of
each model at its import: 0.12 s of CPU time for those of a configuration and of all rules, in each
process, where only help and documentation show them.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

from pydantic import BaseModel

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema


class Documented(BaseModel):
    """A model whose JSON schema has the docstrings of its fields."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler, /
    ) -> JsonSchemaValue:
        """See pydantic."""
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, text in field_docstrings(cls).items():
            if name in properties:
                properties[name].setdefault("description", text)
        return schema


@cache
def field_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The docstrings of a model's fields, inherited ones too; none where there is no source."""
    found: dict[str, str] = {}
    for owner in reversed(model.__mro__):
        if issubclass(owner, BaseModel) and owner not in (BaseModel, Documented):
            found |= _own(owner)
    return found


def _own(model: type[BaseModel]) -> dict[str, str]:
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return {}
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
