"""Language models that lose what they had learned: diverged to a plateau, or back after a while.

The documented runs are made: the numbers of the logged losses are those of BigScience's chronicles
(github.com/bigscience-workshop/bigscience, Apache 2.0), the losses before and between are not.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from tocsin.schemas.records.issues import IssueFiring
from tocsin.stream_rules.signals.lost_progress import LostProgress
from tocsin.stream_rules.testing import RunBuilder, issues_of, only

DIVERGED = only("loss_diverged")
SPIKE = only("loss_spike")
VOCABULARY = 50257
GUESS = float(np.log(VOCABULARY))

Losses = npt.NDArray[np.float64]


def learned(level: float, steps: int = 1500, start: float = GUESS) -> Losses:
    """A loss that falls to a level."""
    return level + (start - level) * np.exp(-np.arange(steps) / (steps / 8))


def ramp(*parts: tuple[float, float, int]) -> Losses:
    """Straight lines: from, to, over so many losses."""
    return np.concatenate([np.linspace(low, high, count) for low, high, count in parts])


def noisy(losses: Losses, seed: int = 0) -> Losses:
    chance = np.random.default_rng(seed)
    found: Losses = losses + 0.03 * chance.standard_normal(len(losses))
    return found


def run_of(losses: Losses, *, classes: int = VOCABULARY, every: int = 1) -> RunBuilder:
    run = RunBuilder()
    run.started()
    if classes:
        run.loss_inputs(classes)
    run.steps(range(0, every * len(losses), every), loss=losses, per_frame=10)
    return run


def gravest(issues: list[IssueFiring]) -> str:
    """What is to be said of a run: nothing, a warning, or that it is stopped."""
    if any(issue.stop_worthy and issue.severity == "critical" for issue in issues):
        return "stop"
    return "warning" if issues else "nothing"


DOCUMENTED = {
    "104B, 1": (ramp((6.4, 14.0, 10), (14.0, 7.15, 200), (7.15, 7.15, 1500)), 6.4, "warning"),
    "104B, 2, back by nine tenths": (
        ramp((6.37, 10.2, 10), (10.2, 6.7, 400), (6.7, 6.7, 600)),
        6.37,
        "warning",
    ),
    "104B, 12": (ramp((3.3, 7.6, 10), (7.6, 7.0, 1200)), 3.3, "stop"),
    "embedding norm, 7": (ramp((2.67, 4.4, 10), (4.4, 4.2, 600)), 2.67, "warning"),
    "13B, back in 500": (ramp((2.77, 8.7, 10), (8.7, 2.8, 490), (2.75, 2.7, 600)), 2.77, "warning"),
    "104B, 11, back slowly": (
        ramp((3.06, 7.7, 10), (7.7, 4.0, 300), (4.0, 3.05, 500), (3.0, 3.0, 400)),
        3.06,
        "warning",
    ),
}


@pytest.mark.parametrize("name", DOCUMENTED)
@pytest.mark.parametrize("every", [1, pytest.param(10, marks=pytest.mark.torture)])
def test_the_documented_runs(name: str, every: int) -> None:
    shape, level, expected = DOCUMENTED[name]
    run = run_of(noisy(np.concatenate([learned(level), shape])), every=every)
    issues = issues_of(run.records, specs=DIVERGED)
    assert gravest(issues) == expected
    states = [issue.state for issue in issues]
    # One that is given up is never told as over; one that came back is.
    assert ("resolved" in states) is ("back" in name)
    spikes = [issue.state for issue in issues_of(run.records, specs=SPIKE)]
    assert ("resolved" in spikes) is ("back" in name)


@pytest.mark.parametrize(
    "rise", [1, *(pytest.param(rise, marks=pytest.mark.torture) for rise in (100, 400)), 1000]
)
@pytest.mark.parametrize(("level", "expected"), [(5.0, "warning"), (7.5, "stop"), (10.8, "stop")])
def test_a_slow_rise_to_a_plateau(level: float, rise: int, expected: str) -> None:
    after = ramp((2.8, level, rise), (level, level, 1500))
    issues = issues_of(run_of(noisy(np.concatenate([learned(2.8), after]))).records, specs=DIVERGED)
    assert gravest(issues) == expected
    assert "resolved" not in {issue.state for issue in issues}
    assert issues[0].branch == "lost" if level < 8 else "risen"
    assert "of the progress is lost" in issues[-1].reason


def plateau(top: float, floor: float, tau: float, losses: int = 1000) -> Losses:
    """A loss that jumps, and comes down towards a floor."""
    found: Losses = floor + (top - floor) * np.exp(-np.arange(losses) / tau)
    return found


def test_what_has_risen_is_not_over_as_long_as_progress_is_lost() -> None:
    run = run_of(noisy(np.concatenate([learned(2.8), plateau(10.5, 7.0, 40)])))
    states = issues_of(run.records, specs=DIVERGED)
    assert [(i.state, i.branch, i.severity) for i in states] == [
        ("firing", "risen", "warning"),
        ("ongoing", "lost", "critical"),
    ]
    assert states[0].issue_id == states[1].issue_id


def test_what_has_risen_was_lost_and_rises_again_is_one_issue() -> None:
    back = ramp((3.2, 2.8, 200))
    parts = [learned(2.8), plateau(10.5, 7.0, 40, 400), back, plateau(10.5, 7.0, 40, 100)]
    states = issues_of(run_of(noisy(np.concatenate(parts))).records, specs=DIVERGED)
    assert [(i.state, i.branch) for i in states] == [
        ("firing", "risen"),
        ("resolved", "lost"),
        ("firing", "risen"),
    ]
    assert "is back at" in states[1].reason
    assert {issue.issue_id for issue in states} == {states[0].issue_id}


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (plateau(6.0, 3.0, 1500), "warning"),
        (plateau(6.0, 3.0, 3000, 1500), "warning"),
        (plateau(8.0, 3.0, 1500, 1500), "warning"),
        (plateau(5.5, 3.0, 1000), "warning"),
        (plateau(9.5, 7.0, 100), "stop"),
    ],
)
def test_no_stop_while_the_loss_falls(after: Losses, expected: str) -> None:
    """The next stage of a curriculum: code, then another language."""
    states = issues_of(run_of(noisy(np.append(learned(1.2), after))).records, specs=DIVERGED)
    assert gravest(states) == expected
    assert {issue.issue_id for issue in states} == {states[0].issue_id}
    assert "resolved" not in {issue.state for issue in states}


def test_of_a_state_that_an_earlier_version_saved_it_is_not_known_whether_the_loss_falls() -> None:
    lost = LostProgress(lowest=1.0, highest=6.0, above_low=480, above_high=480)
    for step in range(251):
        assert lost.falls(6.0)
        lost.update(step, 6.0, 10.0, low=0.15, high=0.4, at_ms=0)
    lost.update(251, 6.0, 10.0, low=0.15, high=0.4, at_ms=0)
    assert not lost.falls(6.0)
    for step in range(3000):
        lost.update(step, 6.0, 10.0, low=0.15, high=0.4, at_ms=0)
    assert len(lost.noted) == 26


@pytest.mark.parametrize(
    ("losses", "classes", "expected"),
    [
        (np.concatenate([learned(0.02, start=2.3), np.full(900, 2.3)]), 10, "stop"),
        (np.concatenate([learned(0.02, start=2.3), np.full(900, 1.2)]), 10, "warning"),
        (np.concatenate([learned(0.5, start=6.0), np.full(900, 5.9)]), 0, "warning"),
        (ramp((2.9, 2.7, 900), (3.6, 3.5, 900)), VOCABULARY, "nothing"),
        (np.append(learned(2.8), ramp((2.8, 7.0, 20), (7.0, 2.8, 600))), VOCABULARY, "warning"),
        (np.append(learned(2.8), ramp((2.8, 9.0, 20), (9.0, 2.8, 150))), VOCABULARY, "nothing"),
        (learned(3.3, start=80.0), VOCABULARY, "nothing"),
    ],
    ids=[
        "a classifier that is back at a guess",
        "a classifier that gets harder data",
        "a loss of which nothing is known",
        "fine-tuning on other data",
        "back within 600 losses",
        "back within 200 losses",
        "a bad initialisation",
    ],
)  # fmt: skip
def test_what_else_may_happen(losses: Losses, classes: int, expected: str) -> None:
    issues = issues_of(run_of(losses, classes=classes).records, specs=DIVERGED)
    assert gravest(issues) == expected


def test_the_share_means_nothing_before_something_is_learned() -> None:
    lost = LostProgress()
    for step, now in enumerate([10.0, 9.5, 9.9, 10.0, 12.0]):
        lost.update(step, now, 10.0, low=0.15, high=0.4, at_ms=0)
        assert lost.share == 0.0
    lost.update(5, 8.0, 10.0, low=0.15, high=0.4, at_ms=0)
    lost.update(6, 9.0, 10.0, low=0.15, high=0.4, at_ms=7)
    assert (lost.share, lost.lowest_step, lost.since, lost.since_ms) == (0.5, 5, 6, 7)
    assert (lost.above_low, lost.above_high) == (1, 1)
    assert not lost.comes_back(9.0)
    assert lost.comes_back(8.6)
