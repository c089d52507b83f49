"""A run that is exported."""

from __future__ import annotations

from pathlib import Path

import pytest

from fixtures.exported_run import fill_bus
from tocsin.store import Run, open_run


@pytest.fixture(scope="session")
def exported_bus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bus of the run, which has ended."""
    path = tmp_path_factory.mktemp("exported") / "bus.db"
    fill_bus(path)
    return path


@pytest.fixture
def run(exported_bus: Path) -> Run:
    """The run, as it is opened for an export."""
    return open_run("run-1", bus=exported_bus)
