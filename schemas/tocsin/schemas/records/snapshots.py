"""Rule snapshots: state that carries the offset it covers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Final, Self

from pydantic import Field, ValidationError

from tocsin.schemas.errors import MalformedRecord
from tocsin.schemas.records.fields import Incarnation, Millis, RunId, Whole
from tocsin.schemas.records.frame_codec import FrameHeader, describe, encode_frame, split_header

_NEXT_OFFSET: Final = re.compile(rb'"next_offset":([0-9]{1,19})[,}]')


class SnapshotHeader(FrameHeader):
    """The header of a snapshot; the rule's own bytes follow it."""

    run_id: RunId
    incarnation: Incarnation
    rule: str = Field(max_length=100, description="the rule instance", examples=["nonfinite"])
    rule_version: Whole = Field(description="version of the rule's state format", examples=[1])
    next_offset: Whole = Field(
        description="the state covers telemetry below this offset", examples=[48213]
    )
    saved_at_ms: Millis
    software: str = Field(
        max_length=100, description="program and version that wrote it", examples=["tocsin 0.1.0"]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """State of one rule instance for one run.

    All telemetry of the run's partition below `next_offset` is in it, and nothing from there on.
    """

    type: ClassVar[str] = "snapshot"
    version: ClassVar[int] = 1

    run_id: str
    incarnation: str
    rule: str
    rule_version: int
    next_offset: int
    payload: bytes
    saved_at_ms: int = 0
    software: str = ""

    @property
    def key(self) -> str:
        """`run_id/rule`, the key on the state topic."""
        return f"{self.run_id}/{self.rule}"

    def encode(self) -> bytes:
        """The value of the bus record: header frame, then the rule's own bytes."""
        header = SnapshotHeader(
            run_id=self.run_id,
            incarnation=self.incarnation,
            rule=self.rule,
            rule_version=self.rule_version,
            next_offset=self.next_offset,
            saved_at_ms=self.saved_at_ms,
            software=self.software,
        )
        return encode_frame(header, {}) + self.payload

    @staticmethod
    def offset_of(value: bytes) -> int:
        """The `next_offset` of a snapshot that is not decoded: of most nothing else is ever needed.

        Raises:
            MalformedRecord: it is no snapshot.
        """
        text, _ = split_header(value)
        # In a string, the quotes would be escaped.
        found = _NEXT_OFFSET.search(text)
        if found is None:
            raise MalformedRecord("snapshot header without next_offset")
        return int(found[1])

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """Raises MalformedRecord, and nothing else."""
        text, start = split_header(value)
        try:
            header = SnapshotHeader.model_validate_json(text)
        except ValidationError as error:
            raise MalformedRecord(f"snapshot header: {describe(error)}") from error
        return cls(
            run_id=header.run_id,
            incarnation=header.incarnation,
            rule=header.rule,
            rule_version=header.rule_version,
            next_offset=header.next_offset,
            payload=value[start:],
            saved_at_ms=header.saved_at_ms,
            software=header.software,
        )
