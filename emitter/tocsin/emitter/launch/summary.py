"""`--summary FILE`: one JSON object about the run, as other programs read it."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tocsin.emitter.launch.forwarded_signals import ENDING
from tocsin.schemas.compute_estimates import Compute
from tocsin.schemas.exit_codes import SIGNALLED, STOPPED
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.goodput import Goodput
from tocsin.schemas.records.issues import Issue
from tocsin.schemas.records.runs import CaptureFigures, Outcome
from tocsin.schemas.records.stops.commands import StopRequested
from tocsin.schemas.whole_file import whole_file

VERSION: Final = 1

LEFT_EARLY: Final = "a gradient was not finite; the update was not made (stop.before_update)"
"""The reason of a stop without a command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopFigures:
    """How a stop went: `how` is edge, SIGTERM, SIGKILL or itself; `step` where the ranks left.

    Without a command the ranks have left before an update, and nobody has confirmed it.
    """

    command: StopRequested | None = None
    how: str | None = None
    step: int | None = None
    exit_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What the contract names, before it is JSON. `judged_steps` are those that rules have seen;
    `goodput` is of all incarnations of the run, `saved` what a stop has saved.
    """

    run_id: str
    outcome: Outcome
    exit_code: int
    steps: int
    judged_steps: int
    duration_s: float
    issues: Sequence[Issue] = ()
    rules: Mapping[str, str]
    deliveries: Sequence[Delivery] = ()
    stop: StopFigures | None = None
    capture: CaptureFigures | None = None
    goodput: Goodput | None = None
    saved: Compute | None = None

    def encode(self) -> str:
        """The JSON text, indented, with a newline at its end."""
        capture = self.capture or CaptureFigures(overhead_percent=0.0, records=0, dropped=0)
        document = {
            "version": VERSION,
            "run_id": self.run_id,
            "outcome": self.outcome,
            "exit_code": self.exit_code,
            "steps": self.steps,
            "judged_steps": self.judged_steps,
            "duration_s": round(self.duration_s, 3),
            "issues": [_issue(issue) for issue in self.issues],
            "rules": dict(sorted(self.rules.items())),
            "deliveries": [_delivery(delivery) for delivery in self.deliveries],
            "stop": None if self.stop is None else _stop(self.stop),
            "capture": capture.model_dump(mode="json"),
            "goodput": None if self.goodput is None else self.goodput.model_dump(mode="json"),
            "saved": None if self.saved is None else self.saved.facts,
        }
        return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def write(self, path: Path) -> None:
        """Write it whole or not at all; into a device or a pipe as it is. Raises OSError."""
        with whole_file(path) as draft:
            draft.write_text(self.encode(), encoding="utf-8")


def decide_end(
    returncode: int, *, stopped: bool, passed_on: AbstractSet[signal.Signals]
) -> tuple[Outcome, int]:
    """Outcome and exit code. `returncode` is -n after signal n; `passed_on` went through us.

    A stop that was acknowledged or enforced decides, whatever CMD returned: torchrun turns a
    worker's 79 into 1.
    """
    exit_code = returncode if returncode >= 0 else SIGNALLED - returncode
    if stopped:
        return "stopped", STOPPED
    if exit_code == 0:
        return "completed", 0
    by_signal = exit_code - SIGNALLED in ENDING
    if by_signal or passed_on & ENDING:
        return "interrupted", exit_code
    return "failed", exit_code


def _issue(issue: Issue) -> dict[str, object]:
    dumped = issue.model_dump(mode="json")
    return {
        "id": issue.issue_id,
        "rule": issue.rule,
        "branch": issue.branch,
        "consequence_of": issue.consequence_of,
        "severity": issue.severity,
        "state": issue.state,
        "first_step": issue.first_step,
        "first_rank": issue.first_rank,
        "subject": dumped["subject"],
        "reason": issue.reason,
        "evidence": dumped["evidence"],
    }


def _delivery(delivery: Delivery) -> dict[str, object]:
    return {
        "id": delivery.delivery_id,
        "issue": delivery.issue_id,
        "issue_state": delivery.issue_state,
        "action": delivery.action,
        "kind": delivery.kind,
        "state": delivery.state,
        "reason": delivery.reason,
        "attempts": delivery.attempts,
    }


def _stop(stop: StopFigures) -> dict[str, object]:
    command = stop.command
    checkpoint = None if command is None else command.last_good_checkpoint
    return {
        "command_id": None if command is None else command.command_id,
        "issue": None if command is None else command.issue_id,
        "rule": None if command is None else command.rule,
        "reason": LEFT_EARLY if command is None else command.reason,
        "requested_by": "" if command is None else command.requested_by,
        "step": stop.step,
        "how": stop.how,
        "exit_code": STOPPED if command is None else stop.exit_code,
        "last_good_checkpoint": None if checkpoint is None else checkpoint.model_dump(mode="json"),
    }
