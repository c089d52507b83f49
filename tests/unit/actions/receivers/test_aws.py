"""SMS, Lambda, SQS and EventBridge, against moto and botocore's Stubber."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest
from botocore import exceptions
from botocore.stub import ANY, Stubber
from hypothesis import given
from hypothesis import strategies as st
from moto import mock_aws
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.sns.models import sns_backends

from support.actions.notices import attempted, notice, state
from support.records.issues import issue
from support.servers.stubbed_aws import stubbed_session
from tocsin.actions.decision.retry import Outcome
from tocsin.actions.delivery.receiver_queues import ReceiverQueue
from tocsin.actions.receivers.address_guard import AddressGuard
from tocsin.actions.receivers.aws import AwsSender, AwsTarget, Service, make_client
from tocsin.actions.receivers.chat.apprise_process import AppriseProcess
from tocsin.actions.receivers.cloudwatch.config import CloudWatchReceiver
from tocsin.actions.receivers.cloudwatch.kind import log_event, put_log_event
from tocsin.actions.receivers.eventbridge.kind import put_event
from tocsin.actions.receivers.lambda_function.kind import invoke
from tocsin.actions.receivers.message import message_of
from tocsin.actions.receivers.sms.sender import (
    MAX_PARTS,
    SmsSender,
    SmsTarget,
    parts,
    septets,
    sms_text,
)
from tocsin.actions.receivers.sqs.kind import send_message

NUMBERS = ("+4915112345678", "+14155550100")
ONE = SmsTarget(name="sms", to=NUMBERS[:1], region="eu-central-1", sender_id="tocsin")
BOTH = SmsTarget(name="sms", to=NUMBERS, region="eu-central-1")
FUNCTION = AwsTarget(
    service="lambda", region="eu-central-1", request=partial(invoke, "ml-alerts:live")
)
EVENTS = AwsTarget(service="events", region="eu-central-1", request=partial(put_event, "ml"))

UNUSED = AppriseProcess(AddressGuard(private=False), command=("/bin/false",))
"""SNS needs none."""


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An AWS of the tests' own."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "planted-SECRET-aws")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    with mock_aws():
        yield


class Stubbed:
    """Makes clients whose answers are given."""

    def __init__(self) -> None:
        self.client: Any = None
        self.stubber: Any = None

    def expect(self, service: Service) -> Any:
        self.client = stubbed_session().client(service, region_name="eu-central-1")
        self.stubber = Stubber(self.client)
        self.stubber.activate()
        return self.stubber

    def __call__(self, service: Service, region: str | None) -> Any:
        return self.client


async def test_a_short_message_reaches_each_number(aws: None) -> None:
    outcome = await SmsSender(UNUSED).send(BOTH, notice(issue(), kind="sms"))

    assert outcome.done == "accepted by SNS for 2 numbers"
    sent = {m[1]: m[2] for m in _sent()}
    assert set(sent) == set(NUMBERS)
    text = sent[NUMBERS[0]]
    assert text == "tocsin CRITICAL run-1: NaN in the loss at step 1. Step 3."


def _sent() -> list[tuple[str, str, str]]:
    backend = sns_backends[DEFAULT_ACCOUNT_ID]["eu-central-1"]
    return [
        (message_id, number, message)
        for message_id, (number, message) in backend.sms_messages.items()
    ]


async def test_a_repeat_goes_only_to_numbers_that_were_not_reached() -> None:
    stubbed = Stubbed()
    stubber = stubbed.expect("sns")
    good = {"MessageId": "1", "ResponseMetadata": {"HTTPStatusCode": 200}}

    def asked(number: str) -> dict[str, Any]:
        return {"PhoneNumber": number, "Message": ANY, "MessageAttributes": ANY}

    stubber.add_response("publish", good, asked(NUMBERS[0]))
    stubber.add_client_error(
        "publish", "Throttling", "SECRET", 400, expected_params=asked(NUMBERS[1])
    )
    stubber.add_response("publish", good, asked(NUMBERS[1]))
    sender = SmsSender(UNUSED, stubbed)
    first = await sender.send(BOTH, notice(issue(), kind="sms"))
    assert first == Outcome(later="accepted for 1 of 2 numbers; 400 Throttling")
    second = await sender.send(BOTH, notice(issue(), kind="sms"))
    assert second == Outcome(done="accepted by SNS for 2 numbers")
    stubber.assert_no_pending_responses()


@pytest.mark.parametrize(
    ("code", "status", "wanted"),
    [
        ("Throttling", 400, "pending"),
        ("TooManyRequestsException", 429, "pending"),
        ("InternalError", 500, "pending"),
        ("ExpiredToken", 403, "pending"),
        ("ExpiredTokenException", 400, "pending"),
        ("RequestExpired", 400, "pending"),
        ("RequestTimeout", 400, "pending"),
        ("RequestTimeoutException", 400, "pending"),
        ("PriorRequestNotComplete", 400, "pending"),
        ("LimitExceededException", 400, "pending"),
        ("BandwidthLimitExceeded", 400, "pending"),
        ("ProvisionedThroughputExceededException", 400, "pending"),
        ("ResourceConflictException", 409, "pending"),
        ("AuthorizationError", 403, "rejected"),
        ("InvalidParameter", 400, "rejected"),
        ("OptedOut", 400, "rejected"),
    ],
)
async def test_refusals_are_final_unless_they_say_later(
    code: str, status: int, wanted: str
) -> None:
    for service, operation in (("sns", "publish"), ("lambda", "invoke")):
        stubbed = Stubbed()
        stubbed.expect(service).add_client_error(operation, code, "SECRET words", status)  # type: ignore[arg-type]
        outcome = await (
            SmsSender(UNUSED, stubbed).send(ONE, notice(issue(), kind="sms"))
            if service == "sns"
            else AwsSender(stubbed).send(FUNCTION, notice(issue(), kind="lambda"))
        )
        assert state(outcome) == wanted
        assert outcome.text() == f"{status} {code}"


@pytest.mark.parametrize(
    ("error", "wanted", "text"),
    [
        (exceptions.NoCredentialsError(), "pending", "no AWS credentials"),
        (exceptions.NoRegionError(), "rejected", "AWS_DEFAULT_REGION"),
        (exceptions.ConnectTimeoutError(endpoint_url="https://SECRET"), "pending", "timeout"),
        (exceptions.EndpointConnectionError(endpoint_url="SECRET"), "pending", "no connection"),
        (exceptions.ProfileNotFound(profile="SECRET"), "pending", "ProfileNotFound"),
        (OSError("SECRET"), "pending", "OSError"),
    ],
)
async def test_failures_before_an_answer_are_told_in_our_words(
    error: Exception, wanted: str, text: str
) -> None:
    def broken(service: Service, region: str | None) -> Any:
        raise error

    for outcome in (
        await SmsSender(UNUSED, broken).send(ONE, notice(issue(), kind="sms")),
        await AwsSender(broken).send(FUNCTION, notice(issue(), kind="lambda")),
    ):
        assert state(outcome) == wanted
        assert text in outcome.text()
        assert "SECRET" not in outcome.text()


async def test_a_function_is_called_with_the_cloud_event() -> None:
    stubbed = Stubbed()
    given = notice(issue(), kind="lambda")
    seen: list[dict[str, Any]] = []
    stubbed.expect("lambda").add_response(
        "invoke",
        {"StatusCode": 202},
        {"FunctionName": "ml-alerts:live", "InvocationType": "Event", "Payload": ANY},
    )
    stubbed.client.meta.events.register(
        "provide-client-params.lambda.Invoke", lambda params, **_: seen.append(params)
    )
    outcome = await AwsSender(stubbed).send(FUNCTION, given)

    assert outcome == Outcome(status=202, phrase="Accepted")
    event = json.loads(seen[0]["Payload"])
    assert event["type"] == "tocsin.issue.firing"
    assert event["deliveryid"] == given.delivery.delivery_id
    assert event["data"]["reason"] == "NaN in the loss at step 1"


def queue_target(url: str) -> AwsTarget:
    return AwsTarget(service="sqs", region="eu-central-1", request=partial(send_message, url))


@pytest.mark.parametrize("fifo", [False, True])
async def test_a_queue_gets_the_cloud_event(aws: None, fifo: bool) -> None:
    client: Any = make_client("sqs", "eu-central-1")
    options = {"QueueName": "q.fifo", "Attributes": {"FifoQueue": "true"}}
    url = client.create_queue(**(options if fifo else {"QueueName": "q"}))["QueueUrl"]
    given = notice(issue(), kind="sqs")
    for _ in range(2):
        assert (await AwsSender().send(queue_target(url), given)).text() == "200 OK"

    found = client.receive_message(
        QueueUrl=url, MaxNumberOfMessages=10, MessageSystemAttributeNames=["All"]
    )["Messages"]
    client.close()
    assert len(found) == (1 if fifo else 2), "a FIFO queue drops a repeat"
    event = json.loads(found[0]["Body"])
    assert (event["type"], event["deliveryid"]) == (
        "tocsin.issue.firing",
        given.delivery.delivery_id,
    )
    assert found[0]["Attributes"].get("MessageGroupId") == ("run-1" if fifo else None)


async def test_a_queue_that_is_not_there_is_final(aws: None) -> None:
    url = "https://sqs.eu-central-1.amazonaws.com/123456789012/none"
    outcome = await AwsSender().send(queue_target(url), notice(issue(), kind="sqs"))
    assert state(outcome) == "rejected"
    assert outcome.text() == "400 AWS.SimpleQueueService.NonExistentQueue"


async def test_an_event_bus_gets_the_cloud_event(aws: None) -> None:
    seen: list[dict[str, Any]] = []

    def make(service: Service, region: str | None) -> Any:
        client: Any = make_client(service, region)
        client.create_event_bus(Name="ml")
        client.meta.events.register(
            "provide-client-params.events.PutEvents", lambda params, **_: seen.append(params)
        )
        return client

    assert (await AwsSender(make).send(EVENTS, notice(issue()))).text() == "200 OK"
    (entry,) = seen[0]["Entries"]
    assert (entry["EventBusName"], entry["Source"]) == ("ml", "tocsin")
    assert entry["DetailType"] == "tocsin.issue.firing"
    assert json.loads(entry["Detail"])["data"]["reason"] == "NaN in the loss at step 1"


@pytest.mark.parametrize(
    ("code", "status", "wanted"),
    [
        ("ThrottlingException", 400, "pending"),
        ("InternalFailure", 500, "pending"),
        ("MalformedDetail", 400, "rejected"),
    ],
)
async def test_an_entry_that_failed_is_no_delivery(code: str, status: int, wanted: str) -> None:
    stubbed = Stubbed()
    answer = {"FailedEntryCount": 1, "Entries": [{"ErrorCode": code, "ErrorMessage": "SECRET"}]}
    stubbed.expect("events").add_response("put_events", answer)
    outcome = await AwsSender(stubbed).send(EVENTS, notice(issue()))
    assert (state(outcome), outcome.text()) == (wanted, f"{status} {code}")


LOGS = CloudWatchReceiver(type="cloudwatch", log_group="/ml/alerts", namespace="ml")
LOG_GROUP = AwsTarget(service="logs", region="eu-central-1", request=partial(put_log_event, LOGS))


async def test_a_log_group_gets_an_event_that_is_a_metric(aws: None) -> None:
    client: Any = make_client("logs", "eu-central-1")
    missing = await AwsSender().send(LOG_GROUP, notice(issue()))
    assert (state(missing), missing.text()) == ("rejected", "400 ResourceNotFoundException")
    client.create_log_group(logGroupName="/ml/alerts")
    # moto refuses what is older than 14 days, as CloudWatch does.
    now_ms = int(datetime.now(UTC).timestamp() * 1000)
    for made in (notice(issue()), notice(issue(resolved=True))):
        current = made.delivery.model_copy(update={"created_ms": now_ms})
        outcome = await AwsSender().send(LOG_GROUP, replace(made, delivery=current))
        assert outcome.text() == "200 OK"

    events = client.get_log_events(logGroupName="/ml/alerts", logStreamName="tocsin")["events"]
    client.close()
    fired, resolved = (json.loads(one["message"]) for one in events)
    (metrics,) = fired["_aws"]["CloudWatchMetrics"]
    assert metrics == {
        "Namespace": "ml",
        "Dimensions": [[], ["rule", "severity"]],
        "Metrics": [{"Name": "Issues", "Unit": "Count"}],
    }
    # All that the format refers to is at the top of the event, and the metric is a number.
    assert (fired["Issues"], fired["rule"], fired["severity"]) == (1, "nonfinite", "critical")
    assert fired["event"]["deliveryid"] == notice(issue()).delivery.delivery_id
    assert resolved["IssuesResolved"] == 1
    assert "Issues" not in resolved


async def test_an_event_that_the_log_group_refused_is_no_delivery() -> None:
    stubbed = Stubbed()
    refused = {"rejectedLogEventsInfo": {"tooOldLogEventEndIndex": 1}}
    stubbed.expect("logs").add_response("put_log_events", refused)
    outcome = await AwsSender(stubbed).send(LOG_GROUP, notice(issue()))
    assert (state(outcome), outcome.text()) == ("rejected", "400 RejectedLogEvent")


def test_a_run_adds_no_metric_of_its_own() -> None:
    found = issue(run="another").model_copy(update={"labels": {"_aws": "x", "rule": "x"}})
    made = log_event("ml", notice(found))
    assert isinstance(made, dict)
    assert made["rule"] == "nonfinite"
    assert isinstance(made["_aws"], dict)


def test_a_client_makes_one_attempt_for_each_call(aws: None) -> None:
    client: Any = make_client("sns", "eu-central-1")
    assert client.meta.config.retries["total_max_attempts"] == 1
    client.close()


@given(st.text(max_size=1000))
def test_any_text_fits_into_the_parts(reason: str) -> None:
    text = sms_text(message_of(issue().model_copy(update={"reason": reason})))
    assert parts(text) <= MAX_PARTS
    assert "\n" not in text


@pytest.mark.parametrize(
    ("text", "length", "count"),
    [("a" * 160, 160, 1), ("a" * 161, 161, 2), ("€" * 80, 160, 1), ("[" * 81, 162, 2)],
)
def test_parts_are_counted_as_on_the_air(text: str, length: int, count: int) -> None:
    assert (septets(text), parts(text)) == (length, count)


def test_what_the_alphabet_lacks_is_replaced() -> None:
    reason = "Gradient d\u2019\u00eatre \u2265 5 \u2014 \u0141\u00f3d\u017a \u6f22 {x}"
    text = sms_text(message_of(issue().model_copy(update={"reason": reason})))
    assert "Gradient d'etre ? 5 - ?odz ? {x}" in text


def test_a_text_in_another_alphabet_is_sent_in_its_letters() -> None:
    reason = "Градиент не является конечным числом. " * 20
    text = sms_text(message_of(issue().model_copy(update={"reason": reason})))
    assert "Градиент не является" in text
    assert (len(text), parts(text)) == (134, 2)


@pytest.mark.parametrize("code", ["AuthorizationError", "InternalFailure", "SECRET code"])
async def test_no_secret_of_an_error_is_logged_or_told(
    code: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    told = []
    calls = (("sns", "publish"), ("lambda", "invoke"), ("logs", "put_log_events"))
    for service, operation in calls:
        stubbed = Stubbed()
        stubbed.expect(service).add_client_error(operation, code, "arn:SECRET", 403)  # type: ignore[arg-type]
        sender = (
            partial(SmsSender(UNUSED, stubbed).send, ONE)
            if service == "sns"
            else partial(AwsSender(stubbed).send, FUNCTION if service == "lambda" else LOG_GROUP)
        )
        outcome = await attempted(ReceiverQueue(sender), notice(issue()))
        assert state(outcome) == "rejected"
        told.append(repr(outcome))

    # At this level botocore itself logs what it sends and gets; it is off wherever we run.
    logged = [
        caplog.handler.format(record)
        for record in caplog.records
        if record.name.startswith("tocsin") or record.levelno >= logging.INFO
    ]
    assert "SECRET" not in "\n".join([*told, *logged])
