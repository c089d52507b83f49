"""Mutated records of every kind through the engine: no crash, no bug, and each is accounted for.

Every kind are the golden records, also of other topics, and a made run of two ranks.
"""

from __future__ import annotations

import math
import os
import random
from collections import Counter
from collections.abc import Iterator

import pytest

from support.records.golden import golden_names, golden_records
from support.records.mutation import bent
from tocsin.bus.port import Record
from tocsin.schemas.errors import RecordError
from tocsin.schemas.records.wire import SEQ
from tocsin.stream_rules.engine.configured_rules import rule_specs
from tocsin.stream_rules.engine.partitions import PartitionEngine, UnusableRecord
from tocsin.stream_rules.testing import RunBuilder


def originals() -> list[Record]:
    run = RunBuilder(world_size=2)
    run.started(role="launcher")
    for rank in (0, 1):
        run.started(rank=rank)
    run.steps(range(8), loss=1.0, gradient_norm=1.0, gradient_nonfinite=0)
    run.tensors(4, "gradients", ["a", "b"], columns={"l2": [1.0, 2.0]})
    run.tensors(4, "weights", ["a", "b"], columns={"l2": [1.0, math.nan]})
    run.system({"cpu.percent": [50.0, 60.0], "disk.free_bytes": [1e9, 1e9]})
    run.heartbeat()
    run.ended()
    return [*run.records, *golden_records(golden_names())]


def mutated(seed: int) -> Iterator[Record]:
    dice, good = random.Random(seed), originals()
    offset = 0
    while True:
        one = dice.choice(good)
        offset += 1
        value, key = one.value or b"", one.key
        # One that was there before would be taken for a repeat, and no rule would see it.
        headers = tuple(
            (name, b"%d" % offset if name == SEQ else text) for name, text in one.headers
        )
        what = dice.random()
        if what < 0.75:
            value = bent(value, dice)
        if what > 0.65:
            at = dice.randrange(len(headers))
            name, text = headers[at]
            headers = (*headers[:at], (name, bent(text, dice)), *headers[at + 1 :])
        if what > 0.97:
            key = bent(key, dice)
        yield Record(one.partition, offset, one.append_ms + offset, key, value, headers)


def fuzz(count: int, seed: int) -> Counter[str]:
    """What became of so many records. Each run has some thousands of them, then come others."""
    found: Counter[str] = Counter()
    engine = PartitionEngine(rule_specs())
    for number, record in zip(range(count), mutated(seed), strict=False):
        if number % 5_000 == 0:
            engine = PartitionEngine(rule_specs())
        try:
            engine.apply(record)
        except UnusableRecord as error:
            found["a bug" if "(a bug)" in str(error.error) else "refused"] += 1
        except RecordError:
            found["refused"] += 1
        else:
            found["taken"] += 1
        for _, _, run in engine.runs() if number % 500 == 499 else ():
            found["failed rules"] += sum(instance.failed for instance in run.instances)
    return found


@pytest.mark.parametrize(
    "count",
    [1_000, pytest.param(int(os.environ.get("TOCSIN_FUZZ", "1000000")), marks=pytest.mark.torture)],
)
@pytest.mark.timeout(86_400)
def test_mutated_records_are_refused_or_taken_and_none_is_a_bug(count: int) -> None:
    found = fuzz(count, seed=20261125)
    assert found["refused"] + found["taken"] == count, found
    assert found["refused"] > count / 4
    assert found["taken"] > count / 50
    assert (found["a bug"], found["failed rules"]) == (0, 0), found
