"""Chat through apprise in its guarded child, against receivers with the services' own shapes."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator

import pytest
import requests
from pydantic import SecretStr

from support.actions.notices import notice
from support.records.issues import issue
from support.servers.certificates import Authority, authority
from support.servers.chat_services import (
    DISCORD,
    HOSTS,
    SLACK,
    SLACK_NATIVE,
    TELEGRAM,
    ChatServices,
    chat_services,
)
from tocsin.actions.decision.retry import Outcome
from tocsin.actions.receivers.address_guard import AddressGuard, parse_networks
from tocsin.actions.receivers.chat.apprise_process import AppriseProcess, Place, outcome_of
from tocsin.actions.receivers.chat.child import Result, Task
from tocsin.actions.receivers.chat.child import send as send_in_child
from tocsin.actions.receivers.chat.sender import (
    ChatSender,
    ChatTarget,
    body_of,
    escaped,
)
from tocsin.actions.receivers.chat.urls import SEVERAL_TARGETS, chat_fault
from tocsin.actions.receivers.email.config import EmailReceiver
from tocsin.actions.receivers.http import HttpPoster
from tocsin.actions.receivers.message import message_of
from tocsin.actions.receivers.notify_option import parse_addresses, parse_notify
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.issues import IssueFiring

EVIL = issue().model_copy(
    update={"reason": "<!channel> <@U123> @everyone <http://evil|x> [a](http://evil) & *b*"}
)


UNUSED = HttpPoster(AddressGuard(private=False))
"""apprise makes connections of its own."""


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("tls"), *HOSTS)


@pytest.fixture
async def services(trusted: Authority) -> AsyncIterator[ChatServices]:
    async with chat_services(trusted.context) as services:
        yield services


def sender(services: ChatServices, trusted: Authority, *, private: bool = True) -> ChatSender:
    place = Place(connect_to=services.connect_to, ca=trusted.ca)
    return ChatSender(AppriseProcess(AddressGuard(private=private), place=place), UNUSED)


async def send(chat: ChatSender, url: str, found: IssueFiring = EVIL) -> Outcome:
    return await chat.send(ChatTarget("chat", SecretStr(url)), notice(found, kind="chat"))


@pytest.mark.slow
async def test_slack_discord_and_telegram_take_the_message(
    services: ChatServices, trusted: Authority
) -> None:
    chat = sender(services, trusted)
    urls = (SLACK, DISCORD, TELEGRAM)
    outcomes = await asyncio.gather(*(send(chat, url) for url in urls))

    assert [outcome.status for outcome in outcomes] == [200, 204, 200]
    by_host: dict[str, str] = {}
    for path, body in services.seen:
        by_host[path.split("/")[0]] = json.dumps(body, ensure_ascii=False)
    slack = by_host["hooks.slack.com"]
    assert "&lt;!channel&gt; &lt;@U123&gt;" in slack
    assert "<!channel>" not in slack
    assert "<http" not in slack
    discord = by_host["discord.com"]
    assert "@everyone" not in discord
    assert "@\u200beveryone" in discord
    assert "](http" not in discord
    telegram = by_host["api.telegram.org"]
    assert "<!channel>" not in telegram
    for text in by_host.values():
        assert "critical: nonfinite in run" in text.replace("\\", "")
        assert "It asked the run to stop." in text
        assert "apprise" not in text.lower()


@pytest.mark.slow
async def test_answers_are_read_where_apprise_does_not_say_them(
    services: ChatServices, trusted: Authority
) -> None:
    chat = sender(services, trusted)
    services.status, services.retry_after = 429, "7"
    assert await send(chat, SLACK) == Outcome(
        status=429, phrase="Too Many Requests", retry_after="7"
    )
    services.status, services.retry_after = 307, None
    assert (await send(chat, SLACK_NATIVE)).status == 307
    assert len(services.seen) == 2, "a redirect was followed, or apprise tried again"
    services.status = 404
    assert (await send(chat, DISCORD)).text() == "404 Not Found"


async def test_a_strange_certificate_is_refused(services: ChatServices) -> None:
    place = Place(connect_to=services.connect_to)
    chat = ChatSender(AppriseProcess(AddressGuard(private=True), place=place), UNUSED)
    assert (await send(chat, SLACK)).failure == "TLS certificate not accepted"
    assert services.seen == []


@pytest.mark.slow
async def test_refused_addresses_are_never_connected_to(
    services: ChatServices, trusted: Authority
) -> None:
    strict, open_one = sender(services, trusted, private=False), sender(services, trusted)
    outcomes = await asyncio.gather(
        # Names that lead to this machine, and an address: that of metadata.
        send(strict, SLACK),
        send(strict, f"mmost://localhost:{services.port}/aaaaaaaaaaaaaaaaaaaaaaaa"),
        send(open_one, "mmost://169.254.169.254/aaaaaaaaaaaaaaaaaaaaaaaa"),
    )
    for outcome in outcomes:
        assert outcome.forbidden is not None
        assert outcome.forbidden.startswith("address ")
    assert services.seen == []


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("import time; time.sleep(60)", "timeout"),
        ("raise SystemExit(1)", "the process for chat messages failed"),
        ("print('ok')", "the process for chat messages failed"),
    ],
)
async def test_a_child_that_fails_is_a_failed_attempt(code: str, wanted: str) -> None:
    command = (sys.executable, "-c", code)
    process = AppriseProcess(AddressGuard(private=True), timeout_s=0.5, command=command)
    chat = ChatSender(process, UNUSED)
    assert (await send(chat, SLACK)).text() == wanted


def test_the_child_connects_nowhere_by_name_or_path_and_starts_nothing() -> None:
    code = """
        import os, socket, subprocess
        from tocsin.actions.receivers.address_guard import AddressGuard
        from tocsin.actions.receivers.chat.child import Result, guard_process
        guard_process(AddressGuard(private=True), Result())
        for family, address in ((socket.AF_INET, ("localhost", 9)), (socket.AF_UNIX, "/run/x"),
                                (socket.AF_INET, ("169.254.169.254", 80)),
                                (socket.AF_INET6, ("::ffff:169.254.169.254", 80))):
            for way in ("connect", "connect_ex"):
                with socket.socket(family) as one:
                    try:
                        getattr(one, way)(address)
                    except OSError as error:
                        assert type(error).__name__ == "AddressRefused", error
                    else:
                        raise SystemExit(f"{way} {address} passed")
        for start in (lambda: subprocess.run(["true"]), lambda: os.system("true"),
                      lambda: os.posix_spawn("/bin/true", ["true"], {})):
            try:
                start()
            except PermissionError:
                continue
            raise SystemExit("a program was started")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("result", "wanted"),
    [
        (Result(sent=True, status=200, requests=1), Outcome(status=200, phrase="OK")),
        (Result(status=200, requests=1), Outcome(later="the service did not take the message")),
        (Result(status=503, requests=1), Outcome(status=503, phrase="Service Unavailable")),
        (Result(failure="timeout", requests=1), Outcome(failure="timeout")),
        (Result(refused="address", failure="no connection"), Outcome(forbidden="address")),
        (Result(sent=True, status=500, requests=3), Outcome(done="sent")),
        (Result(sent=True, failure="timeout", requests=3), Outcome(done="sent")),
        (Result(sent=True), Outcome(done="sent")),
    ],
)
def test_what_a_result_means(result: Result, wanted: Outcome) -> None:
    assert outcome_of(result) == wanted


@pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")
def test_a_log_out_after_the_message_says_nothing_of_the_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def answer(session: object, request: requests.PreparedRequest, **_: object) -> object:
        path = str(request.url).partition("?")[0].rpartition("/")[2]
        asked.append(path)
        response = requests.Response()
        response.status_code = 500 if path == "logout" else 200
        response._content = (
            b'{"user_id": "@a:b", "access_token": "x", "home_server": "h", "room_id": "!r:h",'
            b' "event_id": "1"}'
        )
        response.request, response.url = request, str(request.url)
        return response

    monkeypatch.setattr(requests.Session, "send", answer)
    result = Result()
    url = "matrixs://user:pass@matrix.example.com/%23room"
    send_in_child(Task(url=url, title="t", body="b", private=True), result)
    gc.collect()

    assert asked[-1] == "logout"
    assert outcome_of(result) == Outcome(status=200, phrase="OK")


async def test_a_channel_in_the_url_is_the_one_that_is_written_to(
    services: ChatServices, trusted: Authority
) -> None:
    # At an address that is permitted.
    guard = AddressGuard(private=False, allow=parse_networks(["127.0.0.0/8"]))
    place = Place(connect_to=services.connect_to, ca=trusted.ca)
    outcome = await send(
        ChatSender(AppriseProcess(guard, place=place), UNUSED), f"{SLACK}/#ml-alerts"
    )

    assert outcome.status == 200
    assert [body["channel"] for _, body in services.seen] == ["#ml-alerts"]


async def test_several_targets_in_one_url_are_refused_before_one_has_it(
    services: ChatServices, trusted: Authority
) -> None:
    # What the first look at a URL cannot know: a bot's token takes the place of three parts.
    outcome = await send(sender(services, trusted), "slack://xoxb-1234-1234-SECRET/#a/#b")

    assert outcome == Outcome(forbidden=SEVERAL_TARGETS)
    assert services.seen == []
    with pytest.raises(ConfigurationError, match=r"--notify: .*create a receiver for each"):
        parse_notify(f"{TELEGRAM}/2")


def test_a_url_that_apprise_cannot_use_is_final() -> None:
    assert outcome_of(Result()).forbidden is not None


@pytest.mark.parametrize(
    ("url", "good"),
    [
        (SLACK, True),
        (SLACK_NATIVE, True),
        (DISCORD, True),
        (TELEGRAM, True),
        ("ntfy://topic", True),
        ("https://example.com/hook", False),
        ("dbus://", False),
        ("syslog://x", False),
        ("file:///etc/passwd", False),
        ("mailto://me:pw@example.com", False),
        (f"{SLACK}?redirect=yes", False),
        (f"{SLACK}?template=/etc/passwd", False),
        (f"{SLACK}?verify=no", False),
        (f"{SLACK}?RETRY=9", False),
        (f"{SLACK}?x=1;verify=no", False),
        (f"{SLACK}?x=1#?%76erify=no", False),
        (f"{SLACK}/#channel?verify=no", False),
        (f"{SLACK}?verify=", False),
        (f"{SLACK_NATIVE}?verify=no", False),
        (f"{SLACK}/#one", True),
        (f"{SLACK}/#one/#two", False),
        (f"{SLACK}/#one?to=%23two", False),
        (f"{TELEGRAM}/2", False),
        (f"{TELEGRAM}?to=2", False),
        ("ntfys://me:pw@ntfy.example.com/topic", True),
        ("ntfy://ntfy.example.com/one/two", False),
        ("mmost://chat.example.com/aaaaaaaaaaaaaaaaaaaaaaaa?to=a", True),
        ("mmost://chat.example.com/aaaaaaaaaaaaaaaaaaaaaaaa?to=a,b", False),
        ("slack://", False),
        ("slack://a\nb", False),
    ],
)
def test_only_known_services_without_dangerous_options_are_chat(url: str, good: bool) -> None:
    assert (chat_fault(url) is None) is good


def test_notify_tells_its_kinds_apart_and_names_show_no_token() -> None:
    kinds = {
        "https://hooks.example.com/ml": "webhook",
        "mailto:me@example.com": "email",
        "me@example.com": "email",
        "mailto:a@example.com,b@example.com?subject=x": "email",
        SLACK: "chat",
        SLACK_NATIVE: "chat",
        TELEGRAM: "chat",
    }
    assert {text: parse_notify(text).config.type for text in kinds} == kinds
    assert parse_addresses(["mailto:me@example.com"]) == parse_addresses(["me@example.com"])
    names = [parse_notify(text).name for text in kinds]
    assert not [name for name in names if "SECRET" in name or "AAAA" in name]
    hosts = ("hooks.example.com", *["me@example.com"] * 2, "a@example.com", "slack")
    for name, start in zip(names, (*hosts, "hooks.slack.com", "tgram"), strict=True):
        assert name.startswith(f"notify:{start}-")
    both = parse_notify("mailto:a@example.com,b@example.com").config
    assert isinstance(both, EmailReceiver)
    assert both.to == ("a@example.com", "b@example.com")
    assert "SECRET" not in repr(parse_notify("https://hooks.example.com/SECRET"))


@pytest.mark.parametrize(
    "text", ["", "SECRET", "ftp://SECRET", "mailto:", "mailto:SECRET", "json://SECRET", "a b@c.d"]
)
def test_what_notify_does_not_know_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--notify: expected a ") as caught:
        parse_notify(text)
    assert "SECRET" not in str(caught.value)


def test_the_body_is_short_and_each_service_is_escaped_in_its_way() -> None:
    message = message_of(issue().model_copy(update={"reason": "x" * 4000}))
    assert len(body_of(message)) <= 1_500
    assert escaped(SLACK, "@all <a> *b*") == "@all <a> *b*", "apprise escapes for Slack"
    assert escaped(DISCORD, "*b* [x](y)") == r"\*b\* \[x\]\(y\)"
    assert escaped("mmost://h/t", "@all [x](y)") == "@\u200ball [x]\u200b(y)"


async def test_no_secret_is_in_an_outcome_or_a_log(
    services: ChatServices, trusted: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    services.status = 403
    chat = sender(services, trusted)
    shown = [repr(await send(chat, SLACK)), repr(ChatTarget("chat", SecretStr(SLACK)))]
    assert "SECRET" not in "\n".join([*shown, caplog.text])


async def test_a_url_that_lacks_a_part_is_final(services: ChatServices, trusted: Authority) -> None:
    outcome = await send(sender(services, trusted), "slack://SECRET")
    assert outcome.forbidden == "the chat URL cannot be used: a part of it is missing or wrong"
    assert services.seen == []
