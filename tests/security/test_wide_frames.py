"""Frames of tens of thousands of columns: what a record of the size limit may cost a worker."""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatchcase

import numpy as np
import pytest

from tocsin.schemas.records.frames import RecordOrigin, StepFrame
from tocsin.schemas.records.wire import meta_of
from tocsin.stream_rules import rule as rule_module
from tocsin.stream_rules.engine.configured_rules import rule_specs
from tocsin.stream_rules.engine.run import RunEngine
from tocsin.stream_rules.rules.about_rules.rule_has_no_input import RuleHasNoInput
from tocsin.stream_rules.testing import only


class Name(str):
    """A column's name that counts how often it is compared."""

    __slots__ = ()
    compared = 0

    def __eq__(self, other: object) -> bool:
        Name.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def frame(columns: tuple[str, ...]) -> StepFrame:
    return StepFrame(
        origin=RecordOrigin(run_id="r", incarnation="i"),
        steps=np.array([10], np.uint64),
        at_us=np.array([1], np.uint64),
        columns=columns,
        values=np.ones((1, len(columns)), np.float32),
    )


def work(prefix: str, count: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Comparisons of names and matches of patterns that such a frame costs all rules."""
    done: Counter[str] = Counter()

    def counted(name: str, pattern: str) -> bool:
        done["matches"] += 1
        return fnmatchcase(name, pattern)

    monkeypatch.setattr(rule_module, "fnmatchcase", counted)
    Name.compared = 0
    value = frame(tuple(Name(f"{prefix}{i}") for i in range(count)))
    RunEngine("r", rule_specs([])).apply(value, meta_of(value), offset=0, now_ms=1_000)
    done["compared"] = Name.compared
    return done


@pytest.mark.parametrize("prefix", ["loss.", "lr.", "log.", "gradient_norm.", "x"])
def test_the_columns_of_a_frame_cost_no_more_than_their_number(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = (work(prefix, count, monkeypatch) for count in (300, 1200))
    # Where each is looked up among all, or asked of each rule, this is sixteen times as much.
    assert many["compared"] <= 6 * few["compared"] + 1200
    assert many["matches"] <= 10 * 1200


def test_a_rule_s_memory_of_columns_is_bounded_within_a_frame() -> None:
    (spec,) = only(RuleHasNoInput)
    run = RunEngine("r", (spec,))
    value = frame(tuple(f"log.{i}" for i in range(20_000)))
    run.apply(value, meta_of(value), offset=0, now_ms=1_000)
    (own, _) = run.snapshots(next_offset=1, clock_ms=1_000, software="")
    assert len(own.payload) < 10_000
