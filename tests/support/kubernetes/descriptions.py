"""Whether an object fits the description of its kind (a CRD), as an API server checks it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema


def misfits(found: object, description: Mapping[str, Any]) -> list[str]:
    """What is wrong with it: values that do not fit, and fields that are not described."""
    checked = jsonschema.Draft202012Validator(description)
    wrong = [f"{error.json_path}: {error.message}" for error in checked.iter_errors(found)]
    return [*wrong, *_unknown(found, description, "$")]


def _unknown(found: object, description: Mapping[str, Any], path: str) -> Iterator[str]:
    # The whole of `metadata` is the API server's own.
    if description.get("x-kubernetes-preserve-unknown-fields") or path == "$.metadata":
        return
    if isinstance(found, list):
        for each in found:
            yield from _unknown(each, description.get("items", {}), f"{path}[]")
    if not isinstance(found, dict):
        return
    known, more = description.get("properties", {}), description.get("additionalProperties")
    for name, value in found.items():
        below = known.get(name, more)
        if isinstance(below, Mapping):
            yield from _unknown(value, below, f"{path}.{name}")
        elif not more:
            yield f"{path}.{name} is not described"
