"""What routes, silences and inhibitions can match in an issue. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from tocsin.schemas.records.issues import Issue


def issue_labels(issue: Issue) -> Mapping[str, str]:
    """The labels of its run, and `run`, `rule` and `severity` of the issue."""
    return {
        **issue.labels,
        "run": issue.run_id,
        "rule": issue.rule,
        "severity": issue.severity,
    }
