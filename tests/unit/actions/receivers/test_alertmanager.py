"""Alerts to Alertmanager: the real one of Debian, where it is installed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from pydantic import SecretStr

from support.actions.notices import notice
from support.records.issues import issue
from support.servers.alertmanager import needs_alertmanager, running_alertmanager
from support.servers.fault_server import FaultServer, fault_server
from tocsin.actions.receivers.address_guard import AddressGuard
from tocsin.actions.receivers.alertmanager.kind import alerts_of
from tocsin.actions.receivers.http import HttpPoster, JsonSender, JsonTarget
from tocsin.actions.receivers.webhook.bodies import alertmanager_v4
from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.schemas.records.issues import IssueFiring

DAY_MS = 86_400_000


def alerts(found: IssueFiring) -> dict[str, Any]:
    """What is posted about an issue, by severity."""
    posted = json.loads(json.dumps(alerts_of(DAY_MS, notice(found))))
    return {one["labels"]["severity"]: one for one in posted}


def test_an_issue_is_one_alert_that_fires_until_it_is_over() -> None:
    made = alerts(issue().model_copy(update={"labels": {"team": "vision", "a.b/c": "d"}}))
    assert {severity: one["startsAt"] < one["endsAt"] for severity, one in made.items()} == {
        "info": False,
        "warning": False,
        "critical": True,
    }
    assert made["critical"]["labels"] == {
        "alertname": "nonfinite",
        "run": "run-1",
        "issue": issue().issue_id,
        "severity": "critical",
        "team": "vision",
        "a_b_c": "d",
    }
    assert made["critical"]["annotations"]["summary"] == "critical: nonfinite in run-1 at step 3"
    assert made["critical"]["endsAt"] == "2026-11-22T10:46:52.300+00:00"
    over = alerts(issue(resolved=True))
    assert all(one["endsAt"] == one["startsAt"] for one in over.values())


def test_a_label_of_a_run_replaces_none_of_ours() -> None:
    evil = {"alertname": "x", "severity": "x", "issue": "x", "run": "x"}
    labels = alerts(issue().model_copy(update={"labels": evil}))["critical"]["labels"]
    assert "x" not in labels.values()


def test_an_issue_that_gets_graver_ends_the_alert_before() -> None:
    made = alerts(issue(raised_from="warning"))
    assert made["warning"]["endsAt"] == made["warning"]["startsAt"]
    assert made["critical"]["endsAt"] > made["critical"]["startsAt"]


@pytest.fixture
async def hooks() -> AsyncIterator[FaultServer]:
    """Where that Alertmanager posts to."""
    async with fault_server() as server:
        yield server


@pytest.fixture
async def alertmanager(tmp_path: Path, hooks: FaultServer) -> AsyncIterator[str]:
    """The URL of a real Alertmanager that posts each alert at once."""
    config = (
        "route: {receiver: ml, group_by: [issue, severity], group_wait: 0s}\n"
        f"receivers: [{{name: ml, webhook_configs: [{{url: '{hooks.url('/status/200')}'}}]}}]\n"
    )
    async with running_alertmanager(config, tmp_path) as url:
        yield url


@needs_alertmanager
async def test_the_real_alertmanager_fires_escalates_and_resolves(
    alertmanager: str, hooks: FaultServer
) -> None:
    sender = JsonSender(HttpPoster(AddressGuard(private=True)))
    target = JsonTarget(SecretStr(f"{alertmanager}/api/v2/alerts"), partial(alerts_of, DAY_MS))

    async def active(found: IssueFiring) -> list[tuple[str, str]]:
        """The alerts that fire after a notice of this issue: name and severity."""
        current = found.model_copy(update={"onset_ms": unix_ms() - 60_000})
        given = replace(notice(current), now_ms=unix_ms())
        assert (await sender.send(target, given)).text() == "200 OK"
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{alertmanager}/api/v2/alerts?active=true") as answer,
        ):
            listed = await answer.json()
        return [(one["labels"]["alertname"], one["labels"]["severity"]) for one in listed]

    try:
        assert await active(issue(severity="warning")) == [("nonfinite", "warning")]
        async with asyncio.timeout(20):
            await hooks.arrived.wait()
        # What it posts then is of the form that our webhooks post themselves.
        ours = json.loads(alertmanager_v4("ml", notice(issue(severity="warning"))).content)
        assert _form(json.loads(hooks.seen[0].body)) == _form(ours)
        assert await active(issue(raised_from="warning")) == [("nonfinite", "critical")]
        assert await active(issue(resolved=True)) == []
    finally:
        await sender.close()


def _form(body: Any) -> Any:
    """Keys and types; of texts that say one of few things, what they say."""
    if isinstance(body, dict):
        # What it groups by is configured.
        return {key: key == "groupLabels" or _form(value) for key, value in body.items()}
    if isinstance(body, list):
        return [_form(one) for one in body]
    fixed = ("firing", "4", "ml", "warning", "nonfinite", "run-1", "0001-01-01T00:00:00Z")
    return body if body in fixed else type(body).__name__
