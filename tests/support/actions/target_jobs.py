"""Jobs that stop targets are asked about."""

from __future__ import annotations

from tocsin.actions.targets.kind import TargetJob
from tocsin.schemas.records.runs import SchedulerJob

STARTED_MS = 1_795_258_012_300
"""When their training started."""


def target_job(
    kind: str,
    names: dict[str, str],
    *,
    started_ms: int = STARTED_MS,
    reason: str = "NaN in the loss at step 1",
) -> TargetJob:
    """A job of that scheduler."""
    return TargetJob(
        run_id="gpt/2",
        incarnation="0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11",
        scheduler=SchedulerJob(kind=kind, names=names),
        started_ms=started_ms,
        delivery_id="d-1",
        reason=reason,
    )
