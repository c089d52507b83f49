"""Runs the tests of a configuration, in virtual time: `tocsin test`."""

from __future__ import annotations

import asyncio
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from operator import itemgetter
from pathlib import Path
from typing import TypeVar

from tocsin.actions.config import places
from tocsin.actions.decision.issue_labels import issue_labels
from tocsin.actions.decision.planned import STOP, Place
from tocsin.actions.decision.routes import matching
from tocsin.actions.receivers.message import message_for
from tocsin.actions.simulation import Sent, Simulation
from tocsin.console.configuration.explanation import name_of_rule, sample_issue
from tocsin.console.configuration.issue_rehearsal import TimedEvent, happened, read_dump
from tocsin.console.configuration.scenarios import (
    ANY,
    Expectation,
    Match,
    Scenario,
    ScenarioIssue,
    Scenarios,
)
from tocsin.schemas.configuration.file import Config
from tocsin.schemas.configuration.problems import Loc, did_you_mean
from tocsin.schemas.configuration.values import format_duration
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.ids import issue_id
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.events import Event
from tocsin.schemas.records.issues import IssueFiring, IssueOngoing, IssueResolved, Subject
from tocsin.schemas.text import time_text

_STATES = {"firing": IssueFiring, "ongoing": IssueOngoing, "resolved": IssueResolved}
_SECOND_MS = 1000

MatchT = TypeVar("MatchT", bound=Match)


@dataclass(frozen=True, slots=True)
class Failure:
    """What a test did not find, or found and should not have; `place` names its line."""

    place: str
    message: str


@dataclass(frozen=True, slots=True)
class Trial:
    """One test that was run."""

    name: str
    failures: Sequence[Failure] = ()


@dataclass(slots=True)
class Coverage:
    """What of a configuration the tests have used, by kind: each name, and whether it was."""

    used: dict[str, dict[str, bool]] = field(
        default_factory=lambda: {"rules": {}, "routes": {}, "receivers": {}, "inhibitions": {}}
    )

    def line(self) -> str:
        """`rules 2/3 (not gpu-idle), routes 1/1, …`."""
        out = []
        for kind, names in self.used.items():
            missing = [name for name, used in names.items() if not used]
            text = f"{kind} {len(names) - len(missing)}/{len(names)}"
            out.append(text + (f" (not {', '.join(missing)})" if missing else ""))
        return ", ".join(out)


@dataclass(frozen=True, slots=True)
class Tried:
    """One file of tests that was run."""

    source: str
    trials: Sequence[Trial]
    coverage: Coverage


def try_file(scenarios: Scenarios, config: Config, *, path: Path, update: bool = False) -> Tried:
    """Run all tests of a file over its configuration. Reads files, and with `update` writes them.

    Raises:
        ConfigurationError: a test names a rule that is not on, an unknown receiver, or a file that
            cannot be read or written.
    """
    place = places(path)
    coverage = _nothing_used(config, place)
    trials = []
    for number, scenario in enumerate(scenarios.file.tests):
        trial = _Trial(scenarios, number, config, path, place, coverage)
        failures = asyncio.run(trial.run(update=update))
        trials.append(Trial(scenario.name, failures))
    return Tried(str(scenarios.path), trials, coverage)


class _Trial:
    """One test of a file, over its configuration."""

    def __init__(
        self,
        scenarios: Scenarios,
        number: int,
        config: Config,
        path: Path,
        place: Place,
        coverage: Coverage,
    ) -> None:
        self._scenarios = scenarios
        self._scenario: Scenario = scenarios.file.tests[number]
        self._loc = ("tests", number)
        self._config = config
        self._path = path
        self._place = place
        self._coverage = coverage
        self._expect = [
            self._named(one, ("expect", index)) for index, one in enumerate(self._scenario.expect)
        ]
        self._never = [
            self._named(one, ("never", index)) for index, one in enumerate(self._scenario.never)
        ]

    async def run(self, *, update: bool) -> list[Failure]:
        scenario = self._scenario
        events = self._events()
        start_ms = round(scenario.start.timestamp() * 1000) if scenario.feed else events[0][0]
        simulation = Simulation(self._config, path=self._path, now_ms=start_ms)
        for at_ms, event in events:
            await simulation.until(at_ms)
            await simulation.apply(event)
        last_ms = max([at_ms for at_ms, _ in events], default=start_ms) + _ms(scenario.until)
        await simulation.until(max([last_ms, *(start_ms + _ms(e.by) for e in scenario.expect)]))
        self._cover([event.data for _, event in events], simulation)
        if scenario.golden is not None:
            found = _golden(simulation.deliveries.values())
            return self._compared(self._scenarios.locate(scenario.golden), found, update=update)
        return [*self._missing(simulation.sent, start_ms), *self._forbidden(simulation.sent)]

    def _events(self) -> list[TimedEvent]:
        scenario = self._scenario
        if scenario.replay is not None:
            events = read_dump(self._scenarios.locate(scenario.replay))
            if not events:
                raise ConfigurationError(f"no issue in {str(scenario.replay)!r}")
            return events
        labels = {run.name: {**self._config.labels, **run.labels} for run in scenario.runs}
        start_ms = round(scenario.start.timestamp() * 1000)
        events = []
        for index, spec in enumerate(scenario.feed):
            at_ms = start_ms + _ms(spec.at)
            self._rule(spec.rule, ("feed", index))
            events.append(_event(self._config, spec, labels[spec.run], at_ms, index))
        return sorted(events, key=itemgetter(0))

    def _named(self, match: MatchT, loc: Loc) -> MatchT:
        """A match with the name that issues of its rule have.

        Raises:
            ConfigurationError: it names what does not exist: `never` of that could not fail.
        """
        known = {ANY, *self._config.receivers}
        if match.notify is not None and match.notify not in known:
            place = self._scenarios.place((*self._loc, *loc, "notify"))
            hint = did_you_mean(match.notify, known)
            message = f"{place}: unknown receiver {match.notify!r}"
            raise ConfigurationError(f"{message}; try: {hint}" if hint else message)
        if match.rule is None:
            return match
        return match.model_copy(update={"rule": self._rule(match.rule, loc)})

    def _rule(self, rule: str, loc: Loc) -> str:
        try:
            return name_of_rule(self._config, rule)
        except ConfigurationError as err:
            place = self._scenarios.place((*self._loc, *loc, "rule"))
            raise ConfigurationError(f"{place}: {err}") from err

    def _missing(self, sent: Sequence[Sent], start_ms: int) -> Iterator[Failure]:
        for index, expected in enumerate(self._expect):
            place = self._scenarios.place((*self._loc, "expect", index))
            matching = [
                one
                for one in sent
                if one.at_ms <= start_ms + _ms(expected.by) and _fits(expected, one.delivery)
            ]
            count = len(matching)
            if count == 0 if expected.count is None else count != expected.count:
                wanted = "at least one" if expected.count is None else str(expected.count)
                by = format_duration(expected.by)
                words = _words(expected, many=expected.count not in (None, 1))
                yield Failure(place, f"expected {wanted} {words} by {by}, got {count}")
            yield from (Failure(place, text) for text in _without(expected, matching))

    def _forbidden(self, sent: Sequence[Sent]) -> Iterator[Failure]:
        for index, match in enumerate(self._never):
            for one in sent:
                if _fits(match, one.delivery):
                    place = self._scenarios.place((*self._loc, "never", index))
                    about = f"{one.delivery.rule} {one.delivery.issue_state}"
                    when = time_text(one.at_ms)
                    yield Failure(place, f"expected no {_words(match)}, got {about} at {when}")

    def _compared(self, golden: Path, found: object, *, update: bool) -> list[Failure]:
        text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
        if update:
            write_result(golden, text)
            return []
        place = self._scenarios.place((*self._loc, "golden"))
        try:
            expected = golden.read_text(encoding="utf-8")
        except OSError as error:
            return [Failure(place, f"{golden}: {error.strerror}; `tocsin test --update` writes it")]
        if expected == text:
            return []
        before, after = expected.splitlines(), text.splitlines()
        return [
            Failure(place, f"{golden} differs: {sign} {line.strip()}")
            for sign, lines, others in (("-", before, after), ("+", after, before))
            for line in lines
            if line not in others
        ] or [Failure(place, f"{golden} differs in the order of its lines")]

    def _cover(self, issues: Iterable[object], simulation: Simulation) -> None:
        used = self._coverage.used
        place = self._place
        for issue in issues:
            if not isinstance(issue, IssueFiring):
                continue
            if issue.rule in used["rules"]:
                used["rules"][issue.rule] = True
            for route in matching(self._config.routes, issue_labels(issue)):
                used["routes"][_name(route.name, place(route.loc))] = True
        for one in simulation.sent:
            if one.delivery.action in used["receivers"]:
                used["receivers"][one.delivery.action] = True
        for delivery in simulation.deliveries.values():
            for entry in self._config.inhibit:
                where = place(entry.loc)
                if delivery.held == "inhibition" and f"{where})" in delivery.reason:
                    used["inhibitions"][_name(entry.name, where)] = True


def write_result(path: Path, text: str) -> None:
    """Write a file, and make its folder. Raises ConfigurationError: that is not possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror or error}") from error


def as_text(tried: Tried) -> str:
    """For people: each test, its failures, and what the tests have used."""
    out = []
    for trial in tried.trials:
        out.append(f"{tried.source}: {'FAILED' if trial.failures else 'ok':<7}{trial.name}")
        out += [f"  {failure.place}: {failure.message}" for failure in trial.failures]
    out.append(f"{tried.source}: used: {tried.coverage.line()}")
    return "\n".join(out)


def as_json(all_tried: Iterable[Tried]) -> str:
    """For programs."""
    files = [
        {
            "file": tried.source,
            "ok": not any(trial.failures for trial in tried.trials),
            "tests": [asdict(trial) for trial in tried.trials],
            "used": tried.coverage.used,
        }
        for tried in all_tried
    ]
    return json.dumps({"version": 1, "files": files}, indent=2, ensure_ascii=False)


def as_junit(all_tried: Iterable[Tried]) -> str:
    """For CI systems: a suite for each file."""
    root = ElementTree.Element("testsuites")
    for tried in all_tried:
        failed = sum(bool(trial.failures) for trial in tried.trials)
        facts = {"name": tried.source, "tests": str(len(tried.trials)), "failures": str(failed)}
        suite = ElementTree.SubElement(root, "testsuite", facts)
        for trial in tried.trials:
            names = {"name": trial.name, "classname": tried.source}
            case = ElementTree.SubElement(suite, "testcase", names)
            if trial.failures:
                lines = "\n".join(f"{one.place}: {one.message}" for one in trial.failures)
                first = {"message": trial.failures[0].message}
                ElementTree.SubElement(case, "failure", first).text = lines
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _nothing_used(config: Config, place: Place) -> Coverage:
    coverage = Coverage()
    coverage.used["rules"] = {rule.name: False for rule in config.rules if not rule.off}
    coverage.used["routes"] = {_name(one.name, place(one.loc)): False for one in config.routes}
    coverage.used["receivers"] = dict.fromkeys(config.receivers, False)
    coverage.used["inhibitions"] = {
        _name(one.name, place(one.loc)): False for one in config.inhibit
    }
    return coverage


def _name(name: str | None, place: str) -> str:
    return name or place


def _event(
    config: Config, spec: ScenarioIssue, labels: Mapping[str, str], at_ms: int, number: int
) -> TimedEvent:
    """The record of an issue as the rules would write it."""
    sample = sample_issue(config, spec.rule, spec.severity, {**labels, "run": spec.run}, at_ms)
    facts = sample.model_dump() | {
        "issue_id": _identity(spec.run, sample.rule, spec.subject),
        "subject": Subject(kind="run", name=spec.subject),
        "reason": spec.reason,
        "step": spec.step,
        "first_step": spec.step,
    }
    if spec.raised_from is not None:
        facts["raised_from"] = spec.raised_from
    if spec.cause is not None:
        facts["consequence_of"] = _identity(spec.run, spec.cause, "loss")
    issue = _STATES[spec.state].model_validate(facts)
    event = Event.wrap(
        issue, id=f"{issue.issue_id}/{spec.state}/{number}", source="/tests", time_ms=at_ms
    )
    return at_ms, event


def _identity(run: str, rule: str, subject: str) -> str:
    return issue_id(run, "test", rule, 1, subject)


def _golden(deliveries: Iterable[Delivery]) -> object:
    """What a file of expectations holds: no lines of the configuration, and no words of reasons."""
    shown = ("run", "rule", "severity", "what", "action", "result")
    found = [happened(delivery) for delivery in deliveries]
    first_ms = min((one.at_ms for one in found), default=0)
    return [
        {
            "after_s": (one.at_ms - first_ms) / _SECOND_MS,
            **{key: getattr(one, key) for key in shown},
        }
        for one in sorted(found, key=lambda one: (one.at_ms, one.run, one.rule, one.action))
    ]


def _fits(match: Match, delivery: Delivery) -> bool:
    if (delivery.action == STOP) != (match.stop is not None):
        return False
    of_it = delivery.run_id if match.stop is not None else delivery.action
    wanted = match.stop or match.notify
    return (
        wanted in (ANY, of_it)
        and match.rule in (None, delivery.rule)
        and match.run in (None, delivery.run_id)
        and match.state in (None, delivery.issue_state)
    )


def _without(expected: Expectation, sent: Iterable[Sent]) -> Iterator[str]:
    for one in sent:
        if expected.text_has:
            text = message_for(one.notice).text()
            for words in expected.text_has:
                if words not in text:
                    yield f"the text has no {words!r}:\n{text}"


def _words(match: Match, *, many: bool = False) -> str:
    what = ("stop" if match.stop is not None else "notice") + ("s" if many else "")
    whom = match.stop or match.notify
    parts = [f"{what} of {whom}" if match.stop is not None else f"{what} to {whom}"]
    parts += [f"about {match.rule}"] if match.rule else []
    parts += [f"of run {match.run}"] if match.run else []
    parts += [f"({match.state})"] if match.state else []
    return " ".join(parts)


def _ms(duration: timedelta) -> int:
    return duration // timedelta(milliseconds=1)
