"""`tocsin init`: a configuration with examples in comments, of what is needed first or of all.

A comment that begins with "# " explains; any other is an example, which works once its "#" is
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
# What tocsin watches, whom it tells and what it may stop. Nothing here is needed: as it stands,
# this file changes nothing, and all rules run at their defaults.
#
# A line that begins with "# " explains. One that begins with "#" and anything else is an example:
# remove the "#" to use it. An example may use names from examples above it.
#
# What is wrong with this file, or what holds with it:  tocsin check
# All keys and all rules, as examples like these:       tocsin init --full everything.yaml
version: 1

# Labels of each run. Rules can match them; --label adds to them.
labels:
  #team: vision

# Secrets have a name here and their value in a file or a variable of the environment.
secrets:
  #mail-password: {env: TOCSIN_MAIL_PASSWORD}
  #slack-url: {file: secrets/slack-url}

# What the parts of tocsin talk over. Default: embedded:.tocsin/bus.db, one file, no server. With
# Kafka, `tocsin rules` and `tocsin actions` run as workers for all machines.
bus:
  #url: kafka://kafka-1:9092,kafka-2:9092

# Whom issues are sent to. `tocsin run --notify URL|ADDRESS` adds one for a single run.
receivers:
  # A mail through the server of TOCSIN_SMTP (smtp://USER:PASSWORD@HOST:PORT), or one of its own.
  #ml-mail: {type: email, to: [me@example.com]}
  #vision-mail:
  #  type: email
  #  to: [vision@example.com]
  #  smtp: {host: mail.example.com, username: tocsin, password: {secret: mail-password}}
  # A message to Slack, Discord, Telegram and others; the URL is a secret.
  #ml-chat: {type: chat, url: {secret: slack-url}}
  # A webhook posts each issue as a CloudEvent.
  #ml-hook: {type: webhook, url: "https://hooks.example.com/ml"}

# What is done about the issues of a rule, beside the line on the terminal: stop, and names of
# receivers. The list alone decides. A rule that is not listed runs at its defaults. All rules:
# tocsin catalog list; one with its parameters: tocsin catalog show nonfinite
rules:
  # NaN or infinity in the loss, a gradient or a weight. Stops the run by default.
  #- nonfinite: [stop, ml-mail]
  # The loss is far above where it was. Stops the run by default once that is critical.
  #- loss_diverged: [stop, ml-mail]
  # Issues that never stop a run by themselves: whom to tell.
  #- exploding_gradient: [ml-mail]
  #- stalled_training: [ml-mail]
  # Parameters and severity of a rule.
  #- name: loss_spike
  #  params: {k: 12.0}
  #  severity: info
  #  actions: [ml-mail]
  # A rule that shall not run.
  #- overtraining: off
"""

_HEAD: Final = """\
# What tocsin watches, whom it tells and what it may stop. Nothing here is needed: what a key is not
# given for holds as it stands in the comments.
#
# A line that begins with "# " explains. One that begins with "#" and anything else is an example:
# remove the "#" to use it. An example may use names from examples above it.
#
# `tocsin check` says what is wrong with this file, or what holds with it. docs/config.md has all
# keys one by one. For completion in an editor: tocsin schema > tocsin.schema.json, and as the first
# line here: # yaml-language-server: $schema=tocsin.schema.json
version: 1

# Labels of each run; TOCSIN_LABELS and --label add to them. Rules can match them.
labels:
  #env: prod
  #team: vision

# The only place where secrets are named; elsewhere {secret: NAME} stands for the value. The value
# comes from a file or from a variable of the environment, never from here.
secrets:
  # A relative path starts at the folder of this file. One line break at the end is left out.
  #kafka-password: {file: secrets/kafka-password}
  # optional: what uses it goes without where it is missing. Default: false.
  #hook-url: {env: TOCSIN_HOOK_URL, optional: true}
  #hook-key: {env: TOCSIN_HOOK_KEY}
  #hook-key-before: {env: TOCSIN_HOOK_KEY_BEFORE, optional: true}
  #mail-password: {env: TOCSIN_MAIL_PASSWORD}
  #slack-url: {env: TOCSIN_SLACK_URL}

# What all parts of tocsin talk over: one SQLite file (embedded:PATH, no server, one machine) or
# Kafka (a fleet). Default: embedded:.tocsin/bus.db; --bus and TOCSIN_BUS come before this.
bus:
  # First part of the topics' names: one per team.
  #prefix: tocsin
  # Kafka, with `tocsin rules` and `tocsin actions` as workers. sasl: PLAIN, SCRAM-SHA-256 or
  # SCRAM-SHA-512. tls: {} takes the system's authorities.
  #url: kafka://kafka-1:9092,kafka-2:9092
  #sasl: {mechanism: SCRAM-SHA-512, username: tocsin, password: {secret: kafka-password}}
  #tls: {ca: tls/ca.pem, certificate: tls/client.pem, key: tls/client.key}

# What the training process records.
capture:
  # What it may cost, as a share of the step time: 0.01% to 100%. It decides how often collections
  # with `every: auto` are summarised.
  #budget: 0.5%
  # What is summarised, and when. The kinds are losses, gradients, weights, activations and
  # optimizer_state, and biases and inputs, which are off until they are named here. every: each
  # n-th step from start on, or auto (default); end: the first step that is left out again; steps:
  # steps that are summarised in any case, without `every` only those; columns: those that are
  # computed. This holds for training; modes: likewise for eval and predict, where activations and
  # inputs count batches, and global: for each mode that is not named. A collection with a name of
  # your own says what it is made of, and which tensors belong to it: by regular expressions that
  # are found in their names (match), by the classes of their modules, or by name.
  #collections:
  #  gradients: {every: 10, columns: [l2, absmax]}
  #  weights: {every: 100, start: 1000, end: 2000, steps: [0, 1]}
  #  activations: off
  #  losses: {modes: {eval: off}}
  #  inputs: {steps: [1, 500]}
  #  heads: {of: weights, match: "(query|key)", module_types: Embedding, tensors: [head.weight]}
  # How often the node is sampled (100ms to 60s), and folders whose free disk space is sampled
  # beside the job's working folder.
  #system: {interval: 500ms, folders: [/data]}

# What holds where a rule says nothing else.
defaults:
  # Whether rules that are not listed below run: all or none.
  #rules: all
  # What a stop does: enforce stops the job.
  #mode: enforce

# Whom issues are sent to, by name. `tocsin run --notify URL|ADDRESS` adds one for a single run.
receivers:
  # A mail with a picture of what decided the issue. The server is that of TOCSIN_SMTP
  # (smtp://USER:PASSWORD@HOST:PORT), else the one of this machine.
  #ml-mail: {type: email, to: [vision@example.com]}
  # With all that can be said. starttls: encrypt, or do not send (default, except on this machine);
  # tls: encrypt from the first byte. send_resolved: whether to tell, too, when an issue is over
  # (default true; each kind of receiver has it).
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
  #  retry: {give_up_after: 24h}
  # A chat message: slack://TOKEN_A/TOKEN_B/TOKEN_C, discord://ID/TOKEN, tgram://BOT_TOKEN/CHAT_ID
  # and others; or the webhook URL that Slack or Discord give. Such a URL is a secret.
  #vision-chat: {type: chat, url: {secret: slack-url}}
  # A short message through AWS SNS, and a call of an AWS Lambda function, with the machine's AWS
  # credentials.
  #on-call: {type: sms, to: ["+4915112345678"], region: eu-central-1, sender_id: tocsin}
  #ml-lambda: {type: lambda, function: ml-alerts, region: eu-central-1}
  # A webhook posts each issue as a CloudEvent.
  #ml-hook: {type: webhook, url: "https://hooks.example.com/ml"}
  # With all that can be said: the URL from a secret, headers, a signature (Standard Webhooks; the
  # key before is used beside the new one while it is being replaced), and how long to try (ms, s,
  # m, h or d; default 24h).
  #signed-hook:
  #  type: webhook
  #  url: {secret: hook-url}
  #  headers: {x-team: vision}
  #  sign: {scheme: standard, key: {secret: hook-key}, previous_key: {secret: hook-key-before}}
  #  retry: {give_up_after: 24h}

# Whose stop commands a training process obeys: files of public keys. Default: those in tocsin's key
# folder, ~/.config/tocsin/keys.
stop:
  #trusted_keys: [keys/actions.pub]

# Rules, each with what is done about its issues beside the line on the terminal: stop, and names of
# receivers. The list alone decides; without one a run is stopped where it says so below. Forms:
# "- RULE: [stop, RECEIVER]", "- RULE: off", and with all keys as below, where the values are the
# defaults.
rules:
"""

_INSTANCE: Final = """
  # With a preset, parameters to begin with: sagemaker has what SageMaker Debugger documents.
  #- {name: overfit-as-there, use: overfit, preset: sagemaker, params: {patience: 2}}
  # A further instance: only for runs whose labels match (* and ? stand for any characters), with
  # another severity (info, warning, critical), and a stop with all its options. checkpoint:
  # protect_last_good names the newest checkpoint from before the onset, skip does not. grace: the
  # time between asking, SIGTERM and SIGKILL (ms, s, m, h or d; 1d at most; default 30s). at: the
  # severity from which an issue stops its run.
  #- name: exploding-in-prod
  #  use: exploding_gradient
  #  match: {env: prod, team: [vision, "speech-*"]}
  #  params: {factor: 10.0}
  #  severity: critical
  #  actions:
  #    - ml-hook
  #    - stop: {mode: enforce, at: critical, checkpoint: protect_last_good, grace: 30s}
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
