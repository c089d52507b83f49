"""Whatever a receiver answers, its delivery goes on, and so do all others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.records.issues import NOW_MS, TOPICS, issue, issue_record
from support.servers.fault_server import fault_server
from tocsin.actions.composition import build_actions_service
from tocsin.actions.decision.retry import (
    LONGEST_RETRY_AFTER_MS,
    Outcome,
    RetryPolicy,
    retry_after_ms,
)
from tocsin.actions.ledger.ledger import Ledger
from tocsin.actions.receivers.registry import ReceiverKinds
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.runtime.worker import Worker, WorkerSettings
from tocsin.schemas.configuration.file import SectionRegistry, check_config
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.signing import SigningKey

HOSTILE = [
    "Wed, 21 Oct 2026 07:28:00 +9999999999999",
    "Wed, 21 Oct 2026 07:28:00 -9999999999999",
    "Wed, 21 Oct 9999 23:59:59 -2359",
    "Wed, 21 Oct 0001 00:00:00 +2359",
    "Wed, 21 Oct 99999999999999999999 07:28:00 GMT",
    "Wed, 21 Oct 2026 99999999999999999999:28:00 GMT",
    "Wed, 00 Jan 0000 00:00:00 GMT",
    "Wed, 31 Feb 2026 24:61:61 GMT",
    ",,,", "0 Jan", "Jan", "+", "-", ":", "1 2 3 4 5 6", "\x00", "1e9", "-1", "inf",
    "9" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_no_retry_after_raises(text: str) -> None:
    wait_ms = retry_after_ms(text, NOW_MS)
    assert wait_ms is None or 0 <= wait_ms <= LONGEST_RETRY_AFTER_MS


_NUMBER = st.integers(-(10**20), 10**20).map(str)


@given(
    st.tuples(
        st.sampled_from(["Wed, ", "Mon ", ""]),
        _NUMBER,
        st.sampled_from([" Oct ", " Xxx ", "-Feb-"]),
        _NUMBER,
        st.sampled_from([" 07:28:00 ", " 25:00 ", " ", "T"]),
        st.one_of(st.just("GMT"), _NUMBER.map(lambda text: f"+{text}"), st.text(max_size=8)),
    ).map("".join)
)
def test_nothing_that_looks_like_a_date_raises(text: str) -> None:
    wait_ms = retry_after_ms(text, NOW_MS)
    assert wait_ms is None or 0 <= wait_ms <= LONGEST_RETRY_AFTER_MS


async def test_a_hostile_answer_and_a_bug_of_ours_leave_other_deliveries_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempted = Ledger.attempted

    def sick(ledger: Ledger, old: Delivery, outcome: Outcome, **rest: Any) -> Delivery:
        if old.action == "sick":
            raise OverflowError("planted")
        return attempted(ledger, old, outcome, **rest)

    monkeypatch.setattr(Ledger, "attempted", sick)
    async with fault_server() as server, EmbeddedBus(tmp_path / "bus.db") as bus:
        await bus.init(TOPICS.specs())
        hostile = server.url(f"/status/503?after={HOSTILE[0].replace(' ', '%20')}")
        text = f"""version: 1
receivers:
  hostile: {{type: webhook, url: "{hostile}"}}
  sick: {{type: webhook, url: "{server.url("/status/500")}"}}
  good: {{type: webhook, url: "{server.url("/status/200")}"}}
rules:
  - nonfinite: [sick, hostile, good]
"""
        config, problems = check_config(text, "tocsin.yaml", SectionRegistry(ReceiverKinds()))
        assert config is not None, problems
        policy = RetryPolicy(first_ms=20, most_ms=40, least_ms=5)
        service = build_actions_service(
            TOPICS,
            config,
            bus=bus,
            key=SigningKey.generate(),
            secrets={},
            embedded=True,
            policy=policy,
        )
        worker = Worker(
            bus,
            service,
            topics=TOPICS,
            group="actions",
            settings=WorkerSettings(checkpoint_s=0.05),
        )
        task = asyncio.create_task(worker.run())
        try:
            producer = await bus.producer()
            for number in range(3):
                await producer.publish([issue_record(issue(run=f"run-{number}"))])
            await producer.close()
            assert await worker.caught_up(10)
            assert not await service.drain(1.0)
            left = {delivery.action for delivery in service.unfinished()}
        finally:
            worker.stop()
            await task

    assert left == {"hostile", "sick"}
    assert sum(request.path.startswith("/status/200") for request in server.seen) == 3
    assert sum("after" in request.path for request in server.seen) > 3
