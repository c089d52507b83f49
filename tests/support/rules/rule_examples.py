"""An issue of each rule for its page of the docs: of a real small training, or of its own tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

import tocsin.stream_rules.testing as made_runs
from fixtures.runs.faults import Fault, faults
from fixtures.runs.recorded import recorded
from rule_examples import Example
from tocsin.schemas.records.issues import IssueFiring
from tocsin.stream_rules.engine.episodes import Reported
from tocsin.stream_rules.engine.replay import replay
from tocsin.stream_rules.testing import START_MS

TESTS = Path(__file__).resolve().parents[2] / "unit" / "stream_rules"


def recorded_example(rule: str) -> Example | None:
    """What the rule says of a small training with a fault that has it as its root, of the first one
    that has something to draw; None if there is no such training, or the rule says nothing. Trains
    it if its telemetry is not kept yet."""
    first: Example | None = None
    for fault in sorted(faults().values(), key=lambda fault: _preference(fault, rule)):
        if rule not in {root.partition("/")[0] for root in fault.root}:
            continue
        for program in fault.programs:
            found = _of(replay(recorded(program, fault.name)), rule)
            if not found:
                continue
            run = f"a small training ({program}): {fault.meaning}"
            example = Example.of(max(found, key=_tells), run)
            if example.drawable:
                return example
            first = first or example
    return first


def made_examples(rules: Iterable[str]) -> dict[str, Example]:
    """What each of the rules says in its own tests, of the run that shows most. Runs those tests,
    in this process."""
    wanted = set(rules)
    found: dict[str, list[IssueFiring]] = {rule: [] for rule in wanted}

    def keeping(*args: Any, **kwargs: Any) -> list[Reported]:
        told = replay(*args, **kwargs)
        for rule in wanted:
            found[rule] += _of(told, rule)
        return told

    files = [path for path in sorted(TESTS.rglob("test_*.py")) if _names(path, wanted)]
    if files:
        patch = pytest.MonkeyPatch()
        patch.setattr(made_runs, "replay", keeping)
        try:
            pytest.main(
                ["-q", "-n", "0", "--no-header", "-p", "no:cacheprovider", *map(str, files)]
            )
        finally:
            patch.undo()
    return {rule: _made(issues) for rule, issues in sorted(found.items()) if issues}


def _made(issues: Sequence[IssueFiring]) -> Example:
    issue = max(issues, key=_tells)
    made = START_MS <= issue.onset_ms < 2 * START_MS
    run = "a made series, from the tests" if made else "a small training, from the tests"
    return Example.of(issue, run)


def _of(told: Iterable[Reported], rule: str) -> list[IssueFiring]:
    issues = (one.issue for one in told)
    return [issue for issue in issues if issue.use == rule and issue.state == "firing"]


def _preference(fault: Fault, rule: str) -> tuple[int, str]:
    """Faults that are this rule's alone show it best."""
    return len(fault.root) + len(fault.also), fault.name


def _tells(issue: IssueFiring) -> tuple[int, int]:
    """How much there is to see."""
    series = issue.evidence.series
    return (0 if series is None else len(set(series.values))), len(issue.evidence.facts)


def _names(path: Path, rules: Iterable[str]) -> bool:
    text = path.read_text(encoding="utf-8")
    return any(f'"{rule}"' in text for rule in rules)
