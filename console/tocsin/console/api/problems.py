"""Why a request is not answered: problem+json, by RFC 9457. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Final, Literal

from pydantic import ValidationError

from tocsin.console.api.documents import Problem
from tocsin.schemas.errors import TocsinError
from tocsin.schemas.text import plain_line

MEDIA_TYPE: Final = "application/problem+json"

Kind = Literal["wrong_request", "unknown", "not_captured", "method", "bus_away", "not_installed"]

_TITLES: Final[Mapping[Kind, tuple[HTTPStatus, str]]] = {
    "wrong_request": (HTTPStatus.BAD_REQUEST, "a parameter is wrong"),
    "unknown": (HTTPStatus.NOT_FOUND, "not found"),
    "not_captured": (HTTPStatus.NOT_FOUND, "this was not captured"),
    "method": (HTTPStatus.METHOD_NOT_ALLOWED, "the API is read-only"),
    "bus_away": (HTTPStatus.SERVICE_UNAVAILABLE, "the bus does not answer"),
    "not_installed": (HTTPStatus.NOT_IMPLEMENTED, "an extra is not installed"),
}

STATUSES: Final = tuple(sorted({status.value for status, _ in _TITLES.values()}))
"""The HTTP statuses of problems."""

_DETAIL: Final = 1_000


class ProblemError(TocsinError):
    """A request that cannot be answered."""

    def __init__(self, kind: Kind, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind

    @property
    def problem(self) -> Problem:
        """As the answer's body has it."""
        status, title = _TITLES[self.kind]
        return Problem(
            type=f"urn:tocsin:problem:{self.kind}",
            title=title,
            status=status.value,
            detail=plain_line(str(self))[:_DETAIL],
        )


def problem_texts() -> Sequence[tuple[Kind, int, str]]:
    """Each kind with its status and what it means, for the documentation."""
    return [(kind, status.value, title) for kind, (status, title) in _TITLES.items()]


def wrong_parameters(error: ValidationError) -> ProblemError:
    """What is wrong with the parameters of a request, by name."""
    details = []
    for one in error.errors(include_url=False, include_context=False, include_input=False):
        name = ".".join(map(str, one["loc"])) or "parameters"
        words = one["msg"].removeprefix("Value error, ")
        details.append(
            f"{name}: unknown parameter"
            if one["type"] == "extra_forbidden"
            else f"{name}: {words[:1].lower()}{words[1:]}"
        )
    return ProblemError("wrong_request", "; ".join(details))
