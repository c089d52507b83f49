"""`Real`: a float in JSON that may be NaN or infinite.

JSON has no word for them, and the usual encoders write `null`, which is wrong in a tool whose first
rule is "NaN". Here they are the strings "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import math
from typing import Annotated, Final

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema

_BY_NAME: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _parse(value: object) -> object:
    if isinstance(value, str):
        if value not in _BY_NAME:
            raise ValueError('expected a number, "NaN", "Infinity" or "-Infinity"')
        return _BY_NAME[value]
    if isinstance(value, bool):
        raise ValueError("expected a number, not true or false")
    return value


def _write(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


Real = Annotated[
    float,
    Field(allow_inf_nan=True),
    BeforeValidator(_parse),
    PlainSerializer(_write, when_used="json"),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"enum": list(_BY_NAME)}]}),
]
"""A float64 that survives JSON whatever its value."""
