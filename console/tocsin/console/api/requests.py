"""What a request may ask for: the parameters of each operation, checked in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Generic, Literal, TypeVar

from pydantic import AfterValidator, ConfigDict, Field

from tocsin.console.api.numbers import MAX_POINTS, Mode
from tocsin.console.api.paging import LARGEST
from tocsin.console.api.source import DataSource
from tocsin.schemas.records.deliveries import DeliveryState
from tocsin.schemas.records.events import Model
from tocsin.schemas.records.fields import MAX_INT
from tocsin.schemas.records.issues import Severity
from tocsin.schemas.records.run_view import RunState

_NAME: Final = 512

_SINCE: Final = r"^([0-9]+(\.[0-9]+)?(ms|s|m|h|d)|[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9].*)$"
"""Its form, for readers of the description; the message about a wrong one is in words."""


class Parameters(Model):
    """Parameters of a request. One that the operation does not have is refused."""

    # JSON has numbers, a URL has texts: both are read.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


P = TypeVar("P", bound=Parameters, covariant=True)


@dataclass(frozen=True, slots=True)
class Request(Generic[P]):
    """What an operation is asked.

    Attributes:
        now_ms: the time, Unix milliseconds.
        about: the run or the issue; empty where the operation is about none.
    """

    source: DataSource
    asked: P
    now_ms: int
    about: str = ""


class Nothing(Parameters):
    """No parameters."""


Since = Annotated[
    str | None,
    Field(
        max_length=60,
        json_schema_extra={"pattern": _SINCE},
        description="only what changed since then: a duration like 2h, or a time with its zone",
        examples=["2h", "2026-12-01T00:00:00Z"],
    ),
]
Limit = Annotated[int, Field(ge=1, le=LARGEST, description="items of a page at most")]
Cursor = Annotated[
    str | None,
    Field(
        max_length=1_000,
        json_schema_extra={"pattern": "^[A-Za-z0-9_-]+$"},
        description="`next` of the page before; None: the first",
    ),
]
Run = Annotated[
    str | None,
    Field(
        max_length=200, description="only of this run: its id, or its beginning", examples=["gpt-7"]
    ),
]
Rank = Annotated[int, Field(ge=0, le=MAX_INT, description="the rank that sent the numbers")]
Training = Annotated[
    str | None,
    Field(
        max_length=64,
        pattern=r"^[A-Za-z0-9._:@+=-]+$",
        description="incarnation to read; None: the newest",
    ),
]
Points = Annotated[
    int, Field(ge=4, le=MAX_POINTS, description="points at most: others are left out")
]


def _label(value: str) -> str:
    if "=" not in value:
        raise ValueError("expected KEY=VALUE, like team=vision")
    return value


Label = Annotated[
    str, Field(max_length=_NAME, json_schema_extra={"pattern": "="}), AfterValidator(_label)
]


class ListRuns(Parameters):
    """Which runs."""

    since: Since = None
    state: RunState | None = Field(default=None, description="only in this state")
    label: Label | None = Field(
        default=None, description="only with this label", examples=["team=vision"]
    )
    limit: Limit = 100
    cursor: Cursor = None


class ListIssues(Parameters):
    """Which issues."""

    since: Since = None
    run: Run = None
    rule: str | None = Field(
        default=None, max_length=100, description="only of this rule, by either of its names"
    )
    severity: Severity | None = Field(default=None, description="only of this severity")
    state: Literal["open", "resolved", "all"] = Field(
        default="all", description="open: neither its rule nor a person has closed it"
    )
    limit: Limit = 100
    cursor: Cursor = None


class ListDeliveries(Parameters):
    """Which deliveries."""

    since: Since = None
    run: Run = None
    issue: str | None = Field(default=None, max_length=64, description="only of this issue: its id")
    state: DeliveryState | None = Field(default=None, description="only in this state")
    limit: Limit = 100
    cursor: Cursor = None


class ListStops(Parameters):
    """Which stops."""

    since: Since = None
    run: Run = None
    limit: Limit = 100
    cursor: Cursor = None


class SinceAlone(Parameters):
    """From which time."""

    since: Since = None


class OfTraining(Parameters):
    """Which incarnation of the run."""

    incarnation: Training = None


class FindTensors(OfTraining):
    """Which tensors."""

    pattern: str | None = Field(
        default=None,
        max_length=200,
        description="only names with this text; `*` and `?` stand for other characters",
        examples=["blocks.3.*weight"],
    )
    collection: str | None = Field(default=None, max_length=64, description="only of this one")
    limit: Limit = 100


class ReadSeries(OfTraining):
    """Which series: a scalar by `name`, or a `statistic` of a `tensor`."""

    name: str | None = Field(
        default=None, max_length=_NAME, description="a scalar", examples=["loss", "step_time_s"]
    )
    tensor: str | None = Field(default=None, max_length=_NAME, description="name of a tensor")
    collection: str | None = Field(
        default=None,
        max_length=64,
        description="of the tensor; None: the first of gradients, weights and the others (by name) "
        "that has it",
    )
    statistic: str = Field(
        default="l2", max_length=100, description="of the tensor", examples=["l2", "absmax"]
    )
    mode: Mode = Field(default="train", description="what the training was doing")
    rank: Rank = 0
    from_step: int | None = Field(default=None, ge=0, le=MAX_INT, description="from this step on")
    to_step: int | None = Field(default=None, ge=0, le=MAX_INT, description="up to this step")
    points: Points = 1_000


class ReadMatrix(OfTraining):
    """Which statistic of which tensors."""

    collection: str = Field(
        default="gradients", max_length=64, description="the collection of the tensors"
    )
    statistic: str = Field(default="l2", max_length=100, description="of each tensor")
    mode: Mode = Field(default="train", description="what the training was doing")
    rank: Rank = 0
    rows: int = Field(default=100, ge=1, le=LARGEST, description="tensors at most")
    steps: int = Field(default=200, ge=1, le=LARGEST, description="steps at most")


class ReadSystem(OfTraining):
    """Which samples of which node."""

    node: str | None = Field(
        default=None, max_length=255, description="host name; None: the first by name"
    )
    column: str | None = Field(
        default=None,
        max_length=_NAME,
        description="only columns with this text; `*` and `?` stand for other characters",
        examples=["gpu.*percent"],
    )
    points: Points = 500
