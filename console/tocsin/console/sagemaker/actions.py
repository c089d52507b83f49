"""SageMaker Debugger's built-in actions as a stop and receivers. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from pydantic import ValidationError

from tocsin.actions.receivers.email.config import EmailReceiver
from tocsin.actions.receivers.sms.config import SmsReceiver
from tocsin.console.sagemaker.reading import Notes, Placed
from tocsin.schemas.configuration.problems import Loc
from tocsin.schemas.configuration.yaml_document import Plain

STOP: Final = "stop"
_REGION: Final = re.compile(r"\.ecr\.([a-z0-9-]+)\.amazonaws\.com")
_ADDRESS_KEYS: Final = ("endpoint", "email_address", "phone_number")


@dataclass(slots=True)
class Receivers:
    """The receivers that the actions need, by name, each once."""

    known: dict[str, dict[str, object]] = field(default_factory=dict)

    def named(self, options: dict[str, object]) -> str:
        """The name of the receiver with these options."""
        for name, other in self.known.items():
            if other == options:
                return name
        word = "mail" if options["type"] == "email" else str(options["type"])
        count = sum(other["type"] == options["type"] for other in self.known.values())
        name = f"{word}-{count + 1}" if count else word
        self.known[name] = options
        return name


def actions_of(rule: Placed, receivers: Receivers, notes: Notes) -> list[str]:
    """What is done when the rule fires: `stop` and names of receivers, each once."""
    found: list[str] = []
    image = rule.text("RuleEvaluatorImage") or ""
    region = match[1] if (match := _REGION.search(image)) else None
    for loc, action in _listed(rule, notes):
        name = _action(loc, action, region, receivers, notes)
        if name is not None and name not in found:
            found.append(name)
    if STOP in found:
        found = [STOP, *(name for name in found if name != STOP)]
    return found


def _listed(rule: Placed, notes: Notes) -> Iterator[tuple[Loc, Mapping[str, Plain]]]:
    """The actions, wherever they stand: as JSON within a text, as its libraries write it, or as a
    list."""
    parameters = rule.inner("RuleParameters")
    for placed, key in ((rule, "Actions"), (parameters, "Actions"), (parameters, "action_json")):
        if key not in placed.data:
            continue
        loc: Loc = (*placed.loc, key)
        value = placed.data[key]
        actions = _unpacked(value) if isinstance(value, str) else value
        for action in actions if isinstance(actions, list) else [actions]:
            if isinstance(action, dict):
                yield loc, action
            elif action not in (None, ""):
                notes.add(loc, "expected actions like StopTraining, Email or SMS")


def _unpacked(text: str) -> Plain:
    for candidate in (text, text.replace('\\"', '"')):
        try:
            value: Plain = json.loads(candidate)
        except ValueError:
            continue
        return value
    return text


def _action(
    loc: Loc,
    action: Mapping[str, Plain],
    region: str | None,
    receivers: Receivers,
    notes: Notes,
) -> str | None:
    nested = action.get("parameters")
    options = {**action, **nested} if isinstance(nested, dict) else dict(action)
    name = str(options.get("name") or options.get("Name") or "")
    word = re.sub("[^a-z]", "", name.lower())
    if word == "stoptraining":
        return STOP
    address = next((str(options[key]) for key in _ADDRESS_KEYS if options.get(key)), "")
    if word == "email":
        made: dict[str, object] = {"type": "email", "to": [address]}
        return _receiver(EmailReceiver, made, loc, receivers, notes)
    if word == "sms":
        made = {"type": "sms", "to": [address], **({"region": region} if region else {})}
        return _receiver(SmsReceiver, made, loc, receivers, notes)
    notes.add(loc, f"there is no action {name[:60]!r} here", "a receiver of another type: webhook")
    return None


def _receiver(
    model: type[EmailReceiver] | type[SmsReceiver],
    options: dict[str, object],
    loc: Loc,
    receivers: Receivers,
    notes: Notes,
) -> str | None:
    try:
        model.model_validate(options)
    except ValidationError:
        what = "an address like me@example.com" if options["type"] == "email" else "a phone number"
        notes.add(loc, f"the action {options['type']} has not {what}")
        return None
    return receivers.named(options)
