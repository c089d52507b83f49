"""Alertmanagers."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Final

from pydantic import JsonValue, SecretStr

from tocsin.actions.delivery.receiver_queues import Notice
from tocsin.actions.delivery.records import issue_of
from tocsin.actions.receivers.alertmanager.alert import annotations_of, began_ms, labels_of
from tocsin.actions.receivers.alertmanager.config import AlertmanagerReceiver
from tocsin.actions.receivers.http import JsonKind, JsonTarget, bearer, http_url
from tocsin.actions.receivers.kind import ReceiverContext
from tocsin.actions.receivers.message import iso_time, message_for
from tocsin.schemas.configuration.settings import value_of
from tocsin.schemas.records.issues import SEVERITIES

_PATH: Final = "/api/v2/alerts"


class Alertmanager(JsonKind[AlertmanagerReceiver]):
    """Sends an alert for each issue, and its end with the issue's."""

    config = AlertmanagerReceiver
    called = "a receiver of the type alertmanager"
    one_alert = True

    def shows_question(self, config: AlertmanagerReceiver) -> bool:
        """Whether people see in its messages that a stop waits for their approval. The message has
        all details."""
        return True

    def target(
        self, name: str, config: AlertmanagerReceiver, context: ReceiverContext
    ) -> JsonTarget | None:
        """None without its URL."""
        url = value_of(config.url, context.secrets)
        if url is None:
            return None
        token = value_of(config.token, context.secrets)
        base = http_url(url, f"receiver {name!r}").get_secret_value().rstrip("/")
        expires_ms = config.expires_after // timedelta(milliseconds=1)
        headers = {} if token is None else bearer(token)
        return JsonTarget(SecretStr(base + _PATH), partial(alerts_of, expires_ms), headers)


def alerts_of(expires_ms: int, notice: Notice) -> JsonValue:
    """The alert in its severity, and its end in all others. Pure.

    Alertmanager identifies an alert by its labels, and routes it by its severity, which is one of
    them. So an issue that gets more severe is another alert, and the one before ends. Alertmanager
    notifies nobody of the end of an alert that never fired.

    Raises:
        RecordError: the notice holds no issue.
    """
    issue, message = issue_of(notice.delivery), message_for(notice)

    def alert(severity: str) -> JsonValue:
        firing = issue.state != "resolved" and severity == issue.severity
        return {
            "labels": labels_of(issue, severity),
            "annotations": annotations_of(message),
            "startsAt": iso_time(began_ms(issue, notice.now_ms)),
            "endsAt": iso_time(notice.now_ms + expires_ms if firing else notice.now_ms),
        }

    return [alert(severity) for severity in SEVERITIES]
