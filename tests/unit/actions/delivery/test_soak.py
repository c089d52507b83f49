"""A day of alarms through the service in virtual time: its memory does not grow with them.

The long form has 1,000,000 issues; the short one counts the same objects after fewer.
"""

from __future__ import annotations

import gc
from functools import partial

import pytest

from support.actions.virtual_actions import VirtualActions
from support.records.issues import TOPICS, issue
from tocsin.actions.decision.retry import Outcome
from tocsin.actions.delivery.receiver_queues import Notice
from tocsin.actions.ledger import final_entries
from tocsin.runtime import metrics as names
from tocsin.runtime.prometheus_metrics import PrometheusMetrics

DAY_MS = 86_400_000
QUARTERS = 4
OK = Outcome(status=200, phrase="OK")


@pytest.mark.timeout(7_200)
@pytest.mark.parametrize(
    ("issues", "most_final"),
    [(1_600, 100), pytest.param(1_000_000, 20_000, marks=pytest.mark.torture)],
)
async def test_a_day_of_alarms_leaves_memory_as_it_was(
    monkeypatch: pytest.MonkeyPatch, issues: int, most_final: int
) -> None:
    monkeypatch.setattr(final_entries, "MAX_FINAL", most_final)
    metrics = PrometheusMetrics()

    def answer(notice: Notice) -> Outcome:
        # One of sixteen fails at first; and for ten minutes of each quarter all do.
        if notice.delivery.attempts == 0 and notice.delivery.delivery_id[0] == "0":
            return Outcome(status=503, retry_after="20")
        passed_ms = actions.now_ms - start_ms
        return OK if passed_ms % (DAY_MS // QUARTERS) > 600_000 else Outcome(failure="timeout")

    actions = VirtualActions({"ml": answer}, metrics=metrics, keep=False)
    start_ms = actions.now_ms
    objects, waiting = [], 0.0
    for quarter in range(QUARTERS):
        for number in range(issues // QUARTERS // 2):
            nth = quarter * issues + number
            make = partial(issue, f"run-{nth % 50}", episode=str(nth), severity="warning")
            await actions.take(make(), make(resolved=True))
            at = quarter / QUARTERS + number / (issues / 2)
            await actions.until(round(DAY_MS * at))
            waiting = max(waiting, metrics.value(names.PENDING))
        await actions.until(DAY_MS * (quarter + 1) // QUARTERS)
        gc.collect()
        objects.append(sum(_is_ours(type(each)) for each in gc.get_objects()))

    await actions.until(DAY_MS + 1_800_000)  # past the outage with which the next quarter begins
    assert metrics.value(names.DELIVERIES, kind="webhook", state="delivered") == issues
    assert metrics.value(names.PENDING) == 0
    assert waiting > issues / QUARTERS / 50, "some waited for the receiver"
    # Each entry was written, and all but the newest final ones were removed.
    entries = actions.outputs[TOPICS.actions]
    assert entries >= 3 * issues - most_final
    # From the second quarter on there are as many objects of ours as before. (Those of others may
    # become more by threads of tests before, in this process.)
    assert objects[1] > most_final
    assert max(objects[2:]) - objects[1] < most_final


def _is_ours(kind: type) -> bool:
    # A class may have something else of that name.
    module = kind.__module__
    return isinstance(module, str) and module.startswith("tocsin")
