"""The person who gives a command, and why."""

import pytest

from tocsin.console.person import person_named, reason_given
from tocsin.schemas.errors import ConfigurationError


def test_a_name_and_a_reason_are_stripped() -> None:
    assert person_named(" ana ") == "ana"
    assert "@" in person_named(None)
    assert reason_given(" lower rate\n") == "lower rate"


@pytest.mark.parametrize("by", ["", " ", "a\nb", "x" * 201])
def test_a_name_that_cannot_be_recorded_is_refused(by: str) -> None:
    with pytest.raises(ConfigurationError, match="--by: expected a name of 1 to 200 characters"):
        person_named(by)


def test_a_reason_that_is_too_long_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="expected at most 4,096 characters, found 5,000"):
        reason_given("x" * 5000)
