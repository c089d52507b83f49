"""Services of PagerDuty."""

from __future__ import annotations

from functools import partial

from pydantic import JsonValue, SecretStr

from tocsin.actions.delivery.receiver_queues import Notice
from tocsin.actions.delivery.records import issue_of
from tocsin.actions.receivers.http import JsonKind, JsonTarget, http_url
from tocsin.actions.receivers.kind import ReceiverContext
from tocsin.actions.receivers.message import iso_time, message_for
from tocsin.actions.receivers.pagerduty.config import PagerDutyReceiver
from tocsin.schemas.configuration.settings import value_of
from tocsin.schemas.records.deliveries import ACKNOWLEDGED
from tocsin.schemas.records.events import clip

_SUMMARY = 1024


class PagerDuty(JsonKind[PagerDutyReceiver]):
    """Triggers an alert for each issue; it is acknowledged and resolved with the issue."""

    config = PagerDutyReceiver
    called = "a receiver of the type pagerduty"
    one_alert = True
    acknowledges = True

    def shows_question(self, config: PagerDutyReceiver) -> bool:
        """Whether people see in its messages that a stop waits for their approval. The message has
        all details."""
        return True

    def target(
        self, name: str, config: PagerDutyReceiver, context: ReceiverContext
    ) -> JsonTarget | None:
        """None without its key."""
        key, url = (value_of(one, context.secrets) for one in (config.routing_key, config.url))
        if key is None or url is None:
            return None
        return JsonTarget(http_url(url, f"receiver {name!r}"), partial(event_of, key))


def event_of(routing_key: SecretStr, notice: Notice) -> JsonValue:
    """The event of the Events API v2. All states of an issue have one `dedup_key`. Pure.

    Raises:
        RecordError: the notice holds no issue.
    """
    event: dict[str, JsonValue] = {
        "routing_key": routing_key.get_secret_value(),
        "dedup_key": notice.delivery.issue_id,
    }
    if notice.delivery.occasion == ACKNOWLEDGED:
        return event | {"event_action": "acknowledge"}
    issue, message = issue_of(notice.delivery), message_for(notice)
    if issue.state == "resolved":
        return event | {"event_action": "resolve"}
    return event | {
        "event_action": "trigger",
        "client": "tocsin",
        "payload": {
            "summary": clip(f"{message.title}: {message.headline}", _SUMMARY),
            "source": message.run_id,
            "severity": issue.severity,
            "timestamp": iso_time(issue.onset_ms or notice.now_ms),
            "class": issue.rule,
            "custom_details": {row.label: row.value for row in message.rows},
        },
    }
