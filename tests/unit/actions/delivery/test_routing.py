from __future__ import annotations

from pathlib import Path

import pytest

from support.records.issues import issue
from tocsin.actions.config import decisions_of, places, receiver_problems, routing_of
from tocsin.actions.decision.consequences import Noticed
from tocsin.actions.decision.planned import Planned
from tocsin.actions.decision.routing import Routing
from tocsin.actions.receivers.notify_option import parse_addresses
from tocsin.actions.receivers.registry import ReceiverKinds
from tocsin.schemas.configuration.file import Config, SectionRegistry, check_config
from tocsin.schemas.records.issues import SEVERITIES, Issue, Severity

KINDS = ReceiverKinds()
HOOK = "https://hooks.example.com/ml?token=SECRET"


def config_of(text: str) -> Config:
    config, problems = check_config(f"version: 1\n{text}", "tocsin.yaml", SectionRegistry(KINDS))
    assert config is not None, problems
    return config


def actions(planned: list[Planned]) -> list[str]:
    return [item.action for item in planned]


def test_without_a_config_only_critical_stop_worthy_issues_stop() -> None:
    routing = Routing({})
    assert actions(routing.plan(issue())) == ["stop"]
    assert routing.plan(issue())[0].decided_by.startswith("default:")
    assert routing.plan(issue(severity="warning")) == []
    assert routing.plan(issue(stop_worthy=False)) == []
    assert routing.plan(issue(resolved=True)) == []


def test_notify_gets_firing_and_resolved_from_warning_up() -> None:
    routing = routing_of(Config(), notify=[HOOK])
    (name,) = parse_addresses([HOOK])
    assert actions(routing.plan(issue())) == ["stop", name]
    assert actions(routing.plan(issue(severity="warning"))) == [name]
    assert actions(routing.plan(issue(resolved=True))) == [name]
    assert routing.plan(issue(severity="info")) == []


def test_one_that_turns_critical_is_told_and_stops_as_if_it_fired() -> None:
    routing = routing_of(Config(), notify=[HOOK])
    (name,) = parse_addresses([HOOK])
    assert actions(routing.plan(issue(raised_from="warning"))) == ["stop", name]
    assert actions(routing.plan(issue(raised_from="warning", stop_worthy=False))) == [name]
    assert routing.plan(issue(severity="warning", raised_from="info")) == []
    text = """
receivers:
  mail: {type: email, to: [me@example.com], send_resolved: false}
rules:
  - nonfinite: [mail]
"""
    told = routing_of(config_of(text)).plan(issue(raised_from="warning"))
    assert actions(told) == ["mail"]


def test_a_stop_waits_for_a_rule_that_has_lost_its_memory() -> None:
    text = "rules:\n  - loss_spike: [stop]\n"
    (name,) = parse_addresses([HOOK])
    default, listed = (routing_of(config, notify=[HOOK]) for config in (Config(), config_of(text)))
    for routing, rule in ((default, "loss_diverged"), (listed, "loss_spike")):
        held = issue(rule=rule).model_copy(update={"stop_held": True})
        assert actions(routing.plan(held)) == [name]
        released = issue(rule=rule, raised_from="critical").model_copy(
            update={"raised_from": None, "stop_released": True}
        )
        assert actions(routing.plan(released)) == ["stop"]
        ongoing = released.model_copy(update={"stop_released": False})
        assert routing.plan(ongoing) == []


def test_a_notify_name_shows_the_host_and_not_the_token() -> None:
    (name,) = parse_addresses([HOOK])
    assert name.startswith("notify:hooks.example.com-")
    assert "SECRET" not in name
    assert list(parse_addresses([HOOK, "http://a", HOOK])) == [name, *parse_addresses(["http://a"])]


def test_a_rules_list_decides_alone() -> None:
    text = """
receivers:
  ml: {type: webhook, url: "https://hooks.example.com/ml"}
rules:
  - nonfinite: [ml]
  - loss_diverged: [stop, ml]
  - exploding_gradient: []
"""
    routing = routing_of(config_of(text))
    assert actions(routing.plan(issue())) == ["ml"]
    assert actions(routing.plan(issue(rule="loss_diverged"))) == ["stop", "ml"]
    assert routing.plan(issue(rule="exploding_gradient")) == []
    resolved = issue(rule="loss_diverged", resolved=True)
    assert actions(routing.plan(resolved)) == ["ml"]


def of_a_stopping_rule(severity: Severity = "warning", **more: object) -> Issue:
    """Of a rule that may stop by itself, but not for this one."""
    made = issue(rule="nonfinite", severity=severity, stop_worthy=False)
    return made.model_copy(update={"rule_may_stop": True, **more})


def test_a_listed_stop_acts_on_what_is_worth_it() -> None:
    text = """
receivers:
  ml: {type: webhook, url: "https://hooks.example.com/ml"}
rules:
  - nonfinite: [stop, ml]
"""
    routing = routing_of(config_of(text))
    assert actions(routing.plan(of_a_stopping_rule())) == ["ml"]
    assert actions(routing.plan(of_a_stopping_rule("critical"))) == ["ml"]
    worth = of_a_stopping_rule("critical", stop_worthy=True)
    assert actions(routing.plan(worth)) == ["stop", "ml"]
    other = of_a_stopping_rule(rule_may_stop=False)
    assert actions(routing.plan(other)) == ["stop", "ml"]
    unknown = of_a_stopping_rule(rule_may_stop=None)
    assert actions(routing.plan(unknown)) == ["ml"], "of a rules worker of an older release"


@pytest.mark.parametrize(
    ("at", "stopping"),
    [
        ("info", ["info", "warning", "critical"]),
        ("warning", ["warning", "critical"]),
        ("critical", ["critical"]),
    ],
)
@pytest.mark.parametrize("rule_may_stop", [True, False, None])
def test_a_stop_may_be_asked_for_from_a_severity_up(
    at: str, stopping: list[str], rule_may_stop: bool | None
) -> None:
    routing = routing_of(config_of(f"rules:\n  - nonfinite: [{{stop: {{at: {at}}}}}]\n"))
    found = [
        severity
        for severity in SEVERITIES
        if routing.plan(of_a_stopping_rule(severity, rule_may_stop=rule_may_stop))
    ]
    assert found == stopping


def test_an_issue_that_becomes_graver_is_stopped_for_once_it_is_grave_enough() -> None:
    text = """
receivers:
  ml: {type: webhook, url: "https://hooks.example.com/ml"}
rules:
  - nonfinite: [{stop: {at: warning}}, ml]
"""
    routing = routing_of(config_of(text))
    assert actions(routing.plan(of_a_stopping_rule("info"))) == ["ml"]
    risen = issue(severity="warning", raised_from="info", stop_worthy=False)
    assert actions(routing.plan(risen)) == ["stop"]


def test_a_receiver_can_be_told_of_firings_only() -> None:
    text = """
receivers:
  mail: {type: email, to: [me@example.com], send_resolved: false}
  hook: {type: webhook, url: "https://hooks.example.com/ml"}
rules:
  - nonfinite: [mail, hook]
"""
    routing = routing_of(config_of(text), notify=["mailto:you@example.com"])
    kinds = [(item.action, item.kind) for item in routing.plan(issue())]
    assert kinds[:2] == [("mail", "email"), ("hook", "webhook")]
    assert kinds[2][1] == "email"
    assert actions(routing.plan(issue(resolved=True)))[0] == "hook"
    assert len(routing.plan(issue(resolved=True))) == 2


@pytest.mark.parametrize(
    ("route", "receiver", "default", "sent"),
    [
        (None, None, "true", True),
        (None, None, "false", False),
        (None, "true", "false", True),
        (None, "false", "true", False),
        ("true", "false", "false", True),
        ("false", "true", "true", False),
    ],
)
def test_the_route_says_whether_the_end_is_sent_then_the_receiver_then_the_defaults(
    route: str | None, receiver: str | None, default: str, sent: bool
) -> None:
    own = f", send_resolved: {receiver}" if receiver else ""
    of_route = f", send_resolved: {route}" if route else ""
    text = f"""
defaults: {{send_resolved: {default}}}
receivers:
  mail: {{type: email, to: [me@example.com]{own}}}
routes:
  - {{notify: [mail]{of_route}}}
"""
    config = config_of(text)
    routing = routing_of(config)
    over = issue(resolved=True)

    assert actions(routing.plan(over)) == (["mail"] if sent else [])
    told = {"mail": Noticed("email", "config: routes.0", notified=True, open=True)}
    assert [one.action for one in decisions_of(config, routing).notified(over, told)] == (
        ["mail"] if sent else []
    )


def test_a_decision_names_its_line(tmp_path: Path) -> None:
    text = """version: 1
receivers:
  ml: {type: webhook, url: "https://hooks.example.com/ml"}
rules:
  - nonfinite: [stop, ml]
"""
    file = tmp_path / "tocsin.yaml"
    file.write_text(text)
    config, _ = check_config(text, "tocsin.yaml", SectionRegistry(ReceiverKinds()))
    assert config is not None
    planned = routing_of(config, path=file).plan(issue())
    assert [item.decided_by for item in planned] == ["tocsin.yaml:5:17", "tocsin.yaml:5:23"]
    assert places(None)(("rules", 0)) == "config: rules.0"


def test_stops_that_are_off_are_recorded_as_suppressed() -> None:
    (planned,) = routing_of(Config(), stops_off="--no-stop").plan(issue())
    assert planned.forbidden == "--no-stop"


def test_the_options_of_a_stop_are_kept() -> None:
    text = "rules:\n  - nonfinite: [{stop: {grace: 5s, checkpoint: skip}}]\n"
    (planned,) = routing_of(config_of(text)).plan(issue())
    assert planned.options is not None
    assert planned.options.grace.total_seconds() == 5
    assert planned.options.checkpoint == "skip"


def test_mistakes_in_our_sections_are_found_at_their_places() -> None:
    text = """version: 1
receivers:
  ml:
    type: webhook
    url: "https://hooks.example.com/ml"
    headers: {"webhook-id": x, "bad name": y, X-A: "1", x-a: "2"}
  mail: {type: email, to: [a@example.com, b@example.com, a@example.com]}
  chat: {type: chat, url: "https://example.com/SECRET"}
rules:
  - nonfinite: [ml, stop, ml]
"""
    registry = SectionRegistry(KINDS)
    registry.register("receivers", receiver_problems(KINDS))
    config, problems = check_config(text, "tocsin.yaml", registry)
    assert config is None
    assert [(p.line, p.code) for p in problems] == [
        (6, "header"),
        (6, "header"),
        (6, "header"),
        (7, "duplicate_recipient"),
        (8, "invalid_value"),
        (10, "duplicate_action"),
    ]
    assert not [problem for problem in problems if "SECRET" in str(problem)]


def test_a_muted_state_notifies_nobody_but_still_stops() -> None:
    routing = Routing({}, notify=("ops",))
    muted = issue().model_copy(update={"muted": True, "times": 3})
    assert actions(routing.plan(muted)) == ["stop"]
    over = issue(resolved=True).model_copy(update={"muted": True})
    assert routing.plan(over) == []
    assert actions(routing.plan(issue(resolved=True))) == ["ops"]
