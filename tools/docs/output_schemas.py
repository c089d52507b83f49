"""`docs/schemas/report.json` and `compare.json`: what these commands print, from their models."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pydantic import BaseModel

from tocsin.console.compare.document import ComparisonDocument
from tocsin.console.report.document import ReportDocument

DOCUMENTS: Final[Mapping[str, type[BaseModel]]] = {
    "report.json": ReportDocument,
    "compare.json": ComparisonDocument,
}
"""Each file below `docs/schemas`, and the model that makes it."""


def schema_text(model: type[BaseModel]) -> str:
    """The JSON schema of what the model writes. Pure."""
    return json.dumps(model.model_json_schema(mode="serialization"), indent=2) + "\n"


def write_schemas(docs: Path) -> None:
    """Write them into the folder of the docs."""
    for name, model in DOCUMENTS.items():
        (docs / "schemas" / name).write_text(schema_text(model), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/docs/output_schemas.py DOCS")
    write_schemas(Path(sys.argv[1]))
