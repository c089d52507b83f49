"""One message per issue, where the service can edit it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from pydantic import SecretStr

from support.actions.notices import notice, state
from support.records.issues import issue
from support.servers.editable_chats import (
    BOT,
    HOOK,
    ROOM,
    ROOM_TOKEN,
    TOKEN,
    EditableChats,
    editable_chats,
)
from tocsin.actions.decision.retry import Outcome
from tocsin.actions.receivers.address_guard import AddressGuard
from tocsin.actions.receivers.chat.apprise_process import AppriseProcess
from tocsin.actions.receivers.chat.editable import (
    Discord,
    EditableChat,
    Mattermost,
    Slack,
    Telegram,
    editable_chat,
)
from tocsin.actions.receivers.chat.sender import ChatSender, ChatTarget
from tocsin.actions.receivers.http import HttpPoster
from tocsin.schemas.records.deliveries import STOPPED
from tocsin.schemas.records.issues import IssueFiring

FIRED, WORSE = issue(severity="warning"), issue(raised_from="warning")
OVER = issue(resolved=True)
EVIL = "<!channel> @everyone <http://evil|x> [a](http://evil) & *b*"
URLS = {
    "slack": f"slack://{TOKEN}/#ml-alerts",
    "discord": f"discord://{HOOK}",
    "telegram": f"tgram://{BOT}/42",
    "mattermost": f"mmosts://chat.example.com/{ROOM_TOKEN}?mode=bot&to={ROOM}",
}


@pytest.fixture
async def chats() -> AsyncIterator[EditableChats]:
    async with editable_chats() as chats:
        yield chats


@pytest.fixture
async def sender() -> AsyncIterator[ChatSender]:
    sender = chat_sender(private=True)
    yield sender
    await sender.close()


def chat_sender(*, private: bool) -> ChatSender:
    guard = AddressGuard(private=private)
    return ChatSender(AppriseProcess(guard, command=("/bin/false",)), HttpPoster(guard))


def target(chats: EditableChats, name: str) -> ChatTarget:
    chat = editable_chat(SecretStr(URLS[name]))
    assert isinstance(chat, Slack | Discord | Telegram | Mattermost)
    here: EditableChat = replace(chat, base=chats.url)
    return ChatTarget(name, SecretStr(URLS[name]), editable=here)


async def send(
    sender: ChatSender, to: ChatTarget, found: IssueFiring, handle: str | None = None
) -> Outcome:
    return await sender.send(to, replace(notice(found, kind="chat"), handle=handle))


async def story(sender: ChatSender, to: ChatTarget) -> list[Outcome]:
    """An issue fires, gets worse and resolves; each notice knows what the ones before have left."""
    outcomes: list[Outcome] = []
    for found in (FIRED, WORSE, OVER):
        before = outcomes[-1].handle if outcomes else None
        outcomes.append(await send(sender, to, found, before))
    return outcomes


@pytest.mark.parametrize("name", URLS)
async def test_the_first_message_shows_the_newest_state(
    chats: EditableChats, sender: ChatSender, name: str
) -> None:
    outcomes = await story(sender, target(chats, name))

    assert [state(one) for one in outcomes] == ["delivered"] * 3
    assert len({one.handle for one in outcomes}) == 1, "all states are about one message"
    first, *rest = chats.messages.values()
    assert first.text.startswith("resolved: nonfinite in run-1")
    assert first.to is None
    said = [one.text.partition("\n")[0] for one in rest]
    worse, over = "now critical: nonfinite in run-1 at step 3", "resolved: nonfinite in run-1"
    if name in ("slack", "mattermost"):
        assert rest[0].text.startswith("WARNING: NaN in the loss"), "evidence is in the thread"
        assert name == "mattermost" or [one.loud for one in rest] == [False, True, False]
        assert [said[1], said[2].partition(" at ")[0]] == [worse, over]
    elif name == "telegram":
        assert [one.loud for one in rest] == [True, False]
        assert [said[0], said[1].partition(" at ")[0]] == [worse, over]
    else:
        assert said == [worse], "an edit notifies nobody, so what is worse is said again"
    key = next(iter(chats.messages))
    assert all(one.to == key for one in rest if name != "discord")


@pytest.mark.parametrize("name", URLS)
async def test_how_a_stop_has_ended_is_edited_in_without_a_word_to_anybody(
    chats: EditableChats, sender: ChatSender, name: str
) -> None:
    to = target(chats, name)
    posted = await send(sender, to, FIRED)
    shown = {key: one.text for key, one in chats.messages.items()}
    found = notice(FIRED, kind="chat", did="It stopped the run.")
    ended = replace(
        found,
        delivery=found.delivery.model_copy(update={"occasion": STOPPED}),
        handle=posted.handle,
        stop="delivered",
    )

    outcome = await sender.send(to, ended)

    assert (state(outcome), outcome.handle) == ("delivered", posted.handle)
    assert chats.messages.keys() == shown.keys()
    first, *rest = chats.messages
    assert chats.messages[first].text.startswith("run stopped; warning: nonfinite in run-1")
    assert [chats.messages[key].text for key in rest] == [shown[key] for key in rest]

    chats.answers = [404]
    assert state(await sender.send(to, ended)) == "rejected"
    chats.answers = [503]
    assert state(await sender.send(to, ended)) == "pending"
    assert chats.messages.keys() == shown.keys(), "nothing is posted anew"


@pytest.mark.parametrize("name", URLS)
async def test_text_of_a_run_calls_nobody_and_hides_no_link(
    chats: EditableChats, sender: ChatSender, name: str
) -> None:
    evil = {"reason": EVIL, "rule": "x\r\ny", "labels": {"a": EVIL}}
    await send(sender, target(chats, name), FIRED.model_copy(update=evil))
    for message in chats.messages.values():
        assert "<!channel>" not in message.text
        assert "<http" not in message.text
        if name != "slack":  # it takes a name for a mention only in its own form, `<@U…>`
            assert "@everyone" not in message.text
            assert "](http" not in message.text


@pytest.mark.parametrize("name", URLS)
async def test_a_message_that_is_gone_is_written_anew(
    chats: EditableChats, sender: ChatSender, name: str
) -> None:
    to = target(chats, name)
    handle = (await send(sender, to, FIRED)).handle
    chats.messages.clear()
    outcome = await send(sender, to, OVER, handle)
    assert state(outcome) == "delivered"
    first = next(iter(chats.messages.values()))
    assert first.text.startswith("resolved: nonfinite in run-1")
    assert (first.to, outcome.handle is None) == (None, False)


@pytest.mark.parametrize("name", URLS)
async def test_a_failed_edit_is_tried_again_before_anything_is_said(
    chats: EditableChats, sender: ChatSender, name: str
) -> None:
    to = target(chats, name)
    handle = (await send(sender, to, FIRED)).handle
    written = len(chats.messages)
    for status in (429, 503):
        chats.answers = [status]
        outcome = await send(sender, to, WORSE, handle)
        assert (state(outcome), outcome.status) == ("pending", status)
    assert outcome.handle is None
    assert len(chats.messages) == written
    assert (await send(sender, to, WORSE, handle)).handle == handle


@pytest.mark.parametrize("name", ["slack", "telegram", "mattermost"])
async def test_an_answer_that_fails_is_given_once_the_edit_has_been_made(
    chats: EditableChats, sender: ChatSender, name: str
) -> None:
    to = target(chats, name)
    handle = (await send(sender, to, FIRED)).handle
    written = len(chats.messages)
    chats.answers = [None, 503]
    assert state(await send(sender, to, WORSE, handle)) == "pending"
    again = await send(sender, to, WORSE, handle)
    assert (state(again), again.handle) == ("delivered", handle)
    assert len(chats.messages) == written + 1
    assert list(chats.messages.values())[-1].to == handle or name == "slack"


async def test_a_thread_that_fails_does_not_bring_the_message_twice(
    chats: EditableChats, sender: ChatSender
) -> None:
    chats.answers = [None, 503]
    outcome = await send(sender, target(chats, "slack"), FIRED)
    assert state(outcome) == "delivered"
    assert len(chats.messages) == 1


@pytest.mark.parametrize(
    ("answer", "wanted", "text"),
    [
        ({"ok": False, "error": "channel_not_found"}, "rejected", "Slack: channel_not_found"),
        ({"ok": False, "error": "ratelimited"}, "pending", "Slack: ratelimited"),
        ({"ok": False, "error": "SECRET words"}, "rejected", "Slack refused it"),
        ({"ok": False, "error": ["SECRET"]}, "rejected", "Slack refused it"),
        ({"SECRET": 1}, "pending", "Slack: no answer that it took the message"),
        (307, "rejected", "307 Temporary Redirect"),
    ],
)
async def test_what_slack_answers(
    chats: EditableChats,
    sender: ChatSender,
    answer: dict[str, object] | int,
    wanted: str,
    text: str,
) -> None:
    chats.answers = [answer]
    outcome = await send(sender, target(chats, "slack"), FIRED)
    assert (state(outcome), outcome.text()) == (wanted, text)
    assert len(chats.requests) == 1, "a redirect was followed"


@pytest.mark.parametrize(
    "answer", [{"ok": True, "channel": "x/../y", "ts": "SECRET"}, {"id": "../../SECRET"}, {"id": 1}]
)
@pytest.mark.parametrize("name", URLS)
async def test_a_strange_id_is_not_kept(
    chats: EditableChats, sender: ChatSender, name: str, answer: dict[str, object]
) -> None:
    chats.answers = [answer]
    outcome = await send(sender, target(chats, name), FIRED)
    assert outcome.handle in (None, "1")


async def test_no_secret_is_in_an_outcome_or_a_log_and_no_private_address_is_reached(
    chats: EditableChats, sender: ChatSender, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    shown = []
    for name in URLS:
        to = target(chats, name)
        chats.answers = [403]
        shown.append(f"{await send(sender, to, FIRED)!r} {to!r} {to.editable!r}")
    strict = chat_sender(private=False)
    before = len(chats.requests)
    try:
        for name in URLS:
            refused = await send(strict, target(chats, name), FIRED)
            assert refused.forbidden is not None
            assert refused.forbidden.startswith("address 127.0.0.1 is not public")
    finally:
        await strict.close()
    assert len(chats.requests) == before
    assert "secret" not in "\n".join([*shown, caplog.text]).replace("SecretStr", "").lower()


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        (f"slack://{TOKEN}/#ml", Slack),
        (f"slack://{TOKEN}/%23ml", Slack),
        (f"slack://{TOKEN}/C0123", Slack),
        (f"https://discord.com/api/webhooks/{HOOK}", Discord),
        (f"tgram://{BOT}/-100123", Telegram),
        (URLS["mattermost"], Mattermost),
        (f"mmost://chat.example.com/{ROOM_TOKEN}?mode=bot&to=ops", None),
        # apprise knows what these ask for.
        (f"slack://{TOKEN}/#ml?footer=yes", None),
        (f"slack://{TOKEN}/@somebody", None),
        ("slack://TAAAAAAAA/BAAAAAAAA/SECRETaaaaaaaaaaaaaaaaaa", None),
        (f"discord://{HOOK}?tts=yes", None),
        (f"tgram://{BOT}/42?mdv=2", None),
        ("mmost://chat.example.com/aaaaaaaaaaaaaaaaaaaaaaaa", None),
    ],
)
def test_which_urls_can_be_edited(url: str, kind: type[object] | None) -> None:
    chat = editable_chat(SecretStr(url))
    assert (chat is None) if kind is None else isinstance(chat, kind)
