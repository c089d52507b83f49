"""What a configuration would do about issues of the past: `tocsin replay` and `tocsin diff`.

Nothing is sent, and no receiver is made: the action service runs in virtual time
(`tocsin.actions.simulation`). The ids of deliveries are made of data, so those of two
configurations can be compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Final, Literal

from pydantic import JsonValue

from tocsin.actions.decision.planned import STOP
from tocsin.actions.simulation import Simulation
from tocsin.schemas.configuration.file import Config
from tocsin.schemas.errors import ConfigurationError, RecordError
from tocsin.schemas.records.deliveries import REPEAT, Delivery
from tocsin.schemas.records.events import EVENT_TYPES, Data, Event
from tocsin.schemas.records.feedback import Feedback
from tocsin.schemas.records.issues import Issue
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.records.runs_fold import RunsView
from tocsin.schemas.text import plain_line, time_text

AFTER_MS: Final = 3_600_000
"""How long the clock continues after the last issue, for what waits then."""

TimedEvent = tuple[int, Event[Data]]
"""An issue, a person's answer or a view of a run, and when it was appended to the bus, Unix
milliseconds."""

Result = Literal["sent", "stopped", "suppressed", "waits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """What would become of one notice or stop.

    Attributes:
        identity: the delivery's id, the same with each configuration.
        at_ms: when it was sent or decided.
        what: the state of the issue, or on what occasion.
        why: why it was suppressed, or waits.
    """

    identity: str
    at_ms: int
    run: str
    rule: str
    severity: str
    what: str
    action: str
    result: Result
    why: str
    decided_by: str

    def line(self, more: Sequence[Happened] = ()) -> str:
        """For people, without the run; `more` are later ones that differ in their time alone."""
        why = f": {self.why}" if self.why else ""
        by = f" ({self.decided_by})" if self.decided_by else ""
        what = self.what
        if more:
            what = f"{what} {1 + len(more):,} times until {time_text(more[-1].at_ms)}"
        text = f"{self.rule} {self.severity} {what} → {self.action}{why}{by}"
        return f"{time_text(self.at_ms)}  {self.result:<11}{plain_line(text)}"


@dataclass(frozen=True, slots=True)
class Difference:
    """One notice or stop with which two configurations do something else."""

    old: Happened | None
    new: Happened | None

    @property
    def run(self) -> str:
        """The run that it is about."""
        return self._any.run

    @property
    def at_ms(self) -> int:
        """When it happens first."""
        return min(one.at_ms for one in (self.old, self.new) if one is not None)

    @property
    def _any(self) -> Happened:
        found = self.new or self.old
        assert found is not None
        return found

    def lines(self) -> Iterator[str]:
        """As in a diff: what goes with `-`, what comes with `+`."""
        if self.old is not None:
            yield f"- {self.old.line()}"
        if self.new is not None:
            yield f"+ {self.new.line()}"


async def rehearse(
    config: Config,
    events: Sequence[TimedEvent],
    *,
    path: Path | None,
    until_ms: int | None = None,
) -> list[Happened]:
    """What a configuration does about these events, which are in the order of their times."""
    if not events:
        return []
    simulation = Simulation(config, path=path, now_ms=events[0][0])
    for at_ms, event in events:
        await simulation.until(at_ms)
        await simulation.apply(event)
    await simulation.until(events[-1][0] + AFTER_MS if until_ms is None else until_ms)
    return [happened(one) for one in simulation.deliveries.values()]


def starts_and_ends(runs: RunsView) -> list[TimedEvent]:
    """When each training started and ended: nothing is repeated after its end. Pure.

    Their stops are left out: they are decided anew.
    """
    found: list[TimedEvent] = []
    for view in (view for run in runs.seen.values() for view in run.views.values()):
        over = view.model_copy(update={"stop": None, "ranks": (), "rules": {}, "capture": None})
        began = {"state": "running", "ended_ms": None, "outcome": None, "exit_code": None}
        found.append(_view_event(over.model_copy(update=began), view.started_ms))
        if view.ended_ms is not None:
            found.append(_view_event(over, view.ended_ms))
    return found


def _view_event(view: RunView, at_ms: int) -> TimedEvent:
    name = f"{view.run_id}/{view.incarnation}/{view.state}"
    return at_ms, Event.wrap(view, id=name[:200], source="/replay", time_ms=at_ms)


def count_issues(events: Iterable[TimedEvent]) -> int:
    """How many of them are about issues. Pure."""
    return sum(isinstance(event.data, Issue | Feedback) for _, event in events)


def happened(delivery: Delivery) -> Happened:
    """From the ledger's entry. Pure."""
    results: Mapping[str, Result] = {
        "delivered": "stopped" if delivery.action == STOP else "sent",
        "pending": "waits",
    }
    result = results.get(delivery.state, "suppressed")
    return Happened(
        identity=delivery.delivery_id,
        at_ms=delivery.updated_ms,
        run=delivery.run_id,
        rule=delivery.rule,
        severity=delivery.severity or "",
        what=delivery.occasion or delivery.issue_state,
        action=delivery.action,
        result=result,
        why="" if result in ("sent", "stopped") else delivery.reason,
        decided_by=delivery.decided_by,
    )


def differences(old: Iterable[Happened], new: Iterable[Happened]) -> list[Difference]:
    """With which deliveries two configurations do something else, in the order of time. Pure.

    The line that decides, and the words of a reason, make no difference.
    """
    before = {one.identity: one for one in old}
    after = {one.identity: one for one in new}
    found = [
        Difference(before.get(identity), after.get(identity))
        for identity in dict.fromkeys((*before, *after))
    ]
    return sorted(
        (one for one in found if _effect(one.old) != _effect(one.new)),
        key=lambda one: (one.run, one.at_ms),
    )


def _effect(one: Happened | None) -> object:
    return one and (one.result, one.at_ms, one.severity)


def read_dump(path: Path) -> list[TimedEvent]:
    """The issues in a file: one event in JSON on each line, as a webhook gets it. May block.

    Raises:
        ConfigurationError: the file cannot be read, or a line is no event.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigurationError(f"cannot read {str(path)!r}: {err}") from err
    found: list[TimedEvent] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            event = EVENT_TYPES.decode(line.encode())
        except RecordError as err:
            raise ConfigurationError(f"{path}:{number}: {err}") from err
        if isinstance(event.data, Issue | Feedback):
            found.append((event.data.at_ms or event.time_ms, event))
    return sorted(found, key=lambda one: one[0])


def replay_text(all_happened: Iterable[Happened], *, events: int) -> str:
    """For people: by run, in the order of time; a line for all repeats with the same result."""
    ordered = sorted(all_happened, key=lambda one: (one.run, one.at_ms))
    out = []
    for run, group in groupby(ordered, key=lambda one: one.run):
        out.append(plain_line(f"run {run}"))
        out += [f"  {first.line(more)}" for first, *more in _folded(group)]
    counts = {name: sum(one.result == name for one in ordered) for name in _COUNTED}
    summary = ", ".join(f"{count:,} {_COUNTED[name]}" for name, count in counts.items() if count)
    out.append(f"{events:,} issue records: {summary or 'nothing would be sent'}")
    return "\n".join(out)


def _folded(of_run: Iterable[Happened]) -> Iterable[list[Happened]]:
    """What happened to a run, in the order of time; repeats of which the same becomes together."""
    found: dict[object, list[Happened]] = {}
    for one in of_run:
        same = (one.rule, one.severity, one.action, one.result, one.why, one.decided_by)
        found.setdefault(same if one.what == REPEAT else one.identity, []).append(one)
    return found.values()


_COUNTED: Final[Mapping[str, str]] = {
    "sent": "notices",
    "stopped": "stops",
    "suppressed": "suppressed",
    "waits": "waiting",
}


def diff_text(found: Sequence[Difference], *, events: int) -> str:
    """For people: by run, like a diff."""
    out = []
    for run, group in groupby(found, key=lambda one: one.run):
        out.append(plain_line(f"run {run}"))
        out += [f"  {line}" for one in group for line in one.lines()]
    out.append(f"{events:,} issue records: {len(found):,} differences")
    return "\n".join(out)


def replay_json(
    all_happened: Iterable[Happened], *, events: int, more: Mapping[str, JsonValue] | None = None
) -> str:
    """For programs; with `more` keys."""
    deliveries = [asdict(one) for one in all_happened]
    facts = {"version": 1, "events": events, **(more or {}), "deliveries": deliveries}
    return json.dumps(facts, indent=2, ensure_ascii=False)


def diff_json(
    found: Sequence[Difference], *, events: int, more: Mapping[str, JsonValue] | None = None
) -> str:
    """For programs; with `more` keys."""
    differ = [asdict(one) for one in found]
    facts = {"version": 1, "events": events, **(more or {}), "differences": differ}
    return json.dumps(facts, indent=2, ensure_ascii=False)
