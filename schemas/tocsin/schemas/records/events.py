"""Everything that is not numbers: CloudEvents 1.0 in JSON, our fields only inside `data`.

An event type is a `Data` subclass that names its CloudEvents type; `Event[...]` is the envelope
around it. `EventTypes.decode` finds the model by the type; a reader ignores fields that it does not
know.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from datetime import UTC, datetime
from typing import ClassVar, Final, Generic, Literal, TypeVar

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    SerializeAsAny,
    ValidationError,
)

from tocsin.schemas.errors import MalformedRecord, UnknownRecord
from tocsin.schemas.records.fields import MAX_TEXT as MAX_TEXT
from tocsin.schemas.records.fields import Word, readable
from tocsin.schemas.records.frame_codec import describe


class Model(BaseModel):
    """A frozen part of an event. Readers ignore unknown fields, so they can read newer records."""

    # A plain float is finite; one that may be NaN is a `Real`. Without the second setting a NaN
    # inside free JSON would silently become null.
    model_config = ConfigDict(
        frozen=True, extra="ignore", allow_inf_nan=False, ser_json_inf_nan="strings"
    )


class Data(Model):
    """The `data` of one type of event. Subclasses name type and major version."""

    event_type: ClassVar[str]
    version: ClassVar[int] = 1


D = TypeVar("D", bound=Data, covariant=True)
E = TypeVar("E", bound=Data)


def example(**fields: JsonValue) -> ConfigDict:
    """Settings of a model that carry one whole example of it into its JSON Schema."""
    return ConfigDict(json_schema_extra={"examples": [fields]})


class Event(Model, Generic[D]):
    """A CloudEvent 1.0, structured JSON."""

    specversion: Literal["1.0"] = "1.0"
    id: str = Field(
        min_length=1,
        max_length=200,
        description="unique together with `source`",
        examples=["3f0e6a2c-2d5e-4c0e-9a57-1f6f0a4b7c11/42"],
    )
    source: str = Field(
        min_length=1,
        max_length=400,
        description="the sender",
        examples=["/runs/gpt-2026-11-21/ranks/0"],
    )
    type: str = Field(min_length=1, max_length=100)
    time: AwareDatetime = Field(
        description="the sender's clock, RFC 3339", examples=["2026-11-21T14:00:00.250Z"]
    )
    subject: Word | None = Field(default=None, max_length=400)
    datacontenttype: Literal["application/json"] = "application/json"
    data: SerializeAsAny[D]

    @classmethod
    def wrap(
        cls, data: E, *, id: str, source: str, time_ms: int, subject: str | None = None
    ) -> Event[E]:
        """Wrap `data`; `time_ms` is Unix time in milliseconds."""
        return Event(
            id=id,
            source=source,
            type=data.event_type,
            time=datetime.fromtimestamp(time_ms / 1000, UTC),
            subject=subject,
            data=data,
        )

    @property
    def time_ms(self) -> int:
        """Unix time in milliseconds."""
        return round(self.time.timestamp() * 1000)

    def encode(self) -> bytes:
        """The value of the bus record, also the body of a webhook."""
        return self.model_dump_json(exclude_none=True).encode()


class EventTypes:
    """Which model reads which CloudEvents type."""

    def __init__(self) -> None:
        self._models: dict[str, type[Data]] = {}

    def register(self, model: type[E]) -> type[E]:
        """Class decorator. Raises ValueError if the type has a model already (a bug)."""
        if model.event_type in self._models:
            raise ValueError(f"event type {model.event_type!r} is registered twice")
        self._models[model.event_type] = model
        return model

    def names(self) -> tuple[str, ...]:
        """All known types, sorted."""
        _import_all()
        return tuple(sorted(self._models))

    def model(self, event_type: str) -> type[Data]:
        """Raises UnknownRecord."""
        if event_type not in self._models:
            # Whoever reads a bus meets types of which nothing of its own makes use.
            _import_all()
        try:
            return self._models[event_type]
        except KeyError:
            raise UnknownRecord(
                f"event type {event_type!r} is not one that this release reads"
            ) from None

    def decode(self, value: bytes) -> Event[Data]:
        """Read an event of any known type.

        Raises:
            MalformedRecord: not a CloudEvent, or its data do not fit its type.
            UnknownRecord: a type that this release does not know.
        """
        try:
            raw = _Raw.model_validate_json(value)
        except ValidationError as error:
            raise MalformedRecord(f"event: {describe(error)}") from error
        model = self.model(raw.type)
        try:
            data = model.model_validate(raw.data)
        except ValidationError as error:
            raise MalformedRecord(f"event {raw.type}: {describe(error)}") from error
        return Event(
            id=raw.id,
            source=raw.source,
            type=raw.type,
            time=raw.time,
            subject=raw.subject,
            data=data,
        )


class _Raw(Model):
    specversion: Literal["1.0"]
    id: str = Field(min_length=1, max_length=200)
    source: str = Field(min_length=1, max_length=400)
    type: str = Field(min_length=1, max_length=100)
    time: AwareDatetime
    subject: str | None = Field(default=None, max_length=400)
    datacontenttype: Literal["application/json"] = "application/json"
    data: dict[str, object]


EVENT_TYPES: Final = EventTypes()
"""All event types of this release; the modules beside this one register theirs on import, which is
when somebody needs them, or when a record of an unknown type is met."""


@functools.cache
def _import_all() -> None:
    """Import all modules beside this one, and below."""
    from tocsin.schemas import records

    for module in pkgutil.walk_packages(records.__path__, f"{records.__name__}."):
        importlib.import_module(module.name)


def clip(text: str, limit: int = MAX_TEXT) -> str:
    """`text`, cut to `limit` characters with a mark at the cut, and fit for JSON."""
    text = readable(text)
    return text if len(text) <= limit else text[: limit - 1] + "…"
