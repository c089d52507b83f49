"""The fault matrix: each thing that a receiver can do, in virtual time.

`test_sender` of the webhooks sees that a real server's faults give these outcomes.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from support.actions.faults import FAULTS, Fault
from support.actions.virtual_actions import VirtualActions
from support.records.issues import issue
from tocsin.actions.decision.retry import Outcome

GIVE_UP_MS = 600_000


@pytest.mark.parametrize("fault", FAULTS, ids=str)
async def test_a_fault_that_stays(fault: Fault) -> None:
    actions = VirtualActions({"ml": lambda notice: fault.outcome}, give_up_ms=GIVE_UP_MS)
    await actions.take(issue(stop_worthy=False))
    await actions.until(2 * GIVE_UP_MS)

    (delivery,) = actions.last("ml")
    assert (delivery.state, actions.finals[delivery.delivery_id]) == (fault.state, 1)
    times = [at_ms for at_ms, _ in actions.attempts]
    assert delivery.attempts == len(times)
    if fault.state == "expired":
        assert fault.wait_ms[0] <= times[1] <= fault.wait_ms[1]
        # Full jitter below a limit that doubles, unless the receiver asks for more.
        for nth, (before, after) in enumerate(pairwise(times[:-1])):
            assert 100 <= after - before <= max(fault.wait_ms[1], min(1_000 << nth, 300_000))
        assert times[-1] == GIVE_UP_MS, "the last attempt is made when time is up"
        assert actions.outputs["tocsin.dlq.v1"] == 1
    else:
        assert times == [0]
        assert actions.outputs["tocsin.dlq.v1"] == (fault.state == "rejected")


@pytest.mark.parametrize("fault", [one for one in FAULTS if one.state == "expired"], ids=str)
async def test_a_fault_that_passes(fault: Fault) -> None:
    answers = [fault.outcome, Outcome(status=200, phrase="OK")]
    actions = VirtualActions({"ml": lambda notice: answers.pop(0)}, give_up_ms=GIVE_UP_MS)
    await actions.take(issue(stop_worthy=False))
    await actions.until(GIVE_UP_MS)

    (states,) = actions.states.values()
    assert [(one.state, one.attempts) for one in states] == [
        ("pending", 0),
        ("pending", 1),
        ("delivered", 2),
    ]
    (first, _), (second, _) = actions.attempts
    assert fault.wait_ms[0] <= second - first <= fault.wait_ms[1]
