"""What a reader wants to know of a run, as the record on the runs topic."""

from __future__ import annotations

from tocsin.schemas.records import run_view as records
from tocsin.schemas.records.run_view import RankView, RunView, TelemetryCounts
from tocsin.schemas.records.runs import CaptureFigures
from tocsin.stream_rules.engine.run import Earlier, RunEngine
from tocsin.stream_rules.engine.run_state import RunState
from tocsin.stream_rules.reading.sharded_norms import WAITING


def run_view(run: RunEngine | Earlier, *, next_offset: int) -> RunView:
    """The run as it is after the telemetry below `next_offset`."""
    state = run.state
    kind: records.RunState = "ended" if state.ended else "lost" if state.lost else "running"
    stopped = state.outcome in ("stopped", "interrupted")
    ranks = sorted(state.ranks.items())
    return RunView(
        run_id=state.run_id,
        incarnation=state.incarnation,
        world_size=state.world_size,
        role="launcher" if state.launcher is not None else "trainer",
        state=kind,
        labels=state.labels,
        scheduler=state.scheduler,
        node=state.node,
        command=state.command,
        started_ms=state.started_ms,
        ended_ms=state.ended_ms,
        outcome=state.outcome,
        exit_code=state.exit_code,
        last_step=state.last_step,
        last_loss=state.last_loss,
        ranks=tuple(
            RankView(
                rank=number,
                last_step=rank.last_step,
                last_heard_ms=rank.last_heard_ms,
                ended=rank.outcome is not None,
                capture=rank.capture,
            )
            for number, rank in ranks
        ),
        telemetry=_telemetry(state),
        rules={
            instance.spec.name: instance.status(ended=state.ended, stopped=stopped)
            for instance in run.instances
            if instance.spec.fits(state.labels)
        },
        issues=sum(instance.found for instance in run.instances),
        stop=state.stop,
        capture=CaptureFigures.joined(
            rank.capture for _, rank in ranks if rank.capture is not None
        ),
        devices=state.devices,
        goodput=state.accounts,
        outlook=state.outlook,
        next_offset=next_offset,
    )


def _telemetry(state: RunState) -> TelemetryCounts:
    furthest = state.last_step or 0
    late = sum(
        rank.outcome is None and rank.last_step is not None and rank.last_step < furthest - WAITING
        for rank in state.ranks.values()
    )
    return TelemetryCounts(
        records_missing=state.missing,
        records_repeated=state.duplicates,
        records_late=state.late,
        ranks_missing=max(0, state.world_size - len(state.ranks)) if state.ranks else 0,
        ranks_late=late,
    )
