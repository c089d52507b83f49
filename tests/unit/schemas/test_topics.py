"""Topic names, partition counts, and the same partition as Kafka's own clients choose."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.topics import (
    MAX_RECORD_BYTES,
    Topics,
    issue_partition,
    murmur2,
    partition_for,
    telemetry_partition,
)


@pytest.mark.parametrize(
    ("data", "signed"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_murmur2_is_that_of_kafka(data: bytes, signed: int) -> None:
    assert murmur2(data) == signed % 2**32


@given(st.text(max_size=50))
def test_partitions_are_aligned(run_id: str) -> None:
    telemetry = telemetry_partition(run_id)

    assert 0 <= telemetry < 48
    assert issue_partition(run_id) == telemetry % 12
    assert partition_for(run_id.encode(), 48) == telemetry


def test_the_seven_topics() -> None:
    specs = {spec.name: spec for spec in Topics("vision").specs()}
    day = 86_400_000

    assert {name: (spec.partitions, spec.cleanup) for name, spec in specs.items()} == {
        "vision.telemetry.v1": (48, "delete"),
        "vision.state.v1": (48, "compact"),
        "vision.runs.v1": (48, "compact"),
        "vision.issues.v1": (12, "delete"),
        "vision.actions.v1": (12, "compact"),
        "vision.control.v1": (12, "compact"),
        "vision.dlq.v1": (6, "delete"),
    }
    assert specs["vision.telemetry.v1"].retention_ms == day
    assert specs["vision.issues.v1"].retention_ms == 30 * day
    assert specs["vision.dlq.v1"].retention_ms == 14 * day
    assert {spec.max_record_bytes for spec in specs.values()} == {MAX_RECORD_BYTES} == {2 * 1024**2}


@pytest.mark.parametrize("prefix", ["", "Vision", "a b", "-a", "a/b", "a" * 101, "a\n"])
def test_a_prefix_that_kafka_would_refuse(prefix: str) -> None:
    with pytest.raises(ConfigurationError, match="bus prefix"):
        Topics(prefix)
