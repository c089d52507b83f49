"""On-call services: what each is posted, in its documented shape, and what its answers mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from support.actions.notices import attempted, notice
from support.records.issues import issue
from support.servers.fault_server import fault_server
from tocsin.actions.decision.retry import Outcome
from tocsin.actions.delivery.receiver_queues import ReceiverQueue
from tocsin.actions.receivers.address_guard import AddressGuard
from tocsin.actions.receivers.build import Receivers
from tocsin.actions.receivers.kind import ReceiverContext
from tocsin.actions.receivers.registry import ReceiverKinds
from tocsin.schemas.configuration.file import SectionRegistry, check_config
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.issues import IssueFiring

SECRETS = {"key": SecretStr("planted-SECRET-key")}
KINDS = {
    "pagerduty": "routing_key: {secret: key}, url: 'URL'",
    "incident_io": "token: {secret: key}, url: 'URL'",
    "goalert": "url: 'URL?token=planted-SECRET-key'",
    "alertmanager": "token: {secret: key}, url: 'URL'",
}
EVIL = "[x](http://evil) ![y](http://evil) @all ```\nz"


def receivers() -> Receivers:
    context = ReceiverContext(
        secrets=SECRETS, guard=AddressGuard(private=True), folder=Path(), environ={}
    )
    return Receivers(context, ReceiverKinds())


def queue(opened: Receivers, kind: str, url: str) -> ReceiverQueue:
    options = KINDS[kind].replace("URL", url)
    text = (
        f"version: 1\nsecrets: {{key: {{env: K}}}}\nreceivers: {{a: {{type: {kind}, {options}}}}}"
    )
    config, problems = check_config(text, "f", SectionRegistry(ReceiverKinds()))
    assert config is not None, problems
    return opened.open(config.receivers)["a"]


async def post(kind: str, found: IssueFiring, path: str = "/status/202") -> tuple[Outcome, Any]:
    """What came of one attempt, and the request."""
    opened = receivers()
    async with fault_server() as server:
        outcome = await attempted(queue(opened, kind, server.url(path)), notice(found, kind=kind))
        await opened.close()
        return outcome, server.seen[0]


async def test_pagerduty_triggers_and_resolves_one_alert_per_issue() -> None:
    outcome, fired = await post("pagerduty", issue())
    assert outcome.text() == "202 Accepted"
    body = json.loads(fired.body)
    payload = body.pop("payload")
    assert body == {
        "routing_key": "planted-SECRET-key",
        "event_action": "trigger",
        "dedup_key": issue().issue_id,
        "client": "tocsin",
    }
    assert payload["summary"] == "critical: nonfinite in run-1 at step 3: NaN in the loss at step 1"
    assert (payload["source"], payload["severity"]) == ("run-1", "critical")
    assert payload["class"] == "nonfinite"
    assert payload["timestamp"].endswith("+00:00")
    assert payload["custom_details"]["Run"] == "run-1"
    _, over = await post("pagerduty", issue(resolved=True))
    assert json.loads(over.body) == {
        "routing_key": "planted-SECRET-key",
        "event_action": "resolve",
        "dedup_key": issue().issue_id,
    }


async def test_incident_io_fires_and_resolves_one_alert_per_issue() -> None:
    _, fired = await post("incident_io", issue())
    assert fired.headers["authorization"] == "Bearer planted-SECRET-key"
    body = json.loads(fired.body)
    assert (body["status"], body["deduplication_key"]) == ("firing", issue().issue_id)
    assert body["title"] == "critical: nonfinite in run-1 at step 3"
    assert body["metadata"] == {
        "run": "run-1",
        "rule": "nonfinite",
        "severity": "critical",
        "labels": {},
    }
    _, over = await post("incident_io", issue(resolved=True))
    body = json.loads(over.body)
    assert (body["status"], body["deduplication_key"]) == ("resolved", issue().issue_id)


async def test_goalert_opens_and_closes_one_alert_per_issue() -> None:
    outcome, fired = await post("goalert", issue(), "/status/204")
    assert outcome.text() == "204 No Content"
    body = json.loads(fired.body)
    assert set(body) == {"summary", "details", "dedup"}
    assert body["dedup"] == issue().issue_id
    assert fired.path.endswith("?token=planted-SECRET-key")
    _, over = await post("goalert", issue(resolved=True), "/status/204")
    assert json.loads(over.body)["action"] == "close"


@pytest.mark.parametrize("kind", ["incident_io", "goalert"])
async def test_markdown_of_a_run_stays_text(kind: str) -> None:
    _, request = await post(kind, issue().model_copy(update={"reason": EVIL}))
    body = json.loads(request.body)
    details = body.get("details", body.get("description"))
    assert details.startswith("```\n")
    assert details.endswith("\n```\n")
    assert "`" not in details[4:-4]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("path", "meaning"),
    [
        ("/status/200", "done"),
        ("/status/202", "done"),
        ("/status/400", "rejected"),
        ("/status/401", "rejected"),
        ("/status/307", "rejected"),
        ("/status/429", "again"),
        ("/status/503", "again"),
        ("/reset", "again"),
    ],
)
async def test_an_answer_means_what_it_means_of_a_webhook(
    kind: str, path: str, meaning: str, caplog: pytest.LogCaptureFixture
) -> None:
    outcome, _ = await post(kind, issue(), path)
    status = outcome.status or 0
    known = "done" if 200 <= status < 300 else "rejected"
    again = outcome.failure is not None or status in (408, 425, 429) or status >= 500
    assert ("again" if again else known) == meaning
    assert "SECRET" not in repr(outcome) + caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_an_issue_is_one_alert_of_each(kind: str) -> None:
    assert queue(receivers(), kind, "http://127.0.0.1:1").one_alert


@pytest.mark.parametrize("kind", KINDS)
async def test_the_guard_holds_for_each(kind: str) -> None:
    opened = Receivers(
        ReceiverContext(
            secrets=SECRETS, guard=AddressGuard(private=False), folder=Path(), environ={}
        ),
        ReceiverKinds(),
    )
    async with fault_server() as server:
        outcome = await attempted(
            queue(opened, kind, server.url("/status/200")), notice(issue(), kind=kind)
        )
        await opened.close()
    assert outcome.forbidden is not None
    assert server.seen == []


def test_a_url_from_a_secret_is_checked_and_not_shown() -> None:
    text = """version: 1
secrets: {key: {env: K}}
receivers: {a: {type: goalert, url: {secret: key}}}
"""
    config, problems = check_config(text, "f", SectionRegistry(ReceiverKinds()))
    assert config is not None, problems
    with pytest.raises(ConfigurationError, match="receiver 'a': expected a URL") as caught:
        receivers().open(config.receivers)
    assert "SECRET" not in str(caught.value)


def test_each_needs_what_its_service_needs() -> None:
    text = "version: 1\nreceivers:\n" + "".join(f"  {kind}: {{type: {kind}}}\n" for kind in KINDS)
    _, problems = check_config(text, "f", SectionRegistry(ReceiverKinds()))
    assert [problem.message for problem in problems] == [
        "the key 'routing_key' is missing",
        "the key 'url' is missing",
        "the key 'token' is missing",
        "the key 'url' is missing",
        "the key 'url' is missing",
    ]
