"""What the rules on losses report of real loss series: false warnings and stops, counted.

    python benchmarks/loss_series.py SERIES.csv.gz [--classes 50304] [--optimizers 1] [--json]

The file has the columns run, step and train_loss; each run of it is known to have completed. Each
series is replayed as it is, and once more as if its run had been resumed at each third.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tocsin.stream_rules.engine.configured_rules import RuleSpec
from tocsin.stream_rules.testing import RunBuilder, issues_of, only

RULES: Final = ("loss_diverged", "loss_spike", "loss_not_decreasing", "overfit")

Points = list[tuple[int, float]]


def read(path: Path) -> dict[str, Points]:
    """The points of each run, in the order of their steps."""
    runs: dict[str, Points] = {}
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["train_loss"]:
                runs.setdefault(row["run"], []).append((int(row["step"]), float(row["train_loss"])))
    return {name: sorted(points) for name, points in runs.items()}


def reported(
    points: Points, specs: Sequence[RuleSpec], *, classes: int, optimizers: int
) -> list[str]:
    """Each issue of one series: its rule, branch and gravest severity."""
    run = RunBuilder()
    run.started(optimizers=optimizers)
    if classes:
        run.loss_inputs(classes)
    steps, losses = zip(*points, strict=True)
    run.steps(steps, loss=losses, per_frame=20)
    last = {issue.issue_id: issue for issue in issues_of(run.records, specs=specs)}
    return [
        f"{i.rule}/{i.branch or '-'} {i.severity}{' STOP' if i.stop_worthy else ''}"
        for i in last.values()
    ]


def main() -> None:
    """Count, and print. Takes about a minute for 300,000 points."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("series", type=Path)
    parser.add_argument("--classes", type=int, default=0)
    parser.add_argument("--optimizers", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    specs = tuple(spec for rule in RULES for spec in only(rule))
    found: Counter[str] = Counter()
    whole: Counter[str] = Counter()
    runs = read(args.series)
    for points in runs.values():
        for third in range(3):
            part = points[third * len(points) // 3 :]
            issues = reported(part, specs, classes=args.classes, optimizers=args.optimizers)
            (found if third else whole).update(issues)
    count = sum(map(len, runs.values()))
    if args.json:
        report = {"runs": len(runs), "points": count, "whole": whole, "resumed": found}
        json.dump(report, sys.stdout)
        return
    print(f"{len(runs)} runs, {count:,} points")
    for title, counts in (("whole", whole), ("as if resumed at each third", found)):
        print(f"{title}: {sum(counts.values())} issues")
        for name, times in counts.most_common():
            print(f"  {times:4d}  {name}")


if __name__ == "__main__":
    main()
