"""Which backend may end the job of a run: none, unless the section `policy` allows it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tocsin.actions.decision.planned import Place
from tocsin.schemas.configuration.policy import PolicyEntry
from tocsin.schemas.configuration.routing.matches import labels_fit
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.records.runs import SchedulerJob

CanEnd = Callable[[SchedulerJob], bool]
"""Whether a target can end such a job."""


@dataclass(frozen=True, slots=True)
class Permit:
    """Whether a backend may end a job.

    Attributes:
        target: which one; None: none may.
        why: the config line that permits it, or why none may and what to add.
    """

    target: str | None
    why: str


@dataclass(frozen=True, slots=True)
class StopPolicy:
    """Who may end which job, beyond a run's own launcher.

    Runs, issues and stops of other topic prefixes are never asked about here: a service reads the
    topics of its own prefix only (`ActionsService.inputs` and `follows`), and on Kafka the access
    lists decide who may write there. So the runs that an entry can match are those of one team.

    Attributes:
        entries: in the file's order; the first that fits decides.
        targets: by name, which jobs each can end.
    """

    entries: Sequence[PolicyEntry] = ()
    targets: Mapping[str, CanEnd] = field(default_factory=dict)
    place: Place = lambda loc: ".".join(map(str, loc))

    def named_for(self, labels: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """The targets that may be asked about runs with these labels (`run` among them), in the
        order in which they are tried, each with the config line. The job decides which one fits.
        """
        named: set[str] = set()
        for entry in self.entries:
            if labels_fit(entry.match, labels):
                for name, loc in entry.named():
                    if name not in named:
                        named.add(name)
                        yield name, f"policy ({self.place(loc)})"

    def permit(self, run: RunView, job: SchedulerJob) -> Permit:
        """Which target may end the job that a run is in."""
        labels = {**run.labels, "run": run.run_id}
        unfit = []
        for entry in self.entries:
            if not labels_fit(entry.match, labels):
                continue
            for name, loc in entry.named():
                if name in self._fitting(job):
                    return Permit(name, f"policy ({self.place(loc)})")
            unfit.append(self.place(entry.loc))
        if unfit:
            what = f"no target that the policy permits ({', '.join(unfit)}) ends jobs of {job.kind}"
        else:
            what = "the policy permits none for this run"
        return Permit(None, f"{what}; to permit it: {self._example(run, job)}")

    def _fitting(self, job: SchedulerJob) -> Iterator[str]:
        return (name for name, can_end in self.targets.items() if can_end(job))

    def _example(self, run: RunView, job: SchedulerJob) -> str:
        target = next(self._fitting(job), None)
        named = target or f"my-{job.kind}"
        team = run.labels.get("team")
        match = f"run: {run.run_id}" if team is None else f"team: {team}"
        entry = f"policy: [{{match: {{{match}}}, may_stop_on: [{named}]}}]"
        return entry if target else f"targets: {{{named}: {{type: {job.kind}}}}} and {entry}"
