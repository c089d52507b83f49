"""The records in `tests/golden`, as a bus gives them to a reader."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tocsin.bus.port import Partition, Record
from tocsin.schemas.records.wire import Meta
from tocsin.schemas.topics import Topics, telemetry_partition

RUN: Final = "gpt-2026-11-21"
"""The run that all of them are of."""

APPEND_MS: Final = 1795258012250
"""When the first of them was appended."""

_GOLDEN: Final = Path(__file__).parents[2] / "golden"
_BOOT: Final = "3f0e6a2c-2d5e-4c0e-9a57-1f6f0a4b7c11"
_NO_RECORDS: Final = frozenset(("dead-letter-v1", "headers-v1", "signed-command-v1"))
"""Files that hold something else than the value of a record."""


def golden_names() -> list[str]:
    """Type and version of each record that there is a file of, as in `tocsin.run.phase-v1`."""
    return sorted({path.stem for path in _GOLDEN.iterdir()} - _NO_RECORDS)


def golden_records(names: Iterable[str]) -> list[Record]:
    """These one after the other, as if rank 1 had sent them to the topic of the telemetry."""
    return [_record(name, seq) for seq, name in enumerate(names)]


def _record(name: str, seq: int) -> Record:
    kind, _, version = name.rpartition("-v")
    (path,) = _GOLDEN.glob(f"{name}.*")
    place = Partition(Topics().telemetry, telemetry_partition(RUN))
    headers = Meta(kind, int(version), 1, _BOOT, seq).headers()
    return Record(place, seq, APPEND_MS + seq, RUN.encode(), path.read_bytes(), headers)
