"""What is in a digest, from what is on the bus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from tocsin.actions.decision.planned import STOP
from tocsin.actions.digests.intervals import ALL_RUNS, DueDigest
from tocsin.bus.port import EARLIEST, Bus, Partition
from tocsin.bus.reading import read_to_end
from tocsin.runtime.leased_runs import Skip
from tocsin.schemas.records.deliveries import DIGEST, DRILL, Delivery
from tocsin.schemas.records.digests import MAX_RUNS, Digest, DigestRun
from tocsin.schemas.records.issues import Issue
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.records.runs_fold import RunSeen, RunsView
from tocsin.schemas.topics import (
    ISSUE_PARTITIONS,
    TELEMETRY_PARTITIONS,
    Topics,
    issue_partition,
    telemetry_partition,
)


def digest_of(view: RunsView, due: DueDigest, elsewhere: Collection[str] = ()) -> Digest:
    """The facts of a digest about the runs, issues and deliveries that are known, without some."""
    runs = {
        name: run.view
        for name, run in view.seen.items()
        if name not in elsewhere and run.view is not None and _ran(run, run.view, due)
    }
    newest = sorted(runs.values(), key=lambda one: (-one.started_ms, one.run_id))
    issues = [one for one in view.issues if one.run_id in runs and one.severity != "info"]
    mine = [one for one in view.deliveries if one.run_id in runs and _in(due, one.updated_ms)]
    return Digest(
        receiver=due.receiver,
        from_ms=due.from_ms,
        until_ms=due.until_ms,
        runs=tuple(map(_line, newest[:MAX_RUNS])),
        more_runs=max(0, len(newest) - MAX_RUNS),
        issues=sum(_in(due, one.onset_ms or one.at_ms) for one in issues),
        open=sum(view.open(one) and _is_current(one, runs[one.run_id]) for one in issues),
        sent=sum(_sent(one, due.receiver) for one in mine),
        suppressed=Counter(
            one.held
            for one in mine
            if one.held is not None
            and one.state == "suppressed"
            and one.action in (due.receiver, STOP)
        ),
    )


async def read_digest(bus: Bus, topics: Topics, due: DueDigest, skip: Skip | None = None) -> Digest:
    """Read the bus from its start, without a group.

    What somebody else serves (`skip`) is in a digest that comes from there.

    Raises:
        BusError: it does not answer.
    """
    only = None if due.run_id == ALL_RUNS else due.run_id
    runs = range(TELEMETRY_PARTITIONS) if only is None else [telemetry_partition(only)]
    others = range(ISSUE_PARTITIONS) if only is None else [issue_partition(only)]
    partitions = [
        *(Partition(topics.runs, number) for number in runs),
        *(Partition(topics.issues, number) for number in others),
        *(Partition(topics.actions, number) for number in others),
    ]
    view = RunsView(only)
    reader = await bus.reader(dict.fromkeys(partitions, EARLIEST))
    try:
        async for records in read_to_end(reader, await reader.ends(partitions)):
            for record in records:
                view.apply(record)
    finally:
        await reader.close()
    elsewhere = [] if skip is None else [name for name in view.seen if await skip(name)]
    return digest_of(view, due, elsewhere)


def _in(due: DueDigest, at_ms: int) -> bool:
    return due.from_ms <= at_ms < due.until_ms


def _ran(run: RunSeen, view: RunView, due: DueDigest) -> bool:
    """Whether a run was running in the interval: its view is written while it does."""
    return view.started_ms < due.until_ms and run.view_ms >= due.from_ms


def _is_current(issue: Issue, view: RunView) -> bool:
    return view.state == "running" and view.incarnation == issue.incarnation


def _sent(delivery: Delivery, receiver: str) -> bool:
    other = delivery.occasion not in (DIGEST, DRILL)
    return other and delivery.action == receiver and delivery.state == "delivered"


def _line(view: RunView) -> DigestRun:
    return DigestRun(
        run_id=view.run_id,
        state=view.state,
        outcome=view.outcome,
        last_step=view.last_step,
        last_loss=view.last_loss,
    )
