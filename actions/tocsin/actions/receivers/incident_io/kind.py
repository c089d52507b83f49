"""Alert sources of incident.io."""

from __future__ import annotations

from pydantic import JsonValue

from tocsin.actions.delivery.receiver_queues import Notice
from tocsin.actions.delivery.records import issue_of
from tocsin.actions.receivers.http import JsonKind, JsonTarget, bearer, http_url
from tocsin.actions.receivers.incident_io.config import IncidentIoReceiver
from tocsin.actions.receivers.kind import ReceiverContext
from tocsin.actions.receivers.message import message_for
from tocsin.schemas.configuration.settings import value_of


class IncidentIo(JsonKind[IncidentIoReceiver]):
    """Fires an alert for each issue, and resolves it with the issue."""

    config = IncidentIoReceiver
    called = "a receiver of the type incident_io"
    one_alert = True

    def shows_question(self, config: IncidentIoReceiver) -> bool:
        """Whether people see in its messages that a stop waits for their approval. The message has
        all details."""
        return True

    def target(
        self, name: str, config: IncidentIoReceiver, context: ReceiverContext
    ) -> JsonTarget | None:
        """None without its URL or token."""
        url, token = (value_of(one, context.secrets) for one in (config.url, config.token))
        if url is None or token is None:
            return None
        return JsonTarget(http_url(url, f"receiver {name!r}"), alert_event, bearer(token))


def alert_event(notice: Notice) -> JsonValue:
    """The alert event. All states of an issue have one `deduplication_key`. Pure.

    Raises:
        RecordError: the notice holds no issue.
    """
    issue, message = issue_of(notice.delivery), message_for(notice)
    return {
        "title": message.title,
        "status": "resolved" if issue.state == "resolved" else "firing",
        "description": message.markdown(),
        "deduplication_key": issue.issue_id,
        "metadata": {
            "run": message.run_id,
            "rule": issue.rule,
            "severity": issue.severity,
            "labels": dict(issue.labels),
        },
    }
