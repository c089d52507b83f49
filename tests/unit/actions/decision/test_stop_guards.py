"""Between the decision to stop a run and the stop: the switch, the mode, the limits."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tocsin.actions.decision.planned import STOP, Planned
from tocsin.actions.decision.stop_guards import Fleet, StopGuards
from tocsin.schemas.configuration.policy import StopLimits
from tocsin.schemas.configuration.sections import StopMode, StopOptions

HOUR_MS = 3_600_000


def never() -> Fleet:
    raise AssertionError("nothing needs to be counted")


def stop(mode: StopMode | None = None) -> Planned:
    return Planned(STOP, STOP, "tocsin.yaml:4:5", StopOptions(mode=mode))


def limited(**keys: object) -> StopLimits:
    return StopLimits.model_validate(keys)


def test_without_limits_a_stop_is_sent() -> None:
    assert StopGuards().guarded(stop(), never, "") == stop()


@pytest.mark.parametrize(("default", "own"), [("shadow", None), ("enforce", "shadow")])
def test_shadow_mode_only_records(default: StopMode, own: StopMode | None) -> None:
    guarded = StopGuards(default).guarded(stop(own), never, "")

    assert guarded.held is not None
    assert guarded.held.by == "shadow"
    assert "would have been stopped" in guarded.held.reason


@pytest.mark.parametrize(("default", "own"), [("ask", None), ("shadow", "ask")])
def test_ask_mode_asks(default: StopMode, own: StopMode | None) -> None:
    guarded = StopGuards(default).guarded(stop(own), never, "")

    assert (guarded.held, guarded.asks) == (None, "mode: ask")


@pytest.mark.parametrize("mode", ["enforce", "ask", "shadow"])
def test_nothing_is_stopped_while_the_switch_is_off(mode: StopMode) -> None:
    guarded = StopGuards(mode).guarded(stop(), never, "all stops are switched off by ana")

    assert guarded.held is not None
    assert (guarded.held.by, guarded.held.reason) == ("switch", "all stops are switched off by ana")


@pytest.mark.parametrize(
    ("limits", "fleet", "beyond"),
    [
        (StopLimits(per_hour=3), Fleet(stops=2), None),
        (StopLimits(per_hour=3), Fleet(stops=3), "stops within an hour: 3, permitted: 3"),
        (StopLimits(per_team_per_hour=2), Fleet(stops=9, team_stops=1), None),
        (
            StopLimits(per_team_per_hour=2),
            Fleet(team_stops=2),
            "stops of this team within an hour: 2, permitted: 2",
        ),
        # One is always permitted.
        (limited(max_fraction_of_running="10%"), Fleet(running=2), None),
        (limited(max_fraction_of_running="10%"), Fleet(running=19, stops=1), None),
        (
            limited(max_fraction_of_running="10%"),
            Fleet(running=18, stops=1),
            "2 stops of 19 runs, 10% permitted",
        ),
        (StopLimits(min_job_age=timedelta(minutes=5)), Fleet(age_ms=300_000), None),
        (StopLimits(min_job_age=timedelta(minutes=5)), Fleet(age_ms=None), None),
        (
            StopLimits(min_job_age=timedelta(minutes=5)),
            Fleet(age_ms=299_999),
            "the run has been running for less than 5m",
        ),
    ],
)
def test_limits(limits: StopLimits, fleet: Fleet, beyond: str | None) -> None:
    guarded = StopGuards(limits=limits).guarded(stop(), lambda: fleet, "")

    if beyond is None:
        assert guarded == stop()
        return
    assert guarded.held is not None
    assert guarded.held.by == "limit"
    assert beyond in guarded.held.reason
    assert "limits.stops." in guarded.held.reason
    asking = StopGuards(limits=limits.model_copy(update={"on_exceed": "ask"}))
    asks = asking.guarded(stop(), lambda: fleet, "")
    assert asks.held is None
    assert beyond in (asks.asks or "")
