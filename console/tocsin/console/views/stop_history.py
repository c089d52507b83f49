"""How a stop went: who asked, and each state with the time in between. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from tocsin.schemas.compute_estimates import NO_PRICES, Compute, saved_by_stop
from tocsin.schemas.configuration.sections import PricesConfig
from tocsin.schemas.records.checkpoints import Checkpoint
from tocsin.schemas.records.deliveries import BackendStop, Delivery
from tocsin.schemas.records.run_view import RunView, StopView
from tocsin.schemas.records.runs_fold import CommandSeen
from tocsin.schemas.text import exit_text, plain_line, time_text

_ORDER: Final = (
    "requested",
    "acknowledged",
    "checkpoint_decided",
    "left",
    "escalated",
    "exited",
    "refused",
    "expired",
)


@dataclass(frozen=True, slots=True)
class StopHistory:
    """A stop as the run has answered it; `command` is None where it is not on the bus any more,
    `saved` until the run has been stopped.
    """

    view: StopView
    command: CommandSeen | None
    saved: Compute | None = None

    def is_for(self, issue_id: str, delivery_ids: Collection[str]) -> bool:
        """Whether it was asked for because of that issue."""
        return self.view.issue_id == issue_id or self.view.command_id in delivery_ids

    @property
    def requested_by(self) -> str:
        """Who asked for it, and why: `ana@node-1: wrong data set`."""
        if self.command is None:
            return ""
        command = self.command.command
        by = plain_line(command.requested_by) or "somebody"
        return f"{by}: {plain_line(command.reason)}"

    @property
    def moments(self) -> list[tuple[str, int]]:
        """State and append time, in order of time."""
        moments = dict(self.view.states)
        if self.command is not None:
            moments["requested"] = self.command.append_ms
        return sorted(moments.items(), key=lambda moment: (moment[1], _rank(moment[0])))


def stop_history(
    run: RunView,
    commands: Mapping[str, CommandSeen],
    incarnation: str,
    prices: PricesConfig = NO_PRICES,
) -> StopHistory | None:
    """The stop of that incarnation, if the run's view still speaks of it; `prices` are for the
    estimate of what it has saved.
    """
    if run.stop is None or run.incarnation != incarnation:
        return None
    command = commands.get(run.stop.command_id)
    return StopHistory(run.stop, command, saved_by_stop(run, prices))


def history_lines(history: StopHistory) -> list[str]:
    """For people: who asked, then a line for each state with the milliseconds since the last."""
    lines = [f"requested by {history.requested_by}"] if history.requested_by else []
    before: int | None = None
    for state, at_ms in history.moments:
        since = time_text(at_ms) if before is None else f"{at_ms - before:,} ms later"
        lines.append(f"{_state_text(history.view, state):<32}{since}")
        before = at_ms
    if history.view.reason:
        lines.append(plain_line(history.view.reason))
    if history.saved is not None:
        lines.append(f"saved: {history.saved.text}")
    return lines


def history_facts(history: StopHistory) -> dict[str, object]:
    """The same as JSON values."""
    command = None if history.command is None else history.command.command
    saved = history.view.checkpoint
    return {
        "command_id": history.view.command_id,
        "issue_id": history.view.issue_id,
        "state": history.view.state,
        "requested_by": None if command is None else command.requested_by,
        "reason": None if command is None else command.reason,
        "answer": history.view.reason or None,
        "step": history.view.step,
        "how": history.view.how,
        "exit_code": history.view.exit_code,
        "checkpoint_decision": history.view.decision or None,
        "checkpoint": None if saved is None else saved.model_dump(mode="json"),
        "states": dict(history.moments),
        "saved": None if history.saved is None else history.saved.facts,
    }


def checkpoint_line(decision: str, checkpoint: Checkpoint | None, reason: str = "") -> str:
    """What became of the checkpoint of a stop, in a line."""
    path = "" if checkpoint is None else plain_line(checkpoint.path)
    line = {
        "saved": f"saved a checkpoint {path}".rstrip(),
        "protected": f"saved no checkpoint; the last good one is {path}",
        "skipped": "saved no checkpoint, as requested",
    }.get(decision, "saved no checkpoint")
    return f"{line}: {plain_line(reason)}" if reason else line


def job_text(backend: BackendStop) -> str:
    """The job that a backend is to end: `farm is to end the job of slurm (job 7, restarts 0)`."""
    names = ", ".join(f"{name} {value}" for name, value in backend.job.names.items())
    return plain_line(f"{backend.target} is to end the job of {backend.job.kind} ({names})")


def backend_lines(deliveries: Iterable[Delivery]) -> Iterator[str]:
    """For people: each stop that a backend works on, with how far it has come."""
    for one in deliveries:
        if one.backend is not None and not one.final:
            yield plain_line(f"stop of {one.run_id}: {one.reason}")


def _state_text(view: StopView, state: str) -> str:
    if state == "checkpoint_decided":
        return checkpoint_line(view.decision, view.checkpoint)
    if state == "left" and view.step is not None:
        return f"left at step {view.step:,}"
    if state == "escalated" and view.how in ("SIGTERM", "SIGKILL"):
        return f"escalated: {view.how}"
    if state == "exited":
        how = "" if view.how is None else f" {exit_text(view.how)}"
        code = "" if view.exit_code is None else f" with {view.exit_code}"
        return f"exited{how}{code}"
    return state


def _rank(state: str) -> int:
    return _ORDER.index(state) if state in _ORDER else len(_ORDER)
