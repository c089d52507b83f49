"""What `tocsin.schemas` offers is listed, sorted, and there."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tocsin.schemas


def test_all_is_sorted_and_is_what_is_imported() -> None:
    tree = ast.parse(Path(tocsin.schemas.__file__).read_text())
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tocsin.")
        for alias in node.names
    }

    assert set(tocsin.schemas.__all__) == imported
    assert len(tocsin.schemas.__all__) == len(imported)


@pytest.mark.parametrize("name", tocsin.schemas.__all__)
def test_each_name_is_there(name: str) -> None:
    assert getattr(tocsin.schemas, name) is not None


def test_another_name_is_not() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = tocsin.schemas.Nonsense


def test_the_errors_alone_cost_no_numpy() -> None:
    code = (
        "import sys, tocsin.schemas.errors, tocsin.schemas.topics;"
        "sys.exit(any(name in sys.modules for name in ('numpy', 'pydantic', 'cryptography')))"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_event_types_are_all_there_however_they_are_imported() -> None:
    code = (
        "import sys; from tocsin.schemas import EVENT_TYPES;"
        "sys.exit('tocsin.delivery' not in EVENT_TYPES.names())"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
