"""Ids are made of data, so that the same thing has the same id wherever it is seen."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tocsin.schemas.errors import ConfigurationError, MalformedRecord
from tocsin.schemas.ids import check_run_id, delivery_id, incarnation_id, issue_id, new_id
from tocsin.schemas.records.runs import Heartbeat


def test_ids_stay_what_they_are() -> None:
    # Consumers drop repeats by id: another id for old data would be a second alarm.
    incarnation = incarnation_id("gpt-1", "slurm-4711", 0, 1)
    issue = issue_id("gpt-1", incarnation, "nonfinite", 1, "1200/lm_head.weight")

    assert incarnation == "6c429141-fe9f-5cd8-9256-2e68b52c031c"
    assert issue == "54a6f81c-5d53-565a-b31d-90014f832102"
    assert delivery_id(issue, "vision-mail", "firing") == "8da978e7-6b77-510d-83c7-861a2bd82859"


def test_each_part_counts() -> None:
    base = ("r", "j", 0, 0)
    others = [("s", "j", 0, 0), ("r", "k", 0, 0), ("r", "j", 1, 0), ("r", "j", 0, 1)]

    assert len({incarnation_id(*parts) for parts in [base, *others]}) == 5
    assert issue_id("r", "i", "ab", 1, "c") != issue_id("r", "i", "a", 1, "bc")


def test_a_fresh_id_is_another_each_time() -> None:
    assert uuid.UUID(new_id()).version == 4
    assert new_id() != new_id()


@pytest.mark.parametrize("run_id", ["a", "gpt-2026-11-21", "job:1@node+x=2", "A" * 200, "0._"])
def test_run_ids_that_can_be(run_id: str) -> None:
    assert check_run_id(run_id) == run_id
    assert Heartbeat(run_id=run_id, incarnation="i").run_id == run_id


@given(st.sampled_from(["", "../x", "a/b", "a b", "-a", ".a", "é", "a\n", "a" * 201, "a\x00"]))
def test_run_ids_that_cannot(run_id: str) -> None:
    with pytest.raises(ConfigurationError, match="run id"):
        check_run_id(run_id)
    with pytest.raises(ValueError, match="run_id"):
        Heartbeat(run_id=run_id, incarnation="i")


def test_errors_have_a_text() -> None:
    assert str(MalformedRecord()) == MalformedRecord.__doc__
