"""`tocsin explain`: what a configuration does about an issue, and which lines decide."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tocsin.actions.config import decisions_of, routing_of
from tocsin.actions.decision.consequences import Noticed
from tocsin.actions.decision.decide import Decisions, Known
from tocsin.actions.decision.inhibitions import OpenIssue, could_be_muted, could_mute
from tocsin.actions.decision.issue_labels import issue_labels
from tocsin.actions.decision.planned import Planned
from tocsin.actions.decision.silences import Silence
from tocsin.actions.decision.stop_guards import Fleet
from tocsin.actions.targets.build import stop_policy
from tocsin.actions.targets.registry import TargetKinds
from tocsin.schemas.configuration.file import Config
from tocsin.schemas.configuration.problems import did_you_mean
from tocsin.schemas.configuration.routing.matches import labels_fit
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.ids import issue_id
from tocsin.schemas.records.issues import Issue, IssueFiring, Severity, Subject
from tocsin.schemas.text import plain_line, time_text
from tocsin.stream_rules.catalogue import built_in
from tocsin.stream_rules.engine.configured_rules import RuleSpec, rule_specs

RUN = "run"
"""The label that names the run; it is no label of it."""


@dataclass(frozen=True, slots=True)
class Step:
    """One decision: the stage, what it decided, and the config line that made it, if one did."""

    stage: str
    decision: str
    decided_by: str = ""


class _NothingElse(Known):
    """No other issue is open, nobody was notified, no silence is on the bus, and no run was
    stopped."""

    def silences(self) -> Iterable[Silence]:
        return ()

    def open_issues(self, run_id: str, incarnation: str) -> Iterable[OpenIssue]:
        return ()

    def noticed(self, issue_id: str) -> Mapping[str, Noticed]:
        return {}

    def stops_off(self) -> str:
        return ""

    def fleet(self, issue: Issue, now_ms: int) -> Fleet:
        return Fleet()


def name_of_rule(config: Config, rule: str) -> str:
    """The name that issues of this rule have; `rule` may be an alias of it.

    Raises:
        ConfigurationError: no such rule is on.
    """
    on = {*_specs(config), *(entry.name for entry in config.rules if not entry.off)}
    own = built_in().get(rule).meta.name if rule in built_in().aliases() else rule
    if own not in on:
        hint = did_you_mean(own, on, list_up_to=0)
        off = "is switched off" if own in built_in().names() else "does not exist"
        raise ConfigurationError(
            f"the rule {rule!r} {off} in this configuration"
            + (f"; the nearest that is on: {hint}" if hint else "")
        )
    return own


def sample_issue(
    config: Config, rule: str, severity: Severity | None, labels: Mapping[str, str], at_ms: int
) -> IssueFiring:
    """An issue as this rule would report it, when it fires.

    Raises:
        ConfigurationError: no such rule is on.
    """
    own = name_of_rule(config, rule)
    spec = _specs(config).get(own)
    meta = None if spec is None else spec.rule.meta
    grave = severity or (spec and spec.severity) or (meta.severity if meta else "warning")
    worthy = meta is not None and meta.stop_worthy
    run = labels.get(RUN, "run")
    return IssueFiring(
        run_id=run,
        incarnation="sample",
        issue_id=issue_id(run, "sample", own, 1, "sample"),
        rule=own,
        use=own if meta is None else meta.name,
        rule_version=1,
        severity=grave,
        stop_worthy=worthy and grave == "critical",
        rule_may_stop=worthy,
        subject=Subject(kind="run", name="a sample"),
        reason="a sample issue",
        onset_ms=at_ms,
        at_ms=at_ms,
        labels={key: value for key, value in labels.items() if key != RUN},
    )


def explain(config: Config, issue: IssueFiring, *, path: Path | None, now_ms: int) -> list[Step]:
    """Each decision about the issue, in the order of the stages. Reads the file once more."""
    decisions = decisions_of(config, routing_of(config, path=path))
    steps = [*_rule(config, issue, decisions), *_routes(config, issue, decisions)]
    planned = decisions.decide(issue, _NothingElse(), now_ms)
    steps += [_action(one) for one in planned]
    stops = any(one.kind == "stop" and one.why_not is None for one in planned)
    if stops and (config.targets or config.policy):
        steps += _targets(config, issue, decisions)
    if not planned:
        steps.append(Step("result", "nothing is sent; the issue is on the bus and on the terminal"))
    return [*steps, *_inhibitions(config, issue, decisions)]


def as_text(issue: IssueFiring, steps: Sequence[Step], now_ms: int) -> str:
    """For people: the issue, then a line for each decision."""
    labels = ", ".join(f"{key}={value}" for key, value in issue_labels(issue).items())
    out = [plain_line(f"an issue with {labels}, at {time_text(now_ms)}")]
    for step in steps:
        by = f"  ({step.decided_by})" if step.decided_by else ""
        out.append(f"  {step.stage:<12}{plain_line(step.decision)}{by}")
    return "\n".join(out)


def as_json(issue: IssueFiring, steps: Sequence[Step], now_ms: int) -> str:
    """For programs."""
    facts = {
        "version": 1,
        "labels": dict(issue_labels(issue)),
        "at_ms": now_ms,
        "decisions": [asdict(step) for step in steps],
    }
    return json.dumps(facts, indent=2, ensure_ascii=False)


def _specs(config: Config) -> dict[str, RuleSpec]:
    """The rules of tocsin's own that are on, by name."""
    return {spec.name: spec for spec in rule_specs(config.rules, defaults=config.defaults.rules)}


def _rule(config: Config, issue: IssueFiring, decisions: Decisions) -> Iterator[Step]:
    entry = next((rule for rule in config.rules if rule.name == issue.rule), None)
    if entry is None:
        yield Step("rule", f"{issue.rule} is not listed: its defaults apply")
        return
    place = decisions.routing.place(entry.loc)
    if not labels_fit(entry.match, issue.labels):
        yield Step("rule", f"{entry.name} does not watch runs with these labels", place)
    if entry.actions is None:
        yield Step("rule", f"{entry.name} has no action list: the routes decide", place)
    else:
        listed = ", ".join(action.receiver or action.kind for action in entry.actions) or "nothing"
        yield Step("rule", f"the action list of {entry.name} decides: {listed}", place)


def _routes(config: Config, issue: IssueFiring, decisions: Decisions) -> Iterator[Step]:
    """Which routes match, if they are asked."""
    entry = next((rule for rule in config.rules if rule.name == issue.rule), None)
    asked = entry is None or entry.actions is None
    if not (asked or (entry and any(a.kind == "by_route" for a in entry.actions or ()))):
        return
    for index, route in enumerate(config.routes):
        name = route.name or f"number {index + 1}"
        place = decisions.routing.place(route.loc)
        if not labels_fit(route.match, issue_labels(issue)):
            yield Step("route", f"{name} does not match", place)
            continue
        named = ", ".join(receiver for receiver, _ in route.receivers(issue.severity)) or "nobody"
        then = "the next ones are tried, too" if route.also else "no other is tried"
        yield Step("route", f"{name} matches: {named}; {then}", place)
        if not route.also:
            return
    if not config.routes:
        yield Step("route", "there are no routes")


def _action(one: Planned) -> Step:
    stage = "stop" if one.kind == "stop" else "notice"
    asks = "" if one.asks is None else f" when people approve ({one.asks})"
    to = f"the run is stopped{asks}" if one.kind == "stop" else f"to {one.action}"
    if (why_not := one.why_not) is not None:
        return Step(stage, f"{to}: suppressed: {why_not}", one.decided_by)
    wait = f" after {one.wait_ms / 1000:g} s, for an issue that explains it" if one.wait_ms else ""
    return Step(stage, f"{to}{wait}", one.decided_by)


def _targets(config: Config, issue: IssueFiring, decisions: Decisions) -> Iterator[Step]:
    """Which targets may be asked if the launcher does not end the job."""
    policy = stop_policy(config, TargetKinds(), decisions.routing.place)
    labels = {**issue.labels, RUN: issue.run_id}
    named = list(policy.named_for(labels))
    for name, line in named:
        kind = config.targets[name].type
        yield Step("target", f"if its launcher does not end it: {name} ({kind})", line)
    if not named:
        what = "no entry of the policy matches this run"
        yield Step("target", f"if its launcher does not end it, nobody is asked: {what}")


def _inhibitions(config: Config, issue: IssueFiring, decisions: Decisions) -> Iterator[Step]:
    labels = issue_labels(issue)
    for index, entry in enumerate(config.inhibit):
        name = entry.name or f"number {index + 1}"
        place = decisions.routing.place(entry.loc)
        if could_be_muted([entry], labels):
            yield Step("inhibition", f"{name} mutes it while an issue explains it", place)
        if could_mute([entry], labels):
            yield Step("inhibition", f"{name} mutes others while it is open", place)
