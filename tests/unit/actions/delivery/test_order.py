"""The order of an issue's states at one receiver."""

from __future__ import annotations

import pytest

from support.records.issues import delivery, issue
from tocsin.actions.delivery.order import superseded, waits
from tocsin.schemas.records.deliveries import REPEAT, Delivery
from tocsin.schemas.records.issues import IssueState


def state_of(state: IssueState, times: int = 1, attempts: int = 0) -> Delivery:
    return delivery(
        issue(),
        delivery_id=f"{state}-{times}",
        issue_state=state,
        issue_times=times,
        kind="pagerduty",
        attempts=attempts,
    )


FIRING, ONGOING, RESOLVED = state_of("firing"), state_of("ongoing"), state_of("resolved")
AGAIN = state_of("firing", times=2)
RETRIED = state_of("firing", attempts=1)
REPEAT_LATER = state_of("firing").model_copy(update={"delivery_id": "repeat", "occasion": REPEAT})


@pytest.mark.parametrize(
    ("line", "started", "expected"),
    [
        ([FIRING], [], []),
        ([RESOLVED, FIRING], [], [FIRING]),
        ([FIRING, ONGOING, RESOLVED], [], [FIRING, ONGOING]),
        ([RETRIED, ONGOING], [], [RETRIED]),
        ([RESOLVED, AGAIN], [], [RESOLVED]),
        ([FIRING, ONGOING, RESOLVED], ["firing-1"], [ONGOING]),
        ([], [], []),
    ],
)
def test_a_later_state_supersedes_all_but_what_is_under_way(
    line: list[Delivery], started: list[str], expected: list[Delivery]
) -> None:
    assert superseded(line, started) == expected


@pytest.mark.parametrize(
    ("line", "started", "expected"),
    [
        ([RESOLVED], [], False),
        ([FIRING, RESOLVED], [], True),
        ([RETRIED, RESOLVED], [], False),
        ([RETRIED, RESOLVED], ["firing-1"], True),
        ([RESOLVED, AGAIN], [], False),
        ([REPEAT_LATER, RESOLVED], [], False),
        ([REPEAT_LATER, RESOLVED], ["repeat"], True),
    ],
)
def test_a_state_waits_for_the_first_attempt_of_those_before_it(
    line: list[Delivery], started: list[str], expected: bool
) -> None:
    assert waits(RESOLVED, line, started) is expected
