"""What a webhook posts: the issue in the form that its receiver reads. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote

from pydantic import JsonValue
from pydantic_core import to_json

from tocsin.actions.delivery.receiver_queues import Notice
from tocsin.actions.delivery.records import event_of, issue_of
from tocsin.actions.receivers.alertmanager.alert import annotations_of, began_ms, labels_of
from tocsin.actions.receivers.message import iso_time, message_for
from tocsin.actions.receivers.templates.fields import fields_of
from tocsin.actions.receivers.templates.template import Template

_JSON: Final = "application/json; charset=utf-8"
_NOT_OVER: Final = "0001-01-01T00:00:00Z"
"""The end of an alert that is firing: what Alertmanager itself sends."""
_AS_IS: Final = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"%')
"""What may be in a header of a CloudEvent; all else is percent-encoded there."""


@dataclass(frozen=True, slots=True)
class Body:
    """A body, with the headers that belong to it, in lower case."""

    content: bytes
    content_type: str
    headers: Mapping[str, str] = field(default_factory=dict)


BodyOf = Callable[[Notice], Body]
"""Makes the body of a notice. Raises RecordError: it can never be sent."""


def structured(notice: Notice) -> Body:
    """A CloudEvent in structured mode: all of it is in the body."""
    return Body(_json(_event(notice)), "application/cloudevents+json; charset=utf-8")


def binary(notice: Notice) -> Body:
    """A CloudEvent in binary mode: its data is the body, its attributes are headers."""
    event = _event(notice)
    headers = {
        f"ce-{name}": quote(str(value), safe=_AS_IS)
        for name, value in event.items()
        if name not in ("data", "datacontenttype")
    }
    return Body(_json(event.get("data")), _JSON, headers)


def _event(notice: Notice) -> dict[str, JsonValue]:
    """The CloudEvent; `answerurl` is where people answer."""
    event = event_of(notice.delivery)
    answer_url = notice.answer_url(notice.delivery)
    return {**event, "answerurl": answer_url} if answer_url else event


def alertmanager_v4(receiver: str, notice: Notice) -> Body:
    """What Alertmanager's own webhooks post, version 4: a group of one alert.

    Group and fingerprint are those of the issue in all its states, whatever its severity.

    Raises:
        RecordError: the notice holds no issue.
    """
    issue, message = issue_of(notice.delivery), message_for(notice)
    status = "resolved" if issue.state == "resolved" else "firing"
    labels, annotations = labels_of(issue, issue.severity), annotations_of(message)
    over_ms = min(issue.at_ms or notice.now_ms, notice.now_ms)
    alert: dict[str, JsonValue] = {
        "status": status,
        "labels": labels,
        "annotations": annotations,
        "startsAt": iso_time(began_ms(issue, notice.now_ms)),
        "endsAt": iso_time(over_ms) if status == "resolved" else _NOT_OVER,
        "generatorURL": "",
        "fingerprint": hashlib.sha256(issue.issue_id.encode()).hexdigest()[:16],
    }
    group: dict[str, JsonValue] = {
        "version": "4",
        "groupKey": f'{{}}:{{issue="{issue.issue_id}"}}',
        "truncatedAlerts": 0,
        "status": status,
        "receiver": receiver,
        "groupLabels": {"issue": issue.issue_id},
        "commonLabels": labels,
        "commonAnnotations": annotations,
        "externalURL": "",
        "alerts": [alert],
    }
    return Body(_json(group), _JSON)


def templated(template: Template, content_type: str, notice: Notice) -> Body:
    """A body of the user's own.

    Raises:
        RecordError: the notice holds no issue, or one that the template cannot be filled with.
    """
    return Body(template.fill(fields_of(notice)).encode(errors="replace"), content_type)


def _json(value: object) -> bytes:
    return to_json(value, inf_nan_mode="constants")
