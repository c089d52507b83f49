"""The runs of our partitions, as far as stops need them: by their newest views. Pure."""

from __future__ import annotations

from collections.abc import Collection

from tocsin.actions.decision.stop_guards import HOUR_MS, TEAM, Fleet
from tocsin.actions.delivery.stop_command import is_behind
from tocsin.schemas.compute_estimates import left_of, saved_by_stop
from tocsin.schemas.configuration.sections import PricesConfig
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.issues import Issue
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.records.runs_fold import RunSeen, RunsView
from tocsin.schemas.topics import ISSUE_PARTITIONS, telemetry_partition


class FollowedRuns:
    """The views of the runs topic, of thousands of runs."""

    def __init__(self) -> None:
        self._view = RunsView()

    def __contains__(self, run_id: str) -> bool:
        """Whether there is a view of it."""
        return run_id in self._view.seen

    def follow(self, view: RunView, time_ms: int) -> bool:
        """Fold in a view; whether it is news. Only what a stop needs of it is kept."""
        view = view.model_copy(update={"ranks": (), "rules": {}, "capture": None, "goodput": None})
        return self._view.add(view, time_ms=time_ms)

    def end(self, run_id: str) -> None:
        """Forget a run: the bus keeps it no more."""
        self._view.seen.pop(run_id, None)

    def release(self, partitions: Collection[int]) -> None:
        """Drop the runs of these partitions of the issues topic."""
        for run_id in list(self._view.seen):
            if telemetry_partition(run_id) % ISSUE_PARTITIONS in partitions:
                del self._view.seen[run_id]

    def has_ended(self, run_id: str, incarnation: str) -> bool:
        """Whether a training has ended or is lost, or another one of its run has started."""
        run = self.get(run_id)
        return run is not None and (not run.running or run.incarnation != incarnation)

    def get(self, run_id: str) -> RunSeen | None:
        """A run by its newest view; None if nothing is known of it."""
        return self._view.seen.get(run_id)

    def run_of(self, issue: Issue) -> RunSeen | None:
        """The run of an issue; None if no view can know of that training yet."""
        run = self.get(issue.run_id)
        if run is not None and is_behind(run, issue):
            self.end(issue.run_id)
            return None
        return run

    def stake(self, delivery: Delivery, prices: PricesConfig) -> tuple[str, str] | None:
        """An estimate of the compute that is at stake in the run of an issue, or that its stop has
        saved, with the label of it; None: it is not known, or there is nothing.
        """
        run = self.get(delivery.run_id)
        view = None if run is None else run.views.get(delivery.incarnation)
        if run is None or view is None or delivery.issue_state == "resolved":
            return None
        label, left = "Saved", saved_by_stop(view, prices)
        if left is None and run.running and delivery.incarnation == run.incarnation:
            label, left = "At stake", left_of(view, delivery.created_ms, prices)
        return (label, left.text) if left is not None and left.device_hours else None

    def fleet(self, run_id: str, stopped: Collection[tuple[str, str]], now_ms: int) -> Fleet:
        """What limits of stops count, without the run in question.

        Args:
            stopped: run and incarnation of stops that were decided here within the hour, of which
                the runs may say nothing yet.
        """
        mine = self.get(run_id)
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


def _team(run: RunSeen) -> str | None:
    return None if run.view is None else run.view.labels.get(TEAM)
