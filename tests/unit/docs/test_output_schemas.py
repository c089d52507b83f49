"""The schemas of what `tocsin report` and `tocsin compare` print are those of the code."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest

from output_schemas import DOCUMENTS, schema_text

SCHEMAS = Path(__file__).parents[3] / "docs" / "schemas"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_schema_is_current(name: str) -> None:
    command = "python tools/docs/output_schemas.py docs"
    assert (SCHEMAS / name).read_text() == schema_text(DOCUMENTS[name]), command


@pytest.mark.parametrize("name", DOCUMENTS)
def test_each_is_a_schema_whose_version_is_fixed(name: str) -> None:
    schema = DOCUMENTS[name].model_json_schema(mode="serialization")
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["properties"]["version"]["const"] == 1
