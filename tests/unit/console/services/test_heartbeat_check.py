"""What the other end of a heartbeat hears, and what it makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from pydantic import SecretStr

from tocsin.actions.receivers.address_guard import AddressGuard
from tocsin.actions.receivers.http import HttpPoster
from tocsin.console.context import read_context
from tocsin.console.services.heartbeat_check import check_heartbeats, issue_of, listening
from tocsin.console.services.heartbeat_senders import Change, Senders
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.monotonic_clock import unix_ms

AFTER = 60_000
STATES: tuple[tuple[Literal["silent", "back"], int], ...] = (
    ("silent", 1000),
    ("back", 1000),
    ("silent", 7000),
)


async def test_the_path_names_the_sender_and_the_body_may_report_its_end() -> None:
    senders = Senders(after_ms=AFTER, now_ms=unix_ms())
    changes: list[Change] = []
    poster = HttpPoster(AddressGuard(private=True))

    async def post(url: str, path: str, body: bytes = b"") -> int | None:
        outcome = await poster.post(SecretStr(url.replace("{sender}", path)), body, {})
        return outcome.status

    async with listening("127.0.0.1", 0, senders, changes.append) as url:
        answers = [
            await post(url, "rules@a:9471"),
            await post(url, "run@r1", b'{"ending": false}'),
            await post(url, "run@r2"),
            await post(url, "run@r2", b'{"ending": true}'),
            await post(url, "curl", b"{" * 500),
            await post(url, "long", b" " * 5000 + b'{"ending": true}'),
            await post(url, "%0ax"),
            await post(url, ""),
        ]
        now_ms = unix_ms()
        found = [one for s in range(100) for one in senders.check(now_ms + 1000 * s)]
        await post(url, "rules@a:9471")
    await poster.close()

    assert answers == [200, 200, 200, 200, 200, 200, 400, 404]
    assert [one.sender for one in found] == ["rules@a:9471", "run@r1", "curl", "long"]
    assert [(one.sender, one.state) for one in changes] == [("rules@a:9471", "back")]


def test_both_states_of_an_outage_are_of_one_issue() -> None:
    silent, back, again = (
        issue_of(Change("rules@a", state, since_ms, "why"), 9000) for state, since_ms in STATES
    )
    assert (silent.state, back.state) == ("firing", "resolved")
    assert silent.issue_id == back.issue_id != again.issue_id
    assert (silent.run_id, silent.severity, silent.reason) == ("rules@a", "critical", "why")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"after": "90"}, "--after 90: expected a duration"),
        ({"after": "1s"}, "--after 1s: expected at least 2s"),
        ({"http": "9480"}, "--http 9480: expected HOST:PORT"),
        ({"expect": ["a b"]}, "sender 'a b': expected 1 to 200 letters"),
        ({"notify": []}, "no receiver: name one"),
    ],
)
async def test_options_that_cannot_be_used_are_refused(
    tmp_path: Path, options: dict[str, object], problem: str
) -> None:
    context = read_context(None, f"embedded:{tmp_path}/bus.db", environ={})
    given = {"http": "127.0.0.1:0", "after": "90s", "notify": ["http://127.0.0.1:9/"], **options}
    with pytest.raises(ConfigurationError) as refused:
        await check_heartbeats(context, (), **given)  # type: ignore[arg-type]
    assert problem in str(refused.value)
