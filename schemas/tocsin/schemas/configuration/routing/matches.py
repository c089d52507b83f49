"""Matches of labels: what routes, silences, inhibitions and rules apply to. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, Final

from pydantic import WithJsonSchema

ISSUE_KEYS: Final = ("run", "rule", "severity")
"""What an issue has beside the labels of its run. A label of such a name is not asked."""

MATCH_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "additionalProperties": {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}, "minItems": 1},
        ]
    },
}

Match = Annotated[Mapping[str, tuple[str, ...]], WithJsonSchema(MATCH_SCHEMA)]
"""Labels, each with patterns (`*`, `?`), one of which must match."""


def labels_fit(match: Mapping[str, tuple[str, ...]], labels: Mapping[str, str]) -> bool:
    """Whether the labels have each key of `match`, with a value that fits one of its patterns."""
    return all(
        key in labels and any(fnmatchcase(labels[key], pattern) for pattern in patterns)
        for key, patterns in match.items()
    )


def covers(wide: Mapping[str, tuple[str, ...]], narrow: Mapping[str, tuple[str, ...]]) -> bool:
    """Whether all that fits `narrow` surely fits `wide`, too."""
    return all(
        all(any(_contains(one, other) for one in patterns) for other in narrow[key])
        if key in narrow
        else key in ISSUE_KEYS and "*" in patterns
        for key, patterns in wide.items()
    )


def _contains(wide: str, narrow: str) -> bool:
    if wide in ("*", narrow):
        return True
    return not set("*?[") & set(narrow) and fnmatchcase(narrow, wide)
