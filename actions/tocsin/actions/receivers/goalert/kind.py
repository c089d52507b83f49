"""Services of GoAlert."""

from __future__ import annotations

from pydantic import JsonValue

from tocsin.actions.delivery.receiver_queues import Notice
from tocsin.actions.delivery.records import issue_of
from tocsin.actions.receivers.goalert.config import GoAlertReceiver
from tocsin.actions.receivers.http import JsonKind, JsonTarget, http_url
from tocsin.actions.receivers.kind import ReceiverContext
from tocsin.actions.receivers.message import message_for
from tocsin.schemas.configuration.settings import value_of


class GoAlert(JsonKind[GoAlertReceiver]):
    """Opens an alert for each issue, and closes it with the issue."""

    config = GoAlertReceiver
    called = "a receiver of the type goalert"
    one_alert = True

    def shows_question(self, config: GoAlertReceiver) -> bool:
        """Whether people see in its messages that a stop waits for their approval. The message has
        all details."""
        return True

    def target(
        self, name: str, config: GoAlertReceiver, context: ReceiverContext
    ) -> JsonTarget | None:
        """None without its URL."""
        url = value_of(config.url, context.secrets)
        return None if url is None else JsonTarget(http_url(url, f"receiver {name!r}"), alert_of)


def alert_of(notice: Notice) -> JsonValue:
    """The alert. All states of an issue have one `dedup`. Pure.

    Raises:
        RecordError: the notice holds no issue.
    """
    issue, message = issue_of(notice.delivery), message_for(notice)
    alert: dict[str, JsonValue] = {
        "summary": message.title,
        "details": message.markdown(),
        "dedup": issue.issue_id,
    }
    return alert | {"action": "close"} if issue.state == "resolved" else alert
