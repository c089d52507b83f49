"""The manifest: what the store has of one run. What it does not list is not there.

Two of them belong to a run, `run=…/telemetry.json` and `run=…/issues.json`, since two groups of
partitions are archived, perhaps by two processes. Each is replaced as a whole, and only by who has
read its last version: so a file is in it together with the offsets that it covers, or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tocsin.schemas.records.frame_codec import describe
from tocsin.schemas.store_paths import quoted as quoted
from tocsin.schemas.store_paths import run_folder as run_folder
from tocsin.store.errors import DamagedStore

Family = Literal["telemetry", "issues"]
"""Which topics: telemetry and runs, or issues, actions and control."""

Kind = Literal["steps", "system", "tensors", "events"]

FAMILIES: Final[tuple[Family, ...]] = ("telemetry", "issues")
SUFFIX: Final = ".parquet"
WHOLE_RUN: Final = ""
"""In place of an incarnation: events of the run as a whole."""


class Part(BaseModel):
    """A frozen part of a manifest; later releases may add fields."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class StoredFile(Part):
    """One Parquet file."""

    path: str = Field(description="from the root of the store")
    kind: Kind
    incarnation: str
    collection: str = ""
    columns: tuple[str, ...] = Field(default=(), description="statistics and counts, of tensors")
    rows: int
    size_bytes: int
    order: Literal["arrival", "tensor"] = "arrival"


class Covered(Part):
    """How far a topic is in the files: up to `next_offset`, appended at `append_ms` at the latest.
    A record with a lower offset and a later time is of another log: the bus was made anew."""

    next_offset: int = 0
    append_ms: int = 0


class Training(Part):
    """One incarnation, as far as is known."""

    started_ms: int = 0
    ended_ms: int | None = None
    state: str = ""
    outcome: str = ""
    labels: Mapping[str, str] = {}
    last_step: int | None = None
    saved_bytes: int = Field(default=0, description="of tensors saved in full in this store")


class Manifest(Part):
    """What the store has of one run, of one family of topics."""

    version: Literal[1] = 1
    run_id: str
    generation: int = 0
    updated_ms: int = 0
    covered: Mapping[str, Covered] = {}
    senders: Mapping[str, int] = {}
    files: tuple[StoredFile, ...] = ()
    trainings: Mapping[str, Training] = Field(default={}, description="the oldest first")
    compacted: bool = Field(default=False, description="all files are sorted by tensor")
    deleted: bool = Field(default=False, description="its files are being deleted")

    def encode(self) -> bytes:
        """As it is written."""
        return self.model_dump_json(exclude_defaults=True).encode()

    @classmethod
    def decode(cls, data: bytes, path: str) -> Manifest:
        """Raises DamagedStore: it is none, or of a later major version."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise DamagedStore(f"{path} is not a manifest of a run: {describe(error)}") from error

    @property
    def size_bytes(self) -> int:
        """Of all files, and of the tensors that were saved in full in this store."""
        saved = sum(training.saved_bytes for training in self.trainings.values())
        return saved + sum(file.size_bytes for file in self.files)

    def files_of(self, kind: Kind, incarnation: str, collection: str = "") -> Sequence[StoredFile]:
        """The files of one collection of an incarnation."""
        return [
            file
            for file in self.files
            if (file.kind, file.incarnation, file.collection) == (kind, incarnation, collection)
        ]


def manifest_path(run_id: str, family: Family) -> str:
    """Where a manifest is."""
    return f"{run_folder(run_id)}/{family}.json"


def collection_folder(run_id: str, incarnation: str, kind: Kind, collection: str) -> str:
    """Where the files of a collection are. What is no collection of tensors has a name that begins
    with `_`: `_steps`, `_system`, `_events`."""
    name = quoted(collection) if kind == "tensors" else f"_{kind}"
    training = quoted(incarnation) or "_run"
    return f"{run_folder(run_id)}/incarnation={training}/collection={name}"
