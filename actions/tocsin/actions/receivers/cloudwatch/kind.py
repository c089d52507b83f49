"""Log groups of AWS CloudWatch."""

from __future__ import annotations

import contextlib
import json
from functools import partial
from typing import Any, Final

from pydantic import JsonValue

from tocsin.actions.delivery.receiver_queues import Notice
from tocsin.actions.delivery.records import issue_of
from tocsin.actions.receivers.aws import AwsKind, AwsTarget, event_of, status_of
from tocsin.actions.receivers.cloudwatch.config import CloudWatchReceiver
from tocsin.actions.receivers.kind import ReceiverContext

FIRED: Final = "Issues"
RESOLVED: Final = "IssuesResolved"


class CloudWatch(AwsKind[CloudWatchReceiver]):
    """Writes each issue to a log group."""

    config = CloudWatchReceiver
    called = "a receiver of the type cloudwatch"

    def target(self, name: str, config: CloudWatchReceiver, context: ReceiverContext) -> AwsTarget:
        """The log group."""
        return AwsTarget(
            service="logs", region=config.region, request=partial(put_log_event, config)
        )


def log_event(namespace: str, notice: Notice) -> JsonValue:
    """The event in CloudWatch's embedded metric format: one call writes it and counts it. Pure.

    The metric is there in all, and by rule and severity; not by run, since each combination of
    dimensions is a metric of its own, which is paid for.

    Raises:
        RecordError: the notice holds no issue.
    """
    issue = issue_of(notice.delivery)
    metric = RESOLVED if issue.state == "resolved" else FIRED
    return {
        "_aws": {
            "Timestamp": notice.delivery.created_ms,
            "CloudWatchMetrics": [
                {
                    "Namespace": namespace,
                    "Dimensions": [[], ["rule", "severity"]],
                    "Metrics": [{"Name": metric, "Unit": "Count"}],
                }
            ],
        },
        metric: 1,
        "rule": issue.rule,
        "severity": issue.severity,
        "state": issue.state,
        "run": issue.run_id,
        "reason": issue.reason,
        "event": event_of(notice),
    }


def put_log_event(config: CloudWatchReceiver, client: Any, notice: Notice) -> int:
    """Write the event; blocks."""
    from botocore.exceptions import ClientError

    place = {"logGroupName": config.log_group, "logStreamName": config.log_stream}
    event = {
        "timestamp": notice.delivery.created_ms,
        "message": json.dumps(log_event(config.namespace, notice), separators=(",", ":")),
    }
    try:
        answer = client.put_log_events(**place, logEvents=[event])
    except client.exceptions.ResourceNotFoundException:
        # Another worker may be faster.
        with contextlib.suppress(client.exceptions.ResourceAlreadyExistsException):
            client.create_log_stream(**place)
        answer = client.put_log_events(**place, logEvents=[event])
    if answer.get("rejectedLogEventsInfo"):
        # The call is a success, and its only event is not: it is too old for the group.
        refused = {
            "Error": {"Code": "RejectedLogEvent"},
            "ResponseMetadata": {"HTTPStatusCode": 400},
        }
        raise ClientError(refused, "PutLogEvents")
    return status_of(answer)
