"""An issue of each rule, as an example for its page: kept as a file, drawn from that file.

`docs/rules/examples/RULE.json` holds what one firing issue said, and of which run; it changes only
when it is recorded anew (`tools/rule-examples`). The picture beside it is made from it each time
the pages are written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Self

from pydantic import BaseModel, ConfigDict

from series_svg import series_svg
from tocsin.schemas.records.issues import Evidence, IssueFiring, Severity, Subject

FOLDER: Final = "examples"
"""Of the examples, below the folder of the rules' pages."""


class Example(BaseModel):
    """What one issue of a rule said.

    Attributes:
        run: which run it was of, in words.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    rule: str
    run: str
    branch: str = ""
    severity: Severity
    subject: Subject
    reason: str
    first_step: int | None = None
    evidence: Evidence

    @classmethod
    def of(cls, issue: IssueFiring, run: str) -> Self:
        """That of an issue."""
        return cls(
            rule=issue.use,
            run=run,
            branch=issue.branch,
            severity=issue.severity,
            subject=issue.subject,
            reason=issue.reason,
            first_step=issue.first_step,
            evidence=_rounded(issue.evidence),
        )

    @property
    def drawable(self) -> bool:
        """Whether there is a series to draw."""
        series = self.evidence.series
        return series is not None and len(series.values) > 1


def _rounded(evidence: Evidence) -> Evidence:
    """The same with as many digits as a picture shows."""
    if evidence.series is None:
        return evidence
    values = tuple(float(f"{value:.5g}") for value in evidence.series.values)
    series = evidence.series.model_copy(update={"values": values})
    return evidence.model_copy(update={"series": series})


def read_example(folder: Path, rule: str) -> Example | None:
    """The example of a rule; None if there is none. `folder` is that of the rules' pages.

    Raises:
        ValueError: the file is none.
    """
    path = folder / FOLDER / f"{rule}.json"
    return Example.model_validate_json(path.read_bytes()) if path.exists() else None


def write_example(folder: Path, example: Example) -> Path:
    """Keep it; its file."""
    path = folder / FOLDER / f"{example.rule}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = example.model_dump_json(indent=1, exclude_defaults=True)
    path.write_text(f"{text}\n", encoding="utf-8")
    return path


def picture(example: Example) -> str | None:
    """Its series as SVG; None if it has none. Pure."""
    series = example.evidence.series
    if series is None or not example.drawable:
        return None
    title = f"{example.rule}: {example.reason}"
    return series_svg(series, first_step=example.first_step, title=title)
