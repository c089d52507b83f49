"""What webhooks post, read by the libraries of those who receive it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_http_event
from hypothesis import given
from hypothesis import strategies as st

from support.actions.notices import notice
from support.records.issues import issue
from tocsin.actions.receivers.webhook.bodies import alertmanager_v4, binary, structured
from tocsin.schemas.records.issues import IssueFiring


def group(found: IssueFiring) -> dict[str, Any]:
    """What is posted as an Alertmanager would."""
    made: dict[str, Any] = json.loads(alertmanager_v4("ml", notice(found)).content)
    return made


@pytest.mark.parametrize("make", [structured, binary])
def test_the_reference_library_reads_the_same_event(make: Any) -> None:
    given = notice(issue())
    body = make(given)
    event = from_http_event(
        HTTPMessage({**body.headers, "content-type": body.content_type}, body.content)
    )
    wanted = given.delivery.event
    assert wanted is not None
    assert event.get_data() == wanted["data"]
    assert event.get_source() == wanted["source"]
    assert event.get_type() == "tocsin.issue.firing"
    assert event.get_time().isoformat(timespec="milliseconds") == "2026-11-21T10:46:52.300+00:00"


@given(st.text(min_size=1, max_size=60).filter(str.isprintable))
def test_no_attribute_breaks_out_of_its_header(subject: str) -> None:
    given = notice(issue())
    assert given.delivery.event is not None
    given.delivery.event["subject"] = subject + "\r\nevil: x"
    headers = binary(given).headers

    assert all(value.isascii() and value.isprintable() for value in headers.values())
    event = from_http_event(HTTPMessage({**headers, "content-type": "application/json"}, b"{}"))
    assert event.get_subject() == subject + "\r\nevil: x"


def test_an_issue_is_the_same_alert_of_alertmanager_in_all_its_states() -> None:
    fired, worse, over = (
        group(one) for one in (issue(severity="warning"), issue(raised_from="warning"),
                               issue(resolved=True))
    )  # fmt: skip
    assert [one["status"] for one in (fired, worse, over)] == ["firing", "firing", "resolved"]
    assert len({one["groupKey"] for one in (fired, worse, over)}) == 1
    assert len({one["alerts"][0]["fingerprint"] for one in (fired, worse, over)}) == 1
    assert fired["alerts"][0]["endsAt"] == "0001-01-01T00:00:00Z"
    assert over["alerts"][0]["endsAt"] == "2026-11-21T10:46:52.300+00:00"
    assert worse["commonLabels"]["severity"] == "critical"
    assert worse["receiver"] == "ml"
    assert "NaN in the loss at step 1" in fired["commonAnnotations"]["description"]


def test_a_label_of_a_run_replaces_none_of_ours() -> None:
    evil = {"alertname": "x", "severity": "x", "issue": "x", "run": "x"}
    made = group(issue().model_copy(update={"labels": evil}))
    assert "x" not in made["commonLabels"].values()
