"""The runs of our partitions, as far as stops need them: by their newest views. Pure."""

from __future__ import annotations

from collections.abc import Collection

from tocsin.actions.decision.stop_guards import HOUR_MS, TEAM, Fleet
from tocsin.actions.delivery import stop as stops
from tocsin.actions.delivery.retry import Decision
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.issues import Issue
from tocsin.schemas.records.runs import RunView
from tocsin.schemas.records.runs_view import RunSeen, RunsView
from tocsin.schemas.topics import ISSUE_PARTITIONS, telemetry_partition


class FollowedRuns:
    """What the runs topic says, of thousands of runs."""

    def __init__(self) -> None:
        self._view = RunsView()

    def __contains__(self, run_id: str) -> bool:
        """Whether there is a view of it."""
        return run_id in self._view.seen

    def follow(self, view: RunView, time_ms: int) -> bool:
        """Fold in a view; whether it is news. Only what a stop needs of it is kept."""
        view = view.model_copy(update={"ranks": (), "rules": {}, "capture": None})
        return self._view.add(view, time_ms=time_ms)

    def end(self, run_id: str) -> None:
        """The bus keeps this run no more."""
        self._view.seen.pop(run_id, None)

    def release(self, partitions: Collection[int]) -> None:
        """Drop the runs of these partitions of the issues topic."""
        for run_id in list(self._view.seen):
            if telemetry_partition(run_id) % ISSUE_PARTITIONS in partitions:
                del self._view.seen[run_id]

    def has_ended(self, run_id: str, incarnation: str) -> bool:
        """Whether a training has ended or is lost, or another one of its run has started."""
        run = self._view.seen.get(run_id)
        return run is not None and (not run.running or run.incarnation != incarnation)

    def why_no_stop(self, issue: Issue, delivery_id: str, age_ms: int) -> str | None:
        """Why a run is not stopped for an issue; None if it is to be."""
        run = self._view.seen.get(issue.run_id)
        if run is not None and stops.is_behind(run, issue):
            del self._view.seen[issue.run_id]
            run = None
        return stops.why_no_stop(run, issue.incarnation, delivery_id=delivery_id, age_ms=age_ms)

    def fleet(self, run_id: str, stopped: Collection[tuple[str, str]], now_ms: int) -> Fleet:
        """What limits of stops count, without the run in question.

        Args:
            stopped: run and incarnation of stops that were decided here within the hour, of which
                the runs may say nothing yet.
        """
        mine = self._view.seen.get(run_id)
        team = None if mine is None else _team(mine)
        running = sum(run.running for run in self._view.seen.values())
        of = {name for name, _ in stopped if name != run_id}
        for name, run in self._view.seen.items():
            asked_ms = None if run.stop is None else run.stop.states.get("requested")
            if name != run_id and asked_ms is not None and asked_ms > now_ms - HOUR_MS:
                of.add(name)
        teams = [_team(self._view.seen[name]) for name in of if name in self._view.seen]
        return Fleet(
            running=max(1, running),
            stops=len(of),
            team_stops=0 if team is None else teams.count(team),
            age_ms=None if mine is None or mine.view is None else now_ms - mine.view.started_ms,
        )

    def why_over(self, stop: Delivery) -> str | None:
        """Why there is nothing left to stop; None if the run may still be running."""
        run = self._view.seen.get(stop.run_id)
        return None if run is None else stops.why_over(run, stop.incarnation)

    def decide_stop(self, stop: Delivery, now_ms: int) -> Decision | None:
        """What the run's newest view makes of a stop that was sent; None if it says nothing."""
        return stops.decide_stop(self._view.seen.get(stop.run_id), stop, now_ms)


def _team(run: RunSeen) -> str | None:
    return None if run.view is None else run.view.labels.get(TEAM)
