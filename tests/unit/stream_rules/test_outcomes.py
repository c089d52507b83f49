"""What rules answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from tocsin.schemas.records.issues import Evidence, Fact, Subject
from tocsin.stream_rules.outcomes import Finding, fact


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.int64(2), np.array([1, 2])[1]])
def test_a_fact_takes_any_number(value: float) -> None:
    found = fact("ratio", value, limit=np.int32(1), unit="percent")
    assert found == Fact(name="ratio", value=2.0, limit=1.0, unit="percent")
    assert type(found.value) is float


def test_a_fact_takes_a_word() -> None:
    assert fact("reason", "large") == Fact(name="reason", value="large")


def test_a_finding_has_its_evidence_however_it_was_given() -> None:
    facts = [fact("ratio", 2.0)]
    subject = Subject(kind="loss", name="loss")
    flat = Finding(subject=subject, reason="r", facts=facts, also=["b"], explanation="why")
    evidence = Evidence(facts=tuple(facts), also=("b",), explanation="why")
    assert flat.evidence == evidence
    assert flat == Finding(subject=subject, reason="r", evidence=evidence)
    assert replace(flat, severity="info").evidence == evidence
    assert Finding(subject=subject, reason="r").evidence == Evidence()


def test_evidence_that_is_too_large_is_refused_where_the_rule_makes_it() -> None:
    with pytest.raises(ValidationError):
        Finding(subject=Subject(kind="loss", name="loss"), reason="r", facts=[fact("x", 1)] * 65)
