"""`docs/schemas/` says what the models say, and what the models say fits real records."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel

from record_schemas import as_text, json_schemas, write_json_schemas
from tocsin.schemas.records.events import EVENT_TYPES, Event

REPOSITORY = Path(__file__).parents[3]
COMMITTED = REPOSITORY / "docs" / "schemas"
COMMAND = "python tools/docs/record_schemas.py docs/schemas"
GOLDEN = REPOSITORY / "tests" / "golden"


@cache
def schemas() -> Mapping[str, Any]:
    return json_schemas()


def check(schema: Any, value: object) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(value)


def test_the_committed_schemas_are_current() -> None:
    for name, schema in schemas().items():
        path = COMMITTED / name

        assert path.exists(), f"{path} is missing; write it with: {COMMAND}"
        assert path.read_text() == as_text(schema), f"{name} is old; write it with: {COMMAND}"


def test_no_committed_schema_is_left_over() -> None:
    # The configuration's schema is written by its own part.
    records = {path.name for path in COMMITTED.glob("*-v*.json")}

    assert records == set(schemas()), "remove the files of records that are gone"


def test_the_written_files_are_the_schemas(tmp_path: Path) -> None:
    write_json_schemas(tmp_path / "new" / "folder")

    written = {path.name: path for path in (tmp_path / "new" / "folder").iterdir()}
    assert set(written) == set(schemas())
    assert (
        json.loads(written["tocsin.run.started-v1.json"].read_text())
        == schemas()["tocsin.run.started-v1.json"]
    )


@pytest.mark.parametrize("event_type", EVENT_TYPES.names())
def test_a_golden_event_fits_its_schema(event_type: str) -> None:
    name = f"{event_type}-v1.json"

    check(schemas()[name], json.loads((GOLDEN / name).read_bytes()))


@pytest.mark.parametrize("event_type", EVENT_TYPES.names())
def test_each_event_type_has_an_example_that_holds(event_type: str) -> None:
    model = EVENT_TYPES.model(event_type)
    (example,) = examples_of(model)

    event = Event.wrap(
        model.model_validate(example), id="boot/0", source="/runs/gpt", time_ms=1795258012250
    )

    check(schemas()[f"{event_type}-v1.json"], json.loads(event.encode()))
    kept = event.data.model_dump(mode="json", exclude_unset=True)
    assert kept == example, "a field of the example is not one of the model"


@pytest.mark.parametrize("name", ["tensors", "steps", "system", "snapshot"])
def test_a_golden_header_fits_its_schema(name: str) -> None:
    value = (GOLDEN / f"{name}-v1.bin").read_bytes()
    (length,) = struct.unpack_from("<I", value)

    check(schemas()[f"{name}-v1.header.json"], json.loads(value[4 : 4 + length]))


def test_the_stop_datagram_fits_its_schema() -> None:
    check(
        schemas()["stop-datagram-v1.json"],
        json.loads((GOLDEN / "signed-command-v1.json").read_bytes()),
    )


def test_a_wrong_event_does_not_fit() -> None:
    event = json.loads((GOLDEN / "tocsin.run.ended-v1.json").read_bytes())

    wrongs: list[dict[str, object]] = [
        {"type": "tocsin.run.started"},
        {"specversion": "0.3"},
        {"data": {}},
    ]
    for wrong in wrongs:
        with pytest.raises(jsonschema.ValidationError):
            check(schemas()["tocsin.run.ended-v1.json"], {**event, **wrong})


def examples_of(model: type[BaseModel]) -> list[dict[str, Any]]:
    examples: list[dict[str, Any]] = model.model_json_schema()["examples"]
    return examples
