"""The configuration file: shape, all problems in one pass, search order, secrets, settings."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from tocsin.actions.receivers.registry import ReceiverKinds
from tocsin.actions.receivers.webhook.config import WebhookReceiver
from tocsin.schemas.configuration.capture import CollectionConfig
from tocsin.schemas.configuration.docstrings import field_docstrings
from tocsin.schemas.configuration.file import (
    Config,
    DuplicateSection,
    SectionRegistry,
    check_config,
    load_config,
)
from tocsin.schemas.configuration.file_schema import config_json_schema
from tocsin.schemas.configuration.problems import ConfigProblems, PlacedProblem, Problem
from tocsin.schemas.configuration.sections import ActionEntry, RuleEntry, StopOptions
from tocsin.schemas.configuration.settings import (
    ResolvedSetting,
    SecretUnavailable,
    resolve_secrets,
    resolve_setting,
    resolve_settings,
)
from tocsin.schemas.configuration.validation import problems_of_model
from tocsin.schemas.configuration.values import SecretRef, parse_duration
from tocsin.schemas.configuration.yaml_document import load
from tocsin.schemas.errors import ConfigurationError

WORKING = """\
version: 1
bus:
  url: kafka://k1:9092,k2:9092
  prefix: vision
  sasl: {username: me, password: {secret: pw}}
  tls: {}
labels: {env: prod, team: vision}
secrets:
  pw: {file: secrets/pw}
  hook: {env: HOOK_KEY}
  old: {env: OLD_KEY, optional: true}
capture:
  collections: {gradients: {every: 10}}
defaults: {rules: none, mode: enforce}
receivers:
  ml:
    type: webhook
    url: https://hooks.example.com/ml
    headers: {authorization: {secret: pw}, x-team: vision}
    sign: {scheme: standard, key: {secret: hook}, previous_key: {secret: old}}
    retry: {give_up_after: 2h}
rules:
  - nonfinite: [stop, ml]
  - loss_spike: off
  - name: slow-decrease
    use: loss_not_decreasing
    match: {env: prod, team: [vision, "nlp-*"]}
    params: {num_steps: 50, diff_percent: 0.1}
    severity: info
    actions: [ml, {stop: {grace: 45s, checkpoint: skip}}]
  - use: stalled_training
stop: {trusted_keys: [keys/actions.pub]}
"""

# Each section of the language.
WHOLE = """\
version: 1
bus: embedded:.tocsin/bus.db
labels: {env: prod}
secrets:
  slack: {file: /run/secrets/slack_url}
  hook: {env: HOOK_KEY}
capture:
  budget: 0.5%
  collections: {activations: {every: 100}, gradients: {every: 10}}
defaults: {rules: all, mode: enforce, group_by: [run, rule], group_wait: 2s, repeat_interval: 4h, send_resolved: true}
receivers:
  vision-chat: {type: chat, url: {secret: slack}}
  vision-mail: {type: email, to: [vision@example.com], smtp: {host: mail.example.com, port: 587, starttls: true}}
  ml-lambda:   {type: webhook, url: "https://hooks.example.com/ml", sign: {scheme: standard, key: {secret: hook}}}
targets:
  slurm-a100: {type: slurm, grace: 30s}
rules:
  - nonfinite: [stop, vision-mail]
  - name: gpu-idle
    use: low_gpu_utilization
    match: {env: prod}
    params: {threshold_p95: 30}
    severity: warning
    actions: [by_route, {stop: {mode: ask, checkpoint: save, grace: 30s, approve: {via: vision-chat, timeout: 10m, on_timeout: skip}}}]
  - loss_spike: off
routes:
  - {name: vision, match: {team: vision}, notify: {critical: [vision-chat, vision-mail], default: [vision-chat]}}
  - {name: rest, notify: {default: [ml-lambda]}}
inhibit:
  - {name: nan-explains-rest, when: {rule: nonfinite}, mute: {rule: [loss_spike, vanishing_gradient]}, equal: [run]}
silences:
  - {match: {run: "sweep-*"}, until: 2026-12-01T00:00:00Z, by: ana, why: known bad learning rates, mutes: [notify]}
limits: {stops: {per_hour: 3, max_fraction_of_running: 10%, min_job_age: 5m, on_exceed: ask}}
policy:
  - {match: {team: vision}, may_stop_on: [slurm-a100]}
stop: {trusted_keys: [keys/actions.pub]}
"""  # noqa: E501 (one line of the file is one line here)


KINDS = ReceiverKinds()


def good(text: str) -> Config:
    config, problems = check_config(text, "tocsin.yaml", SectionRegistry(KINDS))
    assert problems == []
    assert config is not None
    return config


def places(text: str, registry: SectionRegistry | None = None) -> list[tuple[int, int, str]]:
    config, problems = check_config(text, "tocsin.yaml", registry or SectionRegistry(KINDS))
    assert config is None
    return [(problem.line, problem.column, problem.code) for problem in problems]


def problems_of(body: str) -> list[PlacedProblem]:
    return check_config(f"version: 1\n{body}\n", "tocsin.yaml", SectionRegistry(KINDS))[1]


# -- what is right


def test_a_file_with_all_that_works_today_is_read() -> None:
    config = good(WORKING)

    assert config.bus.url == "kafka://k1:9092,k2:9092"
    assert config.bus.prefix == "vision"
    assert config.bus.sasl is not None
    assert config.bus.sasl.password == SecretRef("pw")
    assert config.labels == {"env": "prod", "team": "vision"}
    gradients = config.capture.collections["gradients"]
    assert isinstance(gradients, CollectionConfig)
    assert gradients.every == 10
    assert config.defaults.rules == "none"
    webhook = config.receivers["ml"]
    assert isinstance(webhook, WebhookReceiver)
    assert webhook.url == "https://hooks.example.com/ml"
    assert webhook.headers == {"authorization": SecretRef("pw"), "x-team": "vision"}
    assert webhook.sign is not None
    assert webhook.sign.previous_key == SecretRef("old")
    assert webhook.retry.give_up_after == timedelta(hours=2)
    assert config.stop.trusted_keys == (Path("keys/actions.pub"),)


def test_the_three_forms_of_a_rule_become_one() -> None:
    nonfinite, spike, slow, stalled = good(WORKING).rules

    assert (nonfinite.name, nonfinite.use, nonfinite.off) == ("nonfinite", "nonfinite", False)
    assert [(a.kind, a.receiver) for a in nonfinite.actions or ()] == [
        ("stop", None),
        ("receiver", "ml"),
    ]
    assert spike.off
    assert (slow.name, slow.use) == ("slow-decrease", "loss_not_decreasing")
    assert slow.match == {"env": ("prod",), "team": ("vision", "nlp-*")}
    assert slow.params == {"num_steps": 50, "diff_percent": 0.1}
    assert slow.severity == "info"
    assert slow.actions is not None
    stop = slow.actions[1].options
    assert stop == StopOptions(grace=timedelta(seconds=45), checkpoint="skip")
    assert (stalled.name, stalled.actions) == ("stalled_training", None)


def test_an_entry_knows_where_its_parts_stand() -> None:
    document = load(WORKING, source="f")
    nonfinite, _, slow, _ = good(WORKING).rules

    assert document.position(nonfinite.at("use"), at="key") == (23, 5)
    assert document.position((*slow.at("params"), "diff_percent")) == (28, 43)
    assert slow.actions is not None
    assert document.position(slow.actions[0].loc) == (30, 15)


def test_an_empty_file_means_the_defaults() -> None:
    assert good("") == good("# nothing\n") == Config()
    assert good("version: 1\nreceivers:\nrules:\ncapture:\nbus:\n") == Config.model_validate(
        {"version": 1, "receivers": {}, "rules": (), "capture": {}, "bus": {}}
    )


def test_a_rule_without_actions_differs_from_one_with_none() -> None:
    (nothing,) = good("version: 1\nrules:\n  - nonfinite: []\n").rules
    assert nothing.actions == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("250ms", timedelta(milliseconds=250)),
        ("30s", timedelta(seconds=30)),
        ("1.5m", timedelta(seconds=90)),
        ("4h", timedelta(hours=4)),
        ("2d", timedelta(days=2)),
    ],
)
def test_durations(text: str, expected: timedelta) -> None:
    assert parse_duration(text) == expected


@pytest.mark.parametrize(
    "wrong", [30, "30", "-1s", "1w", "s", "", None, "1 h", "9" * 18 + "d", True]
)
def test_what_is_no_duration(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"expected a duration"):
        parse_duration(wrong)


# -- what is wrong


def test_five_mistakes_give_five_problems_with_their_places() -> None:
    text = (
        "version: 1\n"
        "bus: kafka:/localhost:9092\n"
        "captur: {budget: 0.5%}\n"
        "receivers:\n"
        "  ml: {type: webhook, url: https://hooks.example.com/ml}\n"
        "rules:\n"
        "  - nonfinite: [stop, mll]\n"
        "  - name: gentle\n"
        "    use: loss_spike\n"
        "    severity: bad\n"
        "    actions: [{stop: {grace: 30}}]\n"
    )

    assert places(text) == [
        (2, 6, "invalid_value"),
        (3, 1, "unknown_key"),
        (7, 23, "unknown_receiver"),
        (10, 15, "invalid_value"),
        (11, 30, "invalid_value"),
    ]


def test_problems_of_yaml_shape_and_references_come_together() -> None:
    text = "version: 1\nlabels: {a: &x b}\nlabel: {}\nrules:\n  - nonfinite: [nobody]\nstop: *x\n"

    assert places(text) == [
        (2, 13, "anchor"),
        (3, 1, "unknown_key"),
        (5, 17, "unknown_receiver"),
        (6, 7, "alias"),
    ]


def test_after_a_syntax_error_nothing_is_guessed() -> None:
    assert places("version: 1\nrules: [\nnonsense: {a: 1}\n") == [(4, 1, "syntax")]


def test_the_whole_language_is_read() -> None:
    config = good(WHOLE)
    assert config.rules[1].name == "gpu-idle"
    assert config.policy[0].may_stop_on == ("slurm-a100",)


@pytest.mark.parametrize(
    ("body", "column", "words", "hint"),
    [
        ("mode: ask", 1, "unknown section 'mode'", "defaults: {mode: …}"),
        ("routes: 5", 9, "expected a list, got a number", "begin each entry"),
        ("routes: [{nme: a, notify: []}]", 11, "unknown key 'nme'", "name"),
        ("routes: [{name: a}]", 10, "the key 'notify' is missing", "notify: {critical: ["),
        ("routes: [{notify: [ml]}]", 20, "unknown receiver 'ml'", None),
        ("routes: [{notify: {critical: [ml]}}]", 31, "unknown receiver 'ml'", None),
        ("routes: [{notify: {critcal: []}}]", 20, "expected critical, warning,", "critical"),
        ("routes: [{notify: ml}]", 19, "expected a mapping, got text", None),
        ("routes: [{notify: [], also: 'yes'}]", 29, "expected true or false", None),
        ("routes: [{notify: [], match: {team: 3}}]", 37, "expected text, or a list", "quotes"),
        ("routes: [{notify: [], active: days}]", 31, "unknown time window 'days'", "time_windows"),
        ("routes: [{notify: [], mute: [Days]}]", 29, "expected a name", None),
        ("routes: [{name: a, notify: []}, {notify: []}]", 33, "no issue reaches", "also: true"),
        (
            "routes: [{name: a, match: {x: y}, notify: []}, {name: a, notify: []}]",
            55,
            "already a route 'a'",
            None,
        ),
        (
            "receivers: {a: {type: chat, url: slack://a/b, mute: x}}",
            53,
            "unknown time window",
            None,
        ),
        ("inhibit: [nan]", 11, "expected a mapping with name, when, mute, equal", None),
        ("inhibit: [{when: {rule: a}}]", 11, "the key 'mute' is missing", "mute: "),
        ("inhibit: [{when: {rule: a}, mute: {}}]", 35, "match every issue", "{rule: "),
        (
            "inhibit: [{when: {rule: a}, mute: {rule: b}, equal: [env]}]",
            53,
            "expected 'run' in the list",
            "[run]",
        ),
        ("silences: [{match: {run: x}, untl: x}]", 30, "unknown key 'untl'", "until"),
        ("silences: [{match: {}, until: 2026-12-01T00:00Z}]", 20, "silence every issue", "run"),
        ("silences: [{match: {run: x}, until: 2026-12-01}]", 37, "a time with its zone", None),
        (
            "silences: [{match: {a: b}, from: 2026-12-02T00:00Z, until: 2026-12-01T00:00Z}]",
            12,
            "expected 'from' before 'until'",
            None,
        ),
        (
            "silences: [{match: {a: b}, until: 2026-12-01T00:00Z, mutes: [stops]}]",
            62,
            "expected notify or stop",
            "stop",
        ),
        ("time_windows: {a: {weekly: []}}", 28, "expected at least one entry", None),
        ("time_windows: {a: {weekly: [mo-fr]}}", 29, "expected days and hours: mon-fri", None),
        ("time_windows: {a: {weekly: ['9:00-10:00']}}", 29, "expected days and hours", None),
        ("time_windows: {a: {weekly: ['08:00-08:00']}}", 29, "end later than they start", None),
        ("time_windows: {a: {weekly: [sun], time_zone: ' '}}", 46, "name of a time zone", None),
        ("rules: [nonfinite: [by_route]]", 21, "expected a section 'routes'", None),
        ("rules: [nonfinite: [notify: by_route]]", 21, "unknown action 'notify'", "by_route"),
        ("policy: {may_stop_on: []}", 9, "expected a list, got a mapping", None),
        ("limits: {stopss: 3}", 10, "unknown key 'stopss'", "stops"),
        ("limits: {stops: 3}", 17, "expected a mapping", None),
        ("limits: {stops: {per_hour: 0}}", 28, "greater than or equal to 1", None),
        ("limits: {stops: {max_fraction_of_running: 10}}", 43, "with its unit", None),
        ("rules: [nonfinite: [stop: {approve: {via: x}}]]", 43, "unknown receiver 'x'", None),
        ("rules: [nonfinite: [stop: {approve: {timeout: 8d}}]]", 37, "from 1s to 7d", None),
        ("limits: {stops: {per_day: 3}}", 18, "unknown key 'per_day'", "per_hour"),
        ("targets: {a: slurm}", 14, "expected a mapping like", None),
        ("labels: {a: 1}", 13, "expected text, got a number", "quotes around it"),
        ("labels: {1a: x}", 10, "expected a label's key", None),
        ("defaults: {rules: some}", 19, "expected all or none, got 'some'", None),
        ("defaults: {mode: shadows}", 18, "expected enforce, ask", "shadow"),
        ("bus: {url: 'embedded:x', tls: {}}", 6, "belong to a kafka:// bus", None),
        ("bus: {prefix: Vision}", 15, "lower-case letters, digits", None),
        ("bus: 'kafka://me:pw@h:1'", 6, "does not belong in the URL", None),
        ("stop: {trusted_keys: x}", 22, "expected a list, got text", None),
        ("secrets: {s: {}}", 14, "exactly one of 'file' and 'env'", None),
        ("secrets: {s: {file: a, env: B}}", 14, "exactly one of 'file' and 'env'", None),
        ("receivers: {stop: {type: webhook, url: http://x}}", 13, "a reserved word", None),
        ("receivers: {a: {type: webhook}}", 16, "the key 'url' is missing", "url: https://"),
        ("receivers: {a: {type: webhok, url: http://x}}", 23, "expected one of email", "webhook"),
        ("receivers: {a: {type: fax}}", 23, "expected one of email, chat", None),
        ("receivers: {a: {url: http://x}}", 16, "the key 'type' is missing", "one of email"),
        ("receivers: {a: [mail]}", 16, "expected a mapping", None),
        ("receivers: {a: {type: email, to: [x]}}", 35, "expected a mail address like", None),
        ("receivers: {a: {type: email, to: []}}", 34, "expected 1 to 50 addresses", None),
        ("receivers: {a: {type: email}}", 16, "the key 'to' is missing", "to: "),
        ("receivers: {a: {type: sms, to: ['0151']}}", 33, "with its country", None),
        ("receivers: {a: {type: email, to: [a@b], smpt: {}}}", 41, "unknown key 'smpt'", "smtp"),
        (
            "receivers: {a: {type: email, to: [a@b], smtp: {host: h, tls: true, starttls: true}}}",
            47,
            "expected either 'tls' or 'starttls'",
            None,
        ),
        ("receivers: {a: {type: chat, url: {secret: s}}}", 43, "unknown secret 's'", "name it"),
        ("receivers: {a: {type: webhook, url: ftp://x}}", 37, "expected a URL like https", None),
        ("receivers: {a: {type: webhook, url: {secret: s}}}", 46, "unknown secret 's'", "name it"),
        ("rules: {nonfinite: off}", 8, "expected a list, got a mapping", "begin each rule"),
        ("rules: [nonfinite]", 9, "expected a rule with its actions", "nonfinite: [stop]"),
        ("rules: [nonfinite: stop]", 20, "expected a list of actions, or off", "[stop]"),
        ("rules: [{name: a, uses: b}]", 19, "unknown key 'uses'", "use"),
        ("rules: [{params: {}}]", 9, "expected 'name' or 'use'", None),
        ("rules: [{use: a, params: [1]}]", 26, "expected a mapping, got a list", None),
        ("rules: [{use: a, preset: 3}]", 26, "expected text", None),
        ("rules: [{use: a, match: {env: 3}}]", 31, "expected text", None),
        ("rules: [a: [stop: {grase: 3s}]]", 20, "unknown key 'grase'", "grace"),
        ("rules: [a: [stop: {grace: 2d}]]", 19, "a grace of at most 1d", None),
        ("rules: [a: [stp: {}]]", 13, "unknown action 'stp'", "stop"),
        ("rules: [a: [3]]", 13, "expected an action", None),
        ("rules: [a: off, a: off]", 17, "already listed", "name: another-name"),
        ("rules: [No!e: off]", 9, "expected a name", None),
    ],
)
def test_each_mistake_has_its_place_its_words_and_its_hint(
    body: str, column: int, words: str, hint: str | None
) -> None:
    (problem,) = problems_of(body)

    assert (problem.line, problem.column) == (2, column)
    assert words in problem.message
    assert hint is None or hint in (problem.hint or "")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("labels: {}\n", (1, 1)),
        ("version: 2\n", (1, 10)),
        ("version: true\n", (1, 10)),
        ("[1]", (1, 1)),
    ],
)
def test_the_version_is_needed(text: str, place: tuple[int, int]) -> None:
    assert [(line, column) for line, column, _ in places(text)] == [place]


def test_a_broken_entry_hides_nothing_in_the_next() -> None:
    text = "version: 1\nrules:\n  - 3\n  - nonfinite: [x]\n  - loss_spike: [stop, {stop: 3}, y]\n"
    assert [line for line, _, _ in places(text)] == [3, 4, 5, 5]


def test_a_reference_to_something_broken_is_not_unknown() -> None:
    text = "receivers: {chat: {type: chat}}\nrules: [nonfinite: [chat]]\n"
    assert [p.code for p in problems_of(text)] == ["missing_key"]


# -- how it is shown


def test_a_problem_is_shown_with_its_line_a_caret_and_a_hint() -> None:
    text = "version: 1\nlabels:\n  env: prod\nrules:\n  - nonfinite: [stpo]\n"
    _, problems = check_config(text, "conf/tocsin.yaml", SectionRegistry(KINDS))

    assert str(ConfigProblems(problems, text)).splitlines() == [
        "conf/tocsin.yaml:5:17: unknown receiver 'stpo'",
        "     5 |   - nonfinite: [stpo]",
        "       |                 ^",
        "         try: stop",
    ]


def test_control_characters_do_not_reach_the_terminal() -> None:
    text = 'version: 1\n"\\e[31mred": 1\n\x85'
    shown = str(ConfigProblems(check_config(text, "f", SectionRegistry(KINDS))[1], text))
    assert "\x1b" not in shown


def test_a_long_line_is_cut_around_the_place() -> None:
    text = "version: 1\nrules: [" + "nonfinite: [stop], " * 90 + "x: [nobody]]\n"
    shown = str(
        ConfigProblems([check_config(text, "f", SectionRegistry(KINDS))[1][-1]], text)
    ).splitlines()
    assert len(shown[1]) < 140
    assert shown[1][shown[2].index("^") :].startswith("nobody")


PLANTED = "whsec_C2FVsBQIhrscChlQIMV"


def test_paths_may_begin_with_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config, problems = check_config(
        "version: 1\n"
        "bus: {url: 'kafka://b:9092', tls: {ca: ~/ca.pem}}\n"
        "secrets: {a: {file: ~/token}, b: {file: './~/token'}}\n"
        "stop: {trusted_keys: ['~']}\n"
        "capture: {system: {folders: [~/data]}}\n",
        "f",
    )
    _, refused = check_config("version: 1\nsecrets: {a: {file: ~nobody-here/token}}\n", "f")

    assert problems == []
    assert config is not None
    assert config.bus.tls is not None
    assert config.bus.tls.ca == Path("/home/me/ca.pem")
    files = [source.file for source in config.secrets.values()]
    assert files == [Path("/home/me/token"), Path("~/token")]
    assert config.stop.trusted_keys == (Path("/home/me"),)
    assert config.capture.system.folders == (Path("/home/me/data"),)
    assert [(one.line, one.column, one.message) for one in refused] == [
        (2, 21, "the home folder of this user is not known: write the path out")
    ]


@pytest.mark.parametrize(
    "body",
    [
        f"secrets: {{hook: {PLANTED}}}",
        f"secrets:\n  hook: {PLANTED}",
        f"secrets:\n  hook: {{value: {PLANTED}}}",
        f"secrets:\n  hook: &a {PLANTED}",
        f"secrets:\n  hook: [{PLANTED}",
        f"receivers:\n  a: {{type: webhook, url: {PLANTED}}}",
        f"receivers:\n  a: {{url: 'https://{PLANTED}@example.com/', typ: webhook}}",
        f"receivers:\n  a:\n    type: webhook\n    url: http://x\n    sign: {{key: {PLANTED}}}",
        f"receivers:\n  a:\n    type: webhook\n    url: http://x\n    sign:\n      key: {PLANTED}",
        f"receivers:\n  a: {{type: webhook, url: http://x, headers: {{a: [{PLANTED}]}}}}",
        f"bus:\n  url: kafka://h:1\n  sasl: {{username: a, password: {PLANTED}}}",
        f"bus: kafka://me:{PLANTED}@h:1",
        # An address in the place of a name.
        f"rules: [nonfinite: [stop, slack://{PLANTED}/b]]",
        f"rules: [nonfinite: [slack://{PLANTED}/b, slack://{PLANTED}/b]]",
        f"rules:\n  - {{use: nofinite, actions: [stpo, {PLANTED}/b]}}",
        f"rules:\n  - {{use: nonfinite, severty: info, actions: [slack://{PLANTED}/b]}}",
        f"rules:\n  - nonfinite:\n    - slack://{PLANTED}/b",
        f"rules: [slack://{PLANTED}/b]",
        f"rules: [nonfinite: [slack://{PLANTED}/b: {{}}]]",
        f"slack://{PLANTED}/b: x",
        f"slack://{PLANTED}/b: x\nslack://{PLANTED}/b: x",
        # A mistyped section of secrets.
        f"secretz: {{hook: {PLANTED}}}",
        f"recievers: {{a: {{type: chat, url: 'slack://{PLANTED}/b'}}}}",
        f"bus: {{url: 'kafka://h:1', sals: {{username: a, password: {PLANTED}}}}}",
        # Something wrong beside it, in the same line.
        f"bus: {{url: 'kafka://h:1', sasl: {{username: a, password: {PLANTED}, mechanism: XX}}}}",
        f"bus: {{url: 'kafka://me:{PLANTED}@h:1', prefix: Vision}}",
        f"bus:\n  sasl:\n    username: a\n    password:\n      a: {PLANTED}\n      ? {PLANTED}",
        f"secrets: {{a: {{file: x}}, b: @{PLANTED}",
        f"secrets: '{PLANTED}",
        f"secrets: @{PLANTED}",
    ],
)
def test_a_secret_written_into_the_file_is_not_shown(body: str) -> None:
    text = f"version: 1\n{body}\n"
    config, problems = check_config(text, "f", SectionRegistry(KINDS))

    assert config is None
    assert problems
    assert PLANTED not in str(ConfigProblems(problems, text))
    assert all(PLANTED not in problem.message for problem in problems)


@pytest.mark.parametrize(
    "text",
    [
        f"{{version: 1, receivers: {{a: {{type: chat, url: 'slack://{PLANTED}'}}}}, lables: {{}}}}",
        f'{{"version": 1, "secrets": {{"k": "{PLANTED}"}}, "labels": {{"a": 1}}}}',
        f'{{"version": 1, "labels": {{"a": 1}}, "secrets":\n{{"k": "{PLANTED}"}}, "rules": 3}}',
        f"{{version: 1, secrets: @{PLANTED}}}",
        f'{{"version": 1,\n"bus": {{"sasl": {{\n"password": "{PLANTED}}}}}',
    ],
)
def test_a_secret_of_a_file_in_flow_style_is_not_shown(text: str) -> None:
    config, problems = check_config(text, "f", SectionRegistry(KINDS))

    assert config is None
    assert problems
    assert PLANTED not in str(ConfigProblems(problems, text))


def test_an_address_in_the_place_of_a_receiver_says_where_it_belongs() -> None:
    body = f"receivers:\n  a: {{type: chat, url: x}}\nrules: [nonfinite: [slack://{PLANTED}/b/c]]"
    (problem,) = problems_of(body)

    assert (problem.line, problem.column, problem.code) == (4, 21, "unknown_receiver")
    assert problem.message == "expected 'stop' or the name of a receiver"
    assert problem.hint == "put it under 'receivers', and its name here"


def test_only_what_stands_beside_a_secret_is_hidden() -> None:
    text = (
        "version: 1\nbus:\n  sasl:\n    username: a\n    password: {secret: pw}\n\n"
        "  prefix: Vision\n"
        "secrets:\n  pw: {env: PW}\n\n# the rules\nrules: 3\n"
    )
    _, problems = check_config(text, "f", SectionRegistry(KINDS))

    shown = str(ConfigProblems(problems, text))
    assert "     7 |   prefix: Vision" in shown
    assert "    12 | rules: 3" in shown


# -- services check their own sections


class SpikeParams(BaseModel, extra="forbid"):
    window: int = 100


def rule_problems(config: Config) -> Iterator[Problem]:
    for rule in config.rules:
        if rule.use != "loss_spike":
            yield Problem(rule.at("use"), f"unknown rule {rule.use!r}", "unknown_rule", at="key")
            continue
        try:
            SpikeParams.model_validate(rule.params)
        except ValidationError as err:
            yield from problems_of_model(err, SpikeParams, rule.at("params"))


def test_a_registered_validator_gives_its_problems_in_the_same_pass() -> None:
    registry = SectionRegistry(KINDS)
    registry.register("rules", rule_problems)
    text = (
        "version: 1\n"
        "labels: {a: 1}\n"
        "rules:\n"
        "  - {use: loss_spike, params: {windw: 3}}\n"
        "  - {use: loss_spike, name: b, params: {window: x}}\n"
        "  - nofinite: [stop]\n"
        "  - {name: c, use: nofinite}\n"
    )

    assert places(text, registry) == [
        (2, 13, "invalid_value"),
        (4, 32, "unknown_key"),
        (5, 49, "invalid_value"),
        (6, 5, "unknown_rule"),
        (7, 15, "unknown_rule"),
    ]


def test_a_section_has_one_validator() -> None:
    registry = SectionRegistry(KINDS)
    registry.register("rules", rule_problems)
    with pytest.raises(DuplicateSection, match="'rules'"):
        registry.register("rules", rule_problems)


# -- finding the file


def test_the_search_order(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    for name, label in (("flag", "1"), ("variable", "2"), ("work/tocsin", "3")):
        (tmp_path / f"{name}.yaml").write_text(f"version: 1\nlabels: {{from: '{label}'}}\n")
    env = {"TOCSIN_CONFIG": str(tmp_path / "variable.yaml")}

    flag = load_config(tmp_path / "flag.yaml", env, folder=folder)
    variable = load_config(None, env, folder=folder)
    here = load_config(None, {"TOCSIN_CONFIG": ""}, folder=folder)
    nowhere = load_config(None, {}, folder=tmp_path)

    assert [c.config.labels.get("from") for c in (flag, variable, here, nowhere)] == [
        *("1", "2", "3"),
        None,
    ]
    assert flag.locate(Path("keys/a.pub")) == tmp_path / "keys/a.pub"
    assert flag.locate(Path("/keys/a.pub")) == Path("/keys/a.pub")
    assert (nowhere.path, nowhere.config) == (None, Config())


def test_a_file_that_was_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"gone\.yaml.*No such file"):
        load_config(Path("gone.yaml"), {}, folder=tmp_path)
    with pytest.raises(ConfigurationError, match="no configuration in the folder"):
        load_config(tmp_path, {}, folder=tmp_path)


def test_a_file_with_problems_raises_them_all(tmp_path: Path) -> None:
    (tmp_path / "tocsin.yaml").write_text("version: 1\na: 1\nb: 2\n")
    with pytest.raises(ConfigProblems, match=r"tocsin\.yaml:2:1: unknown section 'a'") as caught:
        load_config(None, {}, folder=tmp_path)
    assert len(caught.value.problems) == 2


def test_bytes_that_are_no_utf8_have_a_place(tmp_path: Path) -> None:
    (tmp_path / "tocsin.yaml").write_bytes(b"version: 1\nlabels: {a: \xff}\n")
    with pytest.raises(ConfigProblems, match=r"tocsin\.yaml:2:13: this is not UTF-8"):
        load_config(None, {}, folder=tmp_path)


def test_a_byte_order_mark_moves_no_column(tmp_path: Path) -> None:
    (tmp_path / "tocsin.yaml").write_bytes(b"\xef\xbb\xbfversion: 2\n")
    with pytest.raises(ConfigProblems) as caught:
        load_config(None, {}, folder=tmp_path)
    assert str(caught.value).splitlines()[:3] == [
        "tocsin.yaml:1:10: expected version 1, the only one that this release reads",
        "     1 | version: 2",
        "       |          ^",
    ]


# -- secrets


def test_secrets_come_from_files_and_the_environment(tmp_path: Path) -> None:
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "pw").write_text("from file\n")

    values = resolve_secrets(good(WORKING), {"HOOK_KEY": "from env"}, folder=tmp_path)

    assert {name: value.get_secret_value() for name, value in values.items()} == {
        "pw": "from file",
        "hook": "from env",
    }
    assert "from" not in repr(values)


def test_all_missing_secrets_are_named_and_no_value_is_shown(tmp_path: Path) -> None:
    text = (
        "version: 1\nsecrets:\n  a: {env: A}\n  b: {file: b}\n  c: {file: c}\n  d: {env: D}\n"
        "  e: {file: e}\n  f: {file: c, optional: true}\n"
    )
    (tmp_path / "c").write_bytes(PLANTED.encode() + b"\xff")
    (tmp_path / "e").write_bytes(b"\n")

    secrets = resolve_secrets(good(text), {"D": ""}, folder=tmp_path)
    with pytest.raises(SecretUnavailable) as caught:
        secrets.require_all()

    assert str(caught.value).splitlines() == [
        "secret 'a': variable A is not set",
        "secret 'b': file 'b' does not exist",
        "secret 'c': file 'c' is not readable as UTF-8 text of at most 64 KiB",
        "secret 'd': variable D is empty",
        "secret 'e': file 'e' is empty",
        "secret 'f': file 'c' is not readable as UTF-8 text of at most 64 KiB",
    ]
    assert PLANTED not in repr(caught.value.__cause__) + repr(caught.value.__context__)


# -- flag, environment, file, default


def test_the_first_that_is_given_decides() -> None:
    assert resolve_setting(flag=1, environment=2, file=3, default=4) == ResolvedSetting(1, "flag")
    assert resolve_setting(environment=2, file=3, default=4) == ResolvedSetting(2, "environment")
    assert resolve_setting(file=0, default=4) == ResolvedSetting(0, "file")
    assert resolve_setting(default=4) == ResolvedSetting(4, "default")


def test_bus_and_labels_are_laid_over_the_file() -> None:
    config = good(WORKING)
    env = {"TOCSIN_BUS": "embedded:/tmp/x.db", "TOCSIN_LABELS": "env=dev, team=nlp,"}

    by_env = resolve_settings(config, env, labels=["team=audio", "who=a=b"])
    by_flag = resolve_settings(config, env, bus="kafka://other:1")
    by_file = resolve_settings(config, {"TOCSIN_BUS": ""})
    by_default = resolve_settings(good("version: 1\nbus: {prefix: p}"), {})

    assert (by_env.bus.url, by_env.bus_origin) == ("embedded:/tmp/x.db", "environment")
    assert (by_env.bus.prefix, by_env.bus.sasl, by_env.bus.tls) == ("vision", None, None)
    assert by_env.labels == {"env": "dev", "team": "audio", "who": "a=b"}
    assert (by_flag.bus.url, by_flag.bus_origin) == ("kafka://other:1", "flag")
    assert by_flag.bus.sasl == config.bus.sasl
    assert (by_file.bus, by_file.bus_origin) == (config.bus, "file")
    assert (by_default.bus_origin, by_default.bus.prefix) == ("default", "p")


@pytest.mark.parametrize(
    ("env", "flags", "words"),
    [
        ({"TOCSIN_BUS": "sqlite:x"}, [], "TOCSIN_BUS: expected embedded:PATH"),
        ({"TOCSIN_LABELS": "a"}, [], "TOCSIN_LABELS 'a': expected key=value"),
        ({}, ["=x"], "--label '=x': expected a label's key"),
    ],
)
def test_a_wrong_flag_or_variable_is_named(
    env: dict[str, str], flags: list[str], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        resolve_settings(Config(), env, labels=flags)


# -- the schema for editors, and anything at all


def test_the_json_schema_takes_what_the_loader_takes_and_no_more() -> None:
    schema = config_json_schema(KINDS.models(), [])
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)

    validator.validate(load(WORKING, source="f").data)
    validator.validate(load(WHOLE, source="f").data)
    validator.validate({"version": 1, "bus": "embedded:x", "rules": [{"nonfinite": ["stop"]}]})
    wrong: object
    for wrong in (
        {"labels": {}},
        {"version": 1, "captur": {}},
        {"version": 1, "rules": [{"use": "a", "severty": "info"}]},
        {"version": 1, "rules": [{"nonfinite": "stop"}]},
        {"version": 1, "rules": [{"nonfinite": [{"stop": {"grace": 30}}]}]},
    ):
        assert not validator.is_valid(wrong)


@pytest.mark.parametrize("model", [Config, RuleEntry, ActionEntry, StopOptions])
def test_every_field_says_what_it_means(model: type[BaseModel]) -> None:
    meanings = field_docstrings(model)
    assert all(f.description or meanings.get(name) for name, f in model.model_fields.items())


def test_a_configuration_cannot_be_changed() -> None:
    config = Config()
    with pytest.raises(ValidationError, match="frozen"):
        config.version = 1


WORDS = """
    version bus url labels secrets secret capture collections defaults receivers type sign key rules
    name use match params actions stop off nonfinite severity routes x
"""
keys = st.sampled_from(sorted(set(WORDS.split())))
leaves = st.sampled_from(["1", "stop", "off", "webhook", "~", "true", "30s", "0.5%", "''", "1e9"])
tree = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: "[" + ", ".join(items) + "]")
        | st.dictionaries(keys, inner, max_size=4).map(
            lambda items: "{" + ", ".join(f"{k}: {v}" for k, v in items.items()) + "}"
        )
    ),
    max_leaves=12,
)


@given(st.dictionaries(keys, tree, max_size=5))
def test_any_file_gives_a_configuration_or_problems(sections: dict[str, str]) -> None:
    text = "".join(f"{key}: {value}\n" for key, value in sections.items())

    config, problems = check_config(text, "f", SectionRegistry(KINDS))

    assert (config is None) == bool(problems)
    assert str(ConfigProblems(problems, text))
    assert problems == sorted(problems, key=lambda p: (p.line, p.column))
