"""JSON Schemas of all records, for readers in other languages.

`python tools/docs/record_schemas.py FOLDER` writes one file for each name. Frames and
snapshots are binary: what their files describe is the JSON header that begins them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel
from pydantic.config import JsonDict

from tocsin.schemas.records.events import EVENT_TYPES, Data, Event
from tocsin.schemas.records.frames import (
    StepFrame,
    StepHeader,
    SystemFrame,
    SystemHeader,
    TensorFrame,
    TensorHeader,
)
from tocsin.schemas.records.snapshots import Snapshot, SnapshotHeader
from tocsin.schemas.records.stops.commands import SignedDatagram

_HEADERS: Final[dict[str, tuple[type[BaseModel], int]]] = {
    TensorFrame.type: (TensorHeader, TensorFrame.version),
    StepFrame.type: (StepHeader, StepFrame.version),
    SystemFrame.type: (SystemHeader, SystemFrame.version),
    Snapshot.type: (SnapshotHeader, Snapshot.version),
}


def json_schemas() -> dict[str, JsonDict]:
    """File name → schema, for each (type, version) that this release reads and writes."""
    found = {
        f"{name}-v{version}.header.json": _schema(model, f"{name} (header)")
        for name, (model, version) in _HEADERS.items()
    }
    for name in EVENT_TYPES.names():
        data = EVENT_TYPES.model(name)
        found[f"{name}-v{data.version}.json"] = _event_schema(data)
    found["stop-datagram-v1.json"] = _schema(SignedDatagram, "stop datagram")
    return dict(sorted(found.items()))


def write_json_schemas(folder: Path) -> None:
    """Write each schema into `folder`, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, schema in json_schemas().items():
        (folder / name).write_text(as_text(schema), encoding="utf-8")


def as_text(schema: JsonDict) -> str:
    """The content of a schema's file."""
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _event_schema(data: type[Data]) -> JsonDict:
    # The reader asks for `specversion` and finds the model by `type`; the envelope's own model
    # fills in the one and takes any of the other.
    generic: Any = Event
    envelope = _schema(generic[data], data.event_type)
    properties, required = envelope["properties"], envelope["required"]
    assert isinstance(properties, dict)
    assert isinstance(required, list)
    properties["type"] = {"const": data.event_type}
    required.insert(0, "specversion")
    return envelope


def _schema(model: type[BaseModel], title: str) -> JsonDict:
    schema: dict[str, Any] = model.model_json_schema(mode="validation")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": title,
    }


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/docs/record_schemas.py FOLDER")
    write_json_schemas(Path(sys.argv[1]))
