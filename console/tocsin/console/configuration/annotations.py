"""Problems of a configuration for machines that show them beside the line: GitHub, and SARIF. Pure.

As everywhere, no line of a file is in them: it may hold a secret.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from typing import Final

from tocsin.console.configuration.check import Checked
from tocsin.schemas.configuration.problems import PlacedProblem

_SARIF: Final = "https://json.schemastore.org/sarif-2.1.0.json"
_PAGE: Final = "docs/reference/configuration.md"


def as_github(all_checked: Iterable[Checked]) -> str:
    """Workflow commands of GitHub Actions: a line for each problem and warning."""
    return "\n".join(
        f"::{level} file={_property(problem.source)},line={problem.line},col={problem.column},"
        f"title={_property(f'tocsin {problem.code}')}::{_data(_sentence(problem))}"
        for level, problem in _leveled(all_checked)
    )


def as_sarif(all_checked: Iterable[Checked]) -> str:
    """A log of SARIF 2.1.0, which code scanning reads."""
    results = [_result(level, problem) for level, problem in _leveled(all_checked)]
    codes = sorted({str(result["ruleId"]) for result in results})
    driver = {
        "name": "tocsin",
        "version": version("tocsin"),
        "rules": [{"id": code, "help": {"text": f"{_PAGE}: {code}"}} for code in codes],
    }
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": results,
    }
    log = {"$schema": _SARIF, "version": "2.1.0", "runs": [run]}
    return json.dumps(log, indent=2, ensure_ascii=False)


def _leveled(all_checked: Iterable[Checked]) -> Iterator[tuple[str, PlacedProblem]]:
    for checked in all_checked:
        yield from (("error", problem) for problem in checked.problems)
        yield from (("warning", warning) for warning in checked.warnings)


def _result(level: str, problem: PlacedProblem) -> Mapping[str, object]:
    place = {
        "artifactLocation": {"uri": problem.source},
        "region": {"startLine": problem.line, "startColumn": problem.column},
    }
    return {
        "ruleId": problem.code,
        "level": level,
        "message": {"text": _sentence(problem)},
        "locations": [{"physicalLocation": place}],
    }


def _sentence(problem: PlacedProblem) -> str:
    return problem.message + (f"; try: {problem.hint}" if problem.hint else "")


def _data(text: str) -> str:
    """Text of a workflow command: a line break in it would begin another command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
