"""`tocsin init`: a configuration with examples in comments, of the common settings or of all.

A comment that starts with "# " explains; any other is an example, which works once its "#" is
removed. An example may use what those above it define.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from tocsin.console.configuration.field_texts import field_texts
from tocsin.schemas.errors import ConfigurationError
from tocsin.stream_rules.catalogue import Catalogue, built_in
from tocsin.stream_rules.rule import AnyRule

EXAMPLE: Final = re.compile(r"^( *)#(?! \S)(?=.)", re.MULTILINE)
"""The mark of a line that is an example; removing it, all but the indentation, uncomments it."""

_WIDTH: Final = 100

_FIRST: Final = """\
# What tocsin monitors, whom it notifies and what it may stop. Every key is optional: unchanged,
# this file has no effect, and all rules run at their defaults.
#
# Lines that start with "# " are explanations. Lines that start with "#" and no space are examples:
# remove the "#" to use them. An example may use names from the examples above it.
#
# Problems in this file, or the settings in effect:  tocsin check
# All keys and all rules, as examples like these:    tocsin init --full everything.yaml
version: 1

# Labels of each run. Rules can match them; --label adds to them.
labels:
  #team: vision

# Secrets: their names are here, their values in files or environment variables.
secrets:
  #mail-password: {env: TOCSIN_MAIL_PASSWORD}
  #slack-url: {file: secrets/slack-url}

# The bus carries all records. Default: embedded:.tocsin/bus.db, one file, no server. With Kafka,
# `tocsin rules` and `tocsin actions` run as workers for all machines.
bus:
  #url: kafka://kafka-1:9092,kafka-2:9092

# Where notifications go. `tocsin run --notify URL|ADDRESS` adds one for a single run.
receivers:
  # E-mail, through the server in TOCSIN_SMTP (smtp://USER:PASSWORD@HOST:PORT) or the one in `smtp`.
  #ml-mail: {type: email, to: [me@example.com]}
  #vision-mail:
  #  type: email
  #  to: [vision@example.com]
  #  smtp: {host: mail.example.com, username: tocsin, password: {secret: mail-password}}
  # Slack, Discord, Telegram and other chats; the URL is a secret.
  #ml-chat: {type: chat, url: {secret: slack-url}}
  # A webhook: posts each issue as a CloudEvent.
  #ml-hook: {type: webhook, url: "https://hooks.example.com/ml"}

# The actions of each rule, in addition to the line on the terminal: `stop`, and names of receivers.
# Only this list decides. Rules that are not listed run at their defaults. All rules:
# tocsin catalog list; one rule with its parameters: tocsin catalog show nonfinite
rules:
  # NaN or infinity in the loss, a gradient or a weight. Stops the run by default.
  #- nonfinite: [stop, ml-mail]
  # The loss is far above its past values. Stops the run by default when it is critical.
  #- loss_diverged: [stop, ml-mail]
  # These rules never stop a run by default.
  #- exploding_gradient: [ml-mail]
  #- stalled_training: [ml-mail]
  # A rule with other parameters and another severity.
  #- name: loss_spike
  #  params: {k: 12.0}
  #  severity: info
  #  actions: [ml-mail]
  # Switch a rule off.
  #- overtraining: off
"""

_HEAD: Final = """\
# What tocsin monitors, whom it notifies and what it may stop. Every key is optional; the comments
# show the defaults.
#
# Lines that start with "# " are explanations. Lines that start with "#" and no space are examples:
# remove the "#" to use them. An example may use names from the examples above it.
#
# `tocsin check` prints every problem in this file, or the settings in effect. All keys:
# docs/reference/configuration.md. For completion in an editor: tocsin schema > tocsin.schema.json,
# and as the first line here: # yaml-language-server: $schema=tocsin.schema.json
version: 1

# Labels of each run; TOCSIN_LABELS and --label add to them. Rules can match them.
labels:
  #env: prod
  #team: vision

# Secrets: their names are here, their values in files or environment variables, never in this file.
# Everywhere else, write {secret: NAME} in place of the value.
secrets:
  # A relative path starts at the folder of this file. One line break at the end is removed.
  #kafka-password: {file: secrets/kafka-password}
  # optional: true allows it to be missing; its users then do without it. Default: false.
  #hook-url: {env: TOCSIN_HOOK_URL, optional: true}
  #hook-key: {env: TOCSIN_HOOK_KEY}
  #hook-key-before: {env: TOCSIN_HOOK_KEY_BEFORE, optional: true}
  #ray-token: {file: secrets/ray-token}
  #mail-password: {env: TOCSIN_MAIL_PASSWORD}
  #slack-url: {env: TOCSIN_SLACK_URL}
  #pagerduty-key: {env: TOCSIN_PAGERDUTY_KEY}
  #incident-io-token: {env: TOCSIN_INCIDENT_IO_TOKEN}
  #goalert-url: {env: TOCSIN_GOALERT_URL}
  #alertmanager-token: {env: TOCSIN_ALERTMANAGER_TOKEN}
  #twilio-token: {env: TOCSIN_TWILIO_TOKEN}
  #slurm-token: {file: secrets/slurm-token}

# The bus carries all records: one SQLite file (embedded:PATH, no server, one machine) or Kafka (a
# fleet). Default: embedded:.tocsin/bus.db; --bus and TOCSIN_BUS override this.
bus:
  # Prefix of the topic names: one for each team.
  #prefix: tocsin
  # Kafka, with `tocsin rules` and `tocsin actions` as workers. sasl: PLAIN, SCRAM-SHA-256 or
  # SCRAM-SHA-512. tls: {} trusts the system's certificate authorities.
  #url: kafka://kafka-1:9092,kafka-2:9092
  #sasl: {mechanism: SCRAM-SHA-512, username: tocsin, password: {secret: kafka-password}}
  #tls: {ca: tls/ca.pem, certificate: tls/client.pem, key: tls/client.key}

# What the training process records.
capture:
  # The share of the step time that capture may take: 0.01% to 100%. It determines how often
  # collections with `every: auto` are summarised.
  #budget: 0.5%
  # What is summarised, and when. Built-in collections: losses, gradients, weights, activations,
  # optimizer_state, and, off unless named here, biases and inputs.
  # every: the interval in steps, counted from `start`, or auto (default). end: the first step that
  # is not captured any more. steps: single steps, captured in any case; without `every`, only
  # those. columns: the statistics to compute. These apply to training; `modes` has the same keys
  # for eval and predict, where activations and inputs count batches, and for global: every mode
  # without a section. A custom collection names its source (of) and selects tensors by regular
  # expressions on their names (match), by the classes of their modules, or by name.
  #collections:
  #  gradients: {every: 10, columns: [l2, absmax]}
  #  weights: {every: 100, start: 1000, end: 2000, steps: [0, 1]}
  #  activations: off
  #  losses: {modes: {eval: off}}
  #  inputs: {steps: [1, 500]}
  #  heads: {of: weights, match: "(query|key)", module_types: Embedding, tensors: [head.weight]}
  # How often the node is sampled (100ms to 60s), and folders whose free disk space is sampled in
  # addition to that of the job's working folder.
  #system: {interval: 500ms, folders: [/data]}

# Defaults for rules without their own settings.
defaults:
  # Whether rules that are not listed below run: all or none.
  #rules: all
  # The effect of a stop: enforce stops the job, ask waits for `tocsin approve`, shadow records it.
  #mode: enforce
  # Whether receivers are notified when an issue resolves, too.
  #send_resolved: true
  # Issues with the same run and rule (or severity, or a label) are one message if the first one may
  # wait for others, for example 5s. 0s: each issue has its own message.
  #group_by: [run, rule]
  #group_wait: 0s
  # Repeat a notice until the issue is over or somebody answers it (tocsin ack). Default: never.
  #repeat_interval: 4h

# Hours of the week by name, for receivers and routes. Hours without days are on each day, and days
# without hours are whole days. Default time zone: UTC.
time_windows:
  #office-hours: {weekly: ["mon-fri 08:00-18:00", "sat 10:00-14:00"], time_zone: Europe/Berlin}
  #nights: {weekly: ["22:00-06:00"], time_zone: Europe/Berlin}

# Where notifications go, by name. `tocsin run --notify URL|ADDRESS` adds one for a single run.
receivers:
  # E-mail with a plot of the data behind the issue. The server is the one in TOCSIN_SMTP
  # (smtp://USER:PASSWORD@HOST:PORT), otherwise the one on this machine.
  #ml-mail: {type: email, to: [vision@example.com]}
  # All keys. starttls: encrypt, or do not send (default, except to a server on this machine); tls:
  # encrypt from the first byte. send_resolved: also notify when an issue resolves (default:
  # defaults.send_resolved). active, mute: time windows in which it is notified, or is not. urgent:
  # repeat notices so often at first, until somebody answers. digest: report so often that all is
  # well. concurrency: attempts at the same time. circuit_breaker: after so many failures in a row,
  # try it so often only. All receivers have these keys from send_resolved on.
  #vision-mail:
  #  type: email
  #  to: [vision@example.com, ana@example.com]
  #  sender: tocsin@example.com
  #  smtp:
  #    host: mail.example.com
  #    port: 587
  #    starttls: true
  #    tls: false
  #    ca: tls/ca.pem
  #    username: tocsin
  #    password: {secret: mail-password}
  #  send_resolved: true
  #  active: office-hours
  #  mute: [nights]
  #  retry: {give_up_after: 24h}
  #  urgent: {every: 5m, for: 1h, severity: critical}
  #  digest: 24h
  #  concurrency: 4
  #  circuit_breaker: {failures: 5, probe_every: 30s}
  # A chat message: slack://TOKEN_A/TOKEN_B/TOKEN_C, discord://ID/TOKEN, tgram://BOT_TOKEN/CHAT_ID
  # and others, or a webhook URL of Slack or Discord. Such a URL is a secret.
  #vision-chat: {type: chat, url: {secret: slack-url}}
  # With the machine's AWS credentials: a text message through SNS, a line in a log group of
  # CloudWatch, a call of a Lambda function, a message to an SQS queue, an event on an EventBridge
  # bus.
  #on-call: {type: sms, to: ["+4915112345678"], region: eu-central-1, sender_id: tocsin}
  #ml-log: {type: cloudwatch, log_group: /ml/alerts, log_stream: tocsin, namespace: ml/training}
  #ml-lambda: {type: lambda, function: ml-alerts, region: eu-central-1}
  #ml-queue:
  #  type: sqs
  #  queue: https://sqs.eu-central-1.amazonaws.com/123456789012/ml-alerts
  #  region: eu-central-1
  #ml-events: {type: eventbridge, event_bus: ml-alerts, region: eu-central-1}
  # A text message through Twilio.
  #on-call-2:
  #  type: sms
  #  to: ["+4915112345678"]
  #  twilio:
  #    account: AC00000000000000000000000000000000
  #    token: {secret: twilio-token}
  #    sender: "+14155550100"
  # A program of this machine, which --allow-command must name too; the issue is its input.
  #ml-page:
  #  type: command
  #  run: [/usr/local/bin/page, --team, vision]
  #  environment: {TOCSIN_TEAM: vision}
  #  timeout: 30s
  # A webhook: posts each issue as a CloudEvent; body: alertmanager-v4 posts what Alertmanager does.
  #ml-hook: {type: webhook, url: "https://hooks.example.com/ml"}
  #vision-hook: {type: webhook, url: "https://hooks.example.com/vision", body: alertmanager-v4}
  # A text of your own; language: fields (default) or jinja.
  #chat-hook:
  #  type: webhook
  #  url: https://hooks.example.com/chat
  #  template:
  #    text: '{"text": "{word} {run}: {headline}"}'
  #    language: fields
  #    content_type: application/json
  # All keys: the URL from a secret, headers, a signature (Standard Webhooks; while you replace a
  # key, previous_key signs as well), and how long to retry (ms, s, m, h or d; default 24h).
  #signed-hook:
  #  type: webhook
  #  url: {secret: hook-url}
  #  headers: {x-team: vision}
  #  sign: {scheme: standard, key: {secret: hook-key}, previous_key: {secret: hook-key-before}}
  #  retry: {give_up_after: 24h}
  # On-call services: an alert for each issue, which ends when the issue does.
  #ml-pager:
  #  type: pagerduty
  #  routing_key: {secret: pagerduty-key}
  #  url: https://events.eu.pagerduty.com/v2/enqueue
  #ml-incidents:
  #  type: incident_io
  #  url: https://api.incident.io/v2/alert_events/http/01GW2G3V0S59
  #  token: {secret: incident-io-token}
  #ml-goalert: {type: goalert, url: {secret: goalert-url}}
  # An Alertmanager; expires_after: how long an alert stays that nothing resolves.
  #ml-alerts:
  #  type: alertmanager
  #  url: http://alertmanager:9093
  #  token: {secret: alertmanager-token}
  #  expires_after: 24h

# Who is notified of issues of rules without a list of actions, or with `by_route` in it. The first
# route that matches decides, unless it says also: true. match: labels of the run, and run, rule and
# severity of the issue (* and ? match any characters). notify: receivers by severity (critical,
# warning, info; default: the others), or one list for all. active, mute: time windows.
routes:
  #- {name: everything, notify: {critical: [ml-hook], info: []}, also: true}
  #- name: vision
  #  match: {team: vision, env: [prod, staging]}
  #  notify: {critical: [vision-chat, vision-mail], default: [vision-chat]}
  #  active: office-hours
  #  mute: [nights]
  #  group_by: [run, team]
  #  group_wait: 30s
  #  repeat_interval: 1h
  #  send_resolved: false
  #- {name: rest, notify: [ml-hook]}

# Issues that explain others: while an issue that matches `when` is open, issues of its run that
# match `mute` are recorded, and notify nobody. equal: keys that both must share; run is required.
inhibit:
  #- {name: nan, when: {rule: nonfinite}, mute: {rule: [loss_spike, "vanishing*"]}, equal: [run]}

# How many runs of the bus may be stopped; on Kafka only. on_exceed: notify_only sends no stop, ask
# waits for people.
limits:
  #stops:
  #  per_hour: 3
  #  per_team_per_hour: 2
  #  max_fraction_of_running: 10%
  #  min_job_age: 5m
  #  on_exceed: ask

# Schedulers that can end a job when its launcher has not: each by its kind. grace: what the
# scheduler itself gives a job between SIGTERM and SIGKILL. confirm_within: how long to look for the
# end of the job.
targets:
  # With the commands and the slurm.conf of this machine; or through slurmrestd.
  #a100: {type: slurm}
  #h100:
  #  type: slurm
  #  rest:
  #    url: https://slurm.example.com:6820
  #    api: v0.0.41
  #    user: tocsin
  #    token: {secret: slurm-token}
  #    tls: {ca: tls/slurm-ca.pem}
  # As the service account of the pod that `tocsin actions` runs in, or with a kubeconfig.
  #k8s-train: {type: kubernetes, kind: job, op: suspend, namespaces: [train], grace: 60s}
  #k8s-other:
  #  type: kubernetes
  #  kind: pytorchjob
  #  op: delete
  #  namespaces: [train, eval]
  #  kubeconfig: kube/stopper.config
  #  context: training
  # With the machine's AWS credentials.
  #ml-training: {type: sagemaker, region: eu-central-1, grace: 120s, confirm_within: 10m}
  #ml-batch: {type: batch, region: eu-central-1}
  # The dashboard of a Ray cluster, with its token where it has one.
  #ray-a: {type: ray, address: "https://ray.example.com:8265", token: {secret: ray-token}, tls: {}}
  # A service of your own, which is asked by a signed request and then for the state of the job.
  #ops:
  #  type: webhook
  #  url: https://jobs.example.com/stop
  #  status_url: https://jobs.example.com/status
  #  sign: {key: {secret: hook-key}}
  #  headers: {x-tenant: vision}
  #  tls: {}
  #  schedulers: [lsf]

# Which targets may end the jobs of which runs. Default: none. match: labels of the run, and run:
# its id; {} matches every run.
policy:
  #- {match: {team: vision}, may_stop_on: [a100, h100, ml-training, ml-batch]}

# Issues that are known, and notify nobody for some time. mutes: notify, stop or both. `tocsin
# silence` adds one without a change of this file.
silences:
  #- match: {run: "sweep-*"}
  #  from: 2026-11-24T08:00:00Z
  #  until: 2026-12-01T00:00:00Z
  #  by: ana
  #  why: known bad learning rates
  #  mutes: [notify]

# Where people reach `tocsin actions --http`, through a proxy with TLS: messages then have a link by
# which they approve stops, acknowledge and resolve issues.
#public_url: https://tocsin.example.com

# What devices cost, for estimates of what stops save. per_hour: by a part of the name of an
# accelerator. default: other accelerators. cpu: a rank on the CPU.
prices:
  #currency: USD
  #per_hour: {H100: 2.5, A100: 1.3}
  #default: 1.0
  #cpu: 0.4

# Pings that show that tocsin works, to `tocsin heartbeat check` or another dead man's switch: it
# alerts people when the pings stop. {sender}: name of the worker or run. runs: whether runs on an
# embedded bus ping, too.
heartbeat:
  #url: http://127.0.0.1:9480/{sender}
  #every: 60s
  #runs: true

# Files of the public keys whose stop commands a training process obeys. Default: all public keys in
# ~/.config/tocsin/keys.
stop:
  #trusted_keys: [keys/actions.pub]
  # Keep the last good checkpoint of a run that is stopped: off, hard_link or copy. And whether
  # `tocsin run` starts a run again that was stopped: go_on or hold.
  #pin: hard_link
  #on_restart: hold

# Rules and their actions, in addition to the line on the terminal: `stop`, and names of receivers.
# Only this list decides; without a list, the rules that are marked below stop their run. Forms:
# "- RULE: [stop, RECEIVER]", "- RULE: off", and the long form below, which shows the defaults.
rules:
"""

_INSTANCE: Final = """
  # A preset is a set of parameters: sagemaker has those that SageMaker Debugger documents.
  #- {name: overfit-as-there, use: overfit, preset: sagemaker, params: {patience: 2}}
  # A second instance: only for runs whose labels match (* and ? match any characters), with another
  # severity (info, warning, critical), and a stop with all its options. checkpoint:
  # protect_last_good names the newest checkpoint from before the onset, save saves one at the stop
  # if the weights are finite, skip does neither. grace: the
  # time before SIGTERM, and again before SIGKILL (ms, s, m, h or d; at most 1d; default 30s). at:
  # the lowest severity at which an issue stops its run. approve: whom mode ask asks besides those
  # who are notified, and for how long.
  #- name: exploding-in-prod
  #  use: exploding_gradient
  #  match: {env: prod, team: [vision, "speech-*"]}
  #  params: {factor: 10.0}
  #  severity: critical
  #  actions:
  #    - ml-hook
  #    - stop:
  #        mode: ask
  #        at: critical
  #        checkpoint: protect_last_good
  #        grace: 30s
  #        approve: {via: vision-chat, timeout: 10m, on_timeout: skip, quorum: 1}
"""


def first_text() -> str:
    """The text of the short file: what one needs first. Pure."""
    return _FIRST


def config_text(catalogue: Catalogue | None = None) -> str:
    """The text of the full file, with the rules of the catalogue. Pure."""
    rules = list(catalogue or built_in())
    return _HEAD + "\n".join(map(_rule, rules)) + _INSTANCE


def write_config(path: Path, *, full: bool = False) -> None:
    """Write the short file, or the full one; never over another.

    Raises:
        ConfigurationError: there is one, or it cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(config_text() if full else first_text())
    except FileExistsError:
        raise ConfigurationError(
            f"{path} already exists; nothing was written. Try another name: "
            f"tocsin init {path.with_stem(path.stem + '-new')}"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror or error}") from error


def uncomment(text: str) -> str:
    """The text with all examples in use."""
    return EXAMPLE.sub(r"\1", text)


def severity_text(rule: type[AnyRule]) -> str:
    """How grave its issues are, and whether they stop a run by default."""
    meta = rule.meta
    text = f"Severity: {meta.severity}"
    if meta.stop_worthy:
        text += "; stops the run" if meta.severity == "critical" else "; if critical, stops the run"
    return text + "."


def _rule(rule: type[AnyRule]) -> str:
    """A rule with its parameters at their defaults."""
    meta = rule.meta
    about = f"{meta.name}: {meta.meaning} {severity_text(rule)}"
    lines = [*_prose(about), f"  #- name: {meta.name}"]
    fields = field_texts(meta.params)
    if fields:
        lines.append("  #  params:")
    values = [f"  #    {field.key}: {field.default or 'null'}" for field in fields]
    width = max(map(len, values), default=0)
    for field, value in zip(fields, values, strict=True):
        unit = f" ({field.unit})" if field.unit else ""
        lines += _beside(value.ljust(width + 2) + "# ", f"{field.meaning}{unit}")
    # A list of actions would end the default of a rule that stops only by its critical issues.
    if not meta.stop_worthy:
        lines.append("  #  actions: [ml-hook]")
    elif meta.severity == "critical":
        lines.append("  #  actions: [stop, ml-hook]")
    return "".join(f"{line}\n" for line in lines)


def _prose(text: str) -> Iterable[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="  # ", subsequent_indent="  # ")


def _beside(before: str, text: str) -> Iterator[str]:
    """A comment behind a value, going on below where it is long."""
    rest = "  #" + " " * (len(before) - 5) + "# "
    yield from textwrap.wrap(text, _WIDTH, initial_indent=before, subsequent_indent=rest)
