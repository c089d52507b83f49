"""What rules answer."""

from __future__ import annotations

import numpy as np
import pytest

from tocsin.schemas.records.issues import Fact
from tocsin.stream_rules.outcomes import fact


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.int64(2), np.array([1, 2])[1]])
def test_a_fact_takes_any_number(value: float) -> None:
    found = fact("ratio", value, limit=np.int32(1), unit="percent")
    assert found == Fact(name="ratio", value=2.0, limit=1.0, unit="percent")
    assert type(found.value) is float


def test_a_fact_takes_a_word() -> None:
    assert fact("reason", "large") == Fact(name="reason", value="large")
