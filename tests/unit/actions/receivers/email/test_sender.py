"""Mail through a real SMTP server: with and without TLS and log-in, and with its faults."""

from __future__ import annotations

import asyncio
import csv
import io
import logging
import math
import socket
import sys
from dataclasses import replace
from email.message import EmailMessage
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import SecretStr

from support.actions.notices import attempted, notice, state
from support.records.issues import NOW_MS, issue
from support.servers.certificates import Authority, authority
from support.servers.smtp_server import Mailbox, smtp_server
from tocsin.actions.decision.retry import Outcome
from tocsin.actions.delivery.receiver_queues import Notice, ReceiverQueue
from tocsin.actions.receivers.drawing import from_json, to_json
from tocsin.actions.receivers.email.body import csv_of
from tocsin.actions.receivers.email.config import SmtpConfig
from tocsin.actions.receivers.email.sender import EmailSender
from tocsin.actions.receivers.email.smtp_server import (
    EmailTarget,
    SmtpServer,
    server_of_config,
    server_of_environment,
)
from tocsin.actions.receivers.message import message_of
from tocsin.actions.receivers.picture import Plotter, drawing_of, render
from tocsin.schemas.configuration.values import SecretRef
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.issues import Evidence, IssueFiring, Series

SECRETS = {"mail": SecretStr("planted-SECRET-mail")}
SERIES = Series(
    name="loss",
    steps=tuple(range(20)),
    values=(*(2.5 - i / 50 for i in range(19)), math.nan),
    limit=5.0,
)


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("tls"), "localhost", "127.0.0.1")


@pytest.fixture
def undrawn() -> Plotter:
    """Draws nothing, at once."""
    return Plotter(command=(sys.executable, "-c", "pass"))


def with_series(*, resolved: bool = False, series: Series = SERIES) -> IssueFiring:
    return issue(resolved=resolved).model_copy(update={"evidence": Evidence(series=series)})


def target(
    mailbox: Mailbox, *to: str, security: SmtpConfig | None = None, **more: str
) -> EmailTarget:
    config = security or SmtpConfig(host="127.0.0.1", starttls=False)
    config = config.model_copy(update={"port": mailbox.port})
    server = server_of_config(config, SECRETS, folder=Path("/"), what="receiver 'mail'")
    return EmailTarget(
        name="mail", to=to or ("me@example.com",), server=server, sender="tocsin@example.com"
    )


def parts(mail: EmailMessage) -> dict[str, EmailMessage]:
    return {part.get_content_type(): part for part in mail.walk()}


@pytest.mark.slow
async def test_a_mail_has_text_html_picture_and_values() -> None:
    async with smtp_server() as mailbox:
        outcome = await EmailSender().send(target(mailbox), notice(with_series()))

    assert outcome.text() == "accepted by the mail server for 1 recipient"
    (mail,) = mailbox.mails
    assert mail["From"] == "tocsin <tocsin@example.com>"
    assert mail["To"] == "me@example.com"
    assert mail["Subject"] == "[tocsin] nonfinite in run-1 at step 3"
    assert mail["Auto-Submitted"] == "auto-generated"
    assert mail["Importance"] == "high"
    assert mail["In-Reply-To"] is None
    found = parts(mail)
    text = found["text/plain"].get_content()
    html = found["text/html"].get_content()
    assert "CRITICAL: NaN in the loss at step 1" in text
    assert "It asked the run to stop." in text
    assert "NaN in the loss at step 1" in html
    assert 'src="cid:series.png"' in html
    picture = found["image/png"]
    assert picture["Content-ID"] == "<series.png>"
    assert picture.get_content().startswith(b"\x89PNG")
    rows = list(csv.reader(io.StringIO(found["text/csv"].get_content())))
    assert rows[0] == ["step", "loss", "limit"]
    assert rows[1] == ["0", "2.5", "5.0"]
    assert rows[-1] == ["19", "NaN", "5.0"]
    assert found["text/csv"].get_filename() == "last_values.csv"


async def test_a_mail_has_the_report_of_its_run_if_that_is_wanted(undrawn: Plotter) -> None:
    asked: list[str] = []

    async def report(run_id: str) -> bytes | None:
        asked.append(run_id)
        return "<!doctype html><p>naïve</p>".encode()

    async with smtp_server() as mailbox:
        sender = EmailSender(plotter=undrawn, report=report)
        await sender.send(target(mailbox), notice(issue()))
        await sender.send(replace(target(mailbox), attach_report=True), notice(issue()))
    without, attached = mailbox.mails
    assert [part.get_filename() for part in without.iter_attachments()] == []
    (part,) = attached.iter_attachments()
    assert part.get_filename() == "report.html"
    assert part.get_content_type() == "text/html"
    assert asked == [issue().run_id]


async def test_a_mail_of_a_group_answers_the_mails_of_its_issues(undrawn: Plotter) -> None:
    given = [notice(issue()).delivery, notice(issue(rule="loss_spike")).delivery]
    first, second = (
        one.model_copy(update={"group": "run=run-1", "sent_as": given[0].delivery_id})
        for one in given
    )
    async with smtp_server() as mailbox:
        for notices in ((first, second), (second, first)):
            sent = Notice(notices[0], NOW_MS, others=notices[1:])
            await EmailSender(plotter=undrawn).send(target(mailbox), sent)
        await EmailSender(plotter=undrawn).send(
            target(mailbox), notice(issue(rule="loss_spike", resolved=True))
        )

    mail, again, over = mailbox.mails
    assert mail["Message-ID"] == again["Message-ID"] == f"<{first.delivery_id}@example.com>"
    assert mail["Date"] == again["Date"]
    assert mail["Subject"].startswith("[tocsin] 2 issues in run-1, the most severe: ")
    # Mail readers put what refers to the same id into one thread.
    assert over["In-Reply-To"] in mail["References"]


async def test_each_attempt_has_the_same_id_and_a_resolve_answers_its_firing(
    undrawn: Plotter,
) -> None:
    sender = EmailSender(plotter=undrawn)
    async with smtp_server() as mailbox:
        mailbox.cut = 1
        lost = await sender.send(target(mailbox), notice(issue()))
        await sender.send(target(mailbox), notice(issue(), attempts=1))
        await sender.send(target(mailbox), notice(issue(resolved=True)))

    assert state(lost) == "pending"
    first, again, over = mailbox.mails
    assert first["Message-ID"] == again["Message-ID"]
    assert first["Date"] == again["Date"]
    assert first["Message-ID"].endswith("@example.com>")
    assert over["Message-ID"] != first["Message-ID"]
    assert over["In-Reply-To"] == over["References"] == first["Message-ID"]
    assert over["Subject"] == "Re: " + first["Subject"]
    assert "RESOLVED: Over: " in parts(over)["text/plain"].get_content()


@pytest.mark.parametrize("way", ["starttls", "tls"])
async def test_it_encrypts_and_logs_in(trusted: Authority, undrawn: Plotter, way: str) -> None:
    config = SmtpConfig(
        host="localhost",
        starttls=way == "starttls" or None,
        tls=way == "tls",
        ca=trusted.ca,
        username="tocsin",
        password=SecretRef("mail"),
    )
    contexts = {way: trusted.context}
    async with smtp_server(**contexts, login=True) as mailbox:  # type: ignore[arg-type]
        to = target(mailbox, security=config)
        assert (await EmailSender(plotter=undrawn).send(to, notice(issue()))).done is not None
    assert [good for _, good in mailbox.logins] == [True]
    assert all(mailbox.encrypted)


async def test_a_wrong_password_is_final_and_said_in_no_other_words(
    trusted: Authority, undrawn: Plotter
) -> None:
    config = SmtpConfig(
        host="localhost", starttls=True, ca=trusted.ca, username="x", password=SecretRef("mail")
    )
    async with smtp_server(starttls=trusted.context, login=True) as mailbox:
        to = target(mailbox, security=config)
        outcome = await EmailSender(plotter=undrawn).send(to, notice(issue()))
    assert outcome == Outcome(forbidden="535 log-in refused")
    assert mailbox.mails == []


async def test_a_log_in_that_cannot_be_is_final_and_not_left_out(
    trusted: Authority, undrawn: Plotter
) -> None:
    sender = EmailSender(plotter=undrawn)
    config = SmtpConfig(
        host="localhost", starttls=True, ca=trusted.ca, username="x", password=SecretRef("mail")
    )
    async with smtp_server(starttls=trusted.context, without=("LOGIN", "PLAIN")) as mailbox:
        outcome = await sender.send(target(mailbox, security=config), notice(issue()))
        assert outcome.forbidden == (
            "the mail server offers no log-in by user name and password (CRAM-MD5, PLAIN, LOGIN)"
        )
        assert mailbox.mails == []
    for less, what in (
        (config.model_copy(update={"password": SecretRef("gone")}), "password"),
        (config.model_copy(update={"username": SecretRef("gone")}), "user name"),
    ):
        async with smtp_server(starttls=trusted.context) as mailbox:
            outcome = await sender.send(target(mailbox, security=less), notice(issue()))
            assert outcome.forbidden == f"cannot log in: the secret of the {what} is missing"
            assert mailbox.mails == []


async def test_without_trust_or_starttls_nothing_is_sent(
    trusted: Authority, undrawn: Plotter
) -> None:
    sender = EmailSender(plotter=undrawn)
    async with smtp_server(starttls=trusted.context) as mailbox:
        strange = SmtpConfig(host="localhost", starttls=True)
        outcome = await sender.send(target(mailbox, security=strange), notice(issue()))
        assert outcome.failure == "TLS certificate not accepted"
        assert mailbox.mails == []
    async with smtp_server() as plain:
        outcome = await sender.send(
            target(plain, security=SmtpConfig(host="localhost", starttls=True, ca=trusted.ca)),
            notice(issue()),
        )
        assert outcome.forbidden is not None
        assert "no STARTTLS" in outcome.forbidden
        assert plain.mails == []


ACCEPTED = "accepted by the mail server for 1 recipient"


@pytest.mark.parametrize(
    ("faults", "texts", "wanted", "mails"),
    [
        ({"replies": ["421 SECRET: down"]}, ["421 service not available"], "delivered", 1),
        ({"replies": ["451 SECRET"] * 2}, ["451 error in processing"] * 2, "delivered", 1),
        ({"replies": ["452 SECRET"]}, ["452 not enough storage"], "delivered", 1),
        ({"replies": ["550 SECRET"]}, ["550 mailbox not available"], "rejected", 0),
        ({"replies": ["554 SECRET"]}, ["554 refused"], "rejected", 0),
        # Greylisting: the same sender and recipient are let in after some time.
        (
            {"recipients": {"me@example.com": ["450 greylisted SECRET"] * 3}},
            ["450 mailbox not available for now"] * 3,
            "delivered",
            1,
        ),
        (
            {"recipients": {"me@example.com": ["550 SECRET"]}},
            ["550 mailbox not available"],
            "rejected",
            0,
        ),
        # The mail is there, and its answer is lost: the repeat has the same id.
        ({"cut": 2}, ["connection reset"] * 2, "delivered", 3),
    ],
    ids=["421", "451", "452", "550", "554", "greylisting", "unknown", "cut after DATA"],
)
async def test_each_fault_of_a_server_has_its_end(
    undrawn: Plotter, faults: dict[str, Any], texts: list[str], wanted: str, mails: int
) -> None:
    sender = EmailSender(plotter=undrawn)
    outcomes: list[Outcome] = []
    async with smtp_server() as mailbox:
        for name, value in faults.items():
            setattr(mailbox, name, value)
        while not outcomes or state(outcomes[-1]) == "pending":
            given = notice(issue(), attempts=len(outcomes))
            outcomes.append(await sender.send(target(mailbox), given))
    end = [ACCEPTED] if wanted == "delivered" else []
    assert [outcome.text() for outcome in outcomes] == [*texts, *end]
    assert state(outcomes[-1]) == wanted
    assert len(mailbox.mails) == mails
    assert len({mail["Message-ID"] for mail in mailbox.mails}) <= 1


async def test_a_repeat_goes_only_to_those_who_were_not_reached(undrawn: Plotter) -> None:
    sender = EmailSender(plotter=undrawn)
    people = ("a@example.com", "b@example.com", "c@example.com")
    async with smtp_server() as mailbox:
        mailbox.recipients = {people[1]: ["450 later"], people[2]: ["550 no", "550 no"]}
        first = await sender.send(target(mailbox, *people), notice(issue()))
        second = await sender.send(target(mailbox, *people), notice(issue(), attempts=1))
    assert state(first) == "pending"
    assert first.text().startswith("accepted for 1 of 3 recipients; 450")
    assert state(second) == "delivered"
    assert second.text() == "accepted for 2 of 3 recipients; others: 550 mailbox not available"
    assert mailbox.to == [[people[0]], [people[1]]]


async def test_nobody_there_no_such_name_no_answer(undrawn: Plotter) -> None:
    sender = EmailSender(plotter=undrawn, timeout_s=0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        assert (await sender.send(target(Mailbox(port)), notice(issue()))).failure == (
            "connection refused"
        )
        silent.listen()
        assert (await sender.send(target(Mailbox(port)), notice(issue()))).failure == "timeout"
    nowhere = SmtpServer(host="nobody.invalid", port=25, security="none")
    to = EmailTarget(name="mail", to=("me@example.com",), server=nowhere)
    assert (await sender.send(to, notice(issue()))).failure in ("name not found", "timeout")


async def test_a_mail_that_was_taken_is_delivered_however_late_the_farewell_is(
    undrawn: Plotter,
) -> None:
    sender = EmailSender(plotter=undrawn, timeout_s=0.5)
    async with smtp_server() as mailbox:
        mailbox.farewell = asyncio.Event()
        outcome = await sender.send(target(mailbox), notice(issue()))
        mailbox.farewell.set()

    assert outcome.text() == "accepted by the mail server for 1 recipient"
    assert len(mailbox.mails) == 1


async def test_where_nobody_said_which_server_the_failure_says_what_to_set(
    undrawn: Plotter,
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        server = server_of_environment({})
        server = SmtpServer(host="127.0.0.1", port=port, security="none", advice=server.advice)
        to = EmailTarget(name="notify", to=("me@example.com",), server=server)
        outcome = await EmailSender(plotter=undrawn).send(to, notice(issue()))
    assert state(outcome) == "pending"
    assert "TOCSIN_SMTP=smtp://" in outcome.text()


@pytest.mark.parametrize(
    "wrong", [{"onset_ms": 2**60}, {"issue_id": "a\r\nBcc: evil@example.com"}, {"issue_id": ""}]
)
async def test_an_issue_that_no_mail_can_tell_of_is_final(
    undrawn: Plotter, wrong: dict[str, object]
) -> None:
    told = notice(issue())
    event = told.delivery.event
    assert event is not None
    data = event["data"]
    assert isinstance(data, dict)
    broken = told.delivery.model_copy(update={"event": event | {"data": data | wrong}})
    async with smtp_server() as mailbox:
        queue = ReceiverQueue(partial(EmailSender(plotter=undrawn).send, target(mailbox)))
        outcome = await attempted(queue, replace(told, delivery=broken))

    assert outcome.forbidden is not None
    assert next(iter(wrong)) in outcome.forbidden
    assert mailbox.mails == []


@pytest.mark.parametrize("code", ["import time; time.sleep(60)", "raise SystemExit(3)", "print(1)"])
async def test_a_picture_that_fails_drops_no_mail(code: str) -> None:
    plotter = Plotter(timeout_s=0.5, command=(sys.executable, "-c", code))
    async with smtp_server() as mailbox:
        outcome = await EmailSender(plotter=plotter).send(target(mailbox), notice(with_series()))
    assert outcome.done is not None
    found = parts(mailbox.mails[0])
    assert "image/png" not in found
    assert "<img" not in found["text/html"].get_content()
    assert "NaN (step 19); limit 5" in found["text/plain"].get_content()
    alive = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
    assert not any(code in child.cmdline() for child in alive), "the child outlived its time"


@pytest.mark.parametrize(
    "values",
    [
        [1.0, 2.0],
        [math.nan, math.nan],
        [math.inf, -math.inf, 1.0],
        [1e-30, 1e30, 3.0],
        [1e308, -1e308],
        [0.0] * 500,
    ],
)
@pytest.mark.parametrize("limit", [None, math.nan, 5.0])
def test_any_series_can_be_drawn(values: list[float], limit: float | None) -> None:
    series = Series(
        name=r"$\frac{1}{0}$ <loss>",
        steps=tuple(range(len(values))),
        values=tuple(values),
        limit=limit,
    )
    drawing = drawing_of(message_of(with_series(series=series)))
    assert drawing is not None
    assert render(drawing).startswith(b"\x89PNG")


class Tags(HTMLParser):
    """All tags of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: object) -> None:
        self.tags.add(tag)


async def test_what_a_run_says_is_neither_header_nor_html_nor_formula(undrawn: Plotter) -> None:
    evil = "x\r\nBcc: evil@example.com\r\n\r\n<script>alert(1)</script><img src=http://evil/>"
    series = Series(name="=cmd|' /C calc'!A0", steps=(1, 2), values=(1.0, -math.inf))
    bad = with_series(series=series).model_copy(
        update={"reason": evil, "rule": evil[:90], "labels": {evil: evil}, "remedy": evil}
    )
    async with smtp_server() as mailbox:
        assert (
            await EmailSender(plotter=undrawn).send(target(mailbox), notice(bad, did=evil))
        ).done is not None
    (mail,) = mailbox.mails
    assert mail["Bcc"] is None
    assert mailbox.to == [["me@example.com"]]
    assert "\n" not in mail["Subject"]
    found = parts(mail)
    tags = Tags(found["text/html"].get_content()).tags
    assert not tags & {"script", "img"}
    table = found["text/csv"].get_content().splitlines()
    assert table[0].startswith("step,'=cmd")
    assert table[2] == "2,'-Infinity"


def test_where_the_numbers_below_are_seconds_nothing_calls_them_steps() -> None:
    seconds = Series(name="memory", x="s", unit="bytes", steps=(0, 1200), values=(1.0, 2.0))
    message = message_of(with_series(series=seconds))
    (values,) = [row.value for row in message.rows if row.label == "Last values"]
    drawing = drawing_of(message)

    assert values == "memory (bytes): 1 (at 0 s), 2 (at 1,200 s)"
    assert csv_of(seconds) == "second,memory\n0,1.0\n1200,2.0\n"
    assert drawing is not None
    assert (drawing.x, drawing.first_step) == ("s", None)
    assert from_json(to_json(drawing)).x == "s"
    assert render(drawing) != render(replace(drawing, x=None))


def test_only_numbers_begin_with_a_minus_in_the_table() -> None:
    series = Series(name="@x", steps=(1, 2), values=(-1.5, -math.inf))
    assert csv_of(series) == "step,'@x\n1,-1.5\n2,'-Infinity\n"


@pytest.mark.parametrize(
    ("url", "host", "port", "security"),
    [
        ("smtp://mail.example.com", "mail.example.com", 587, "starttls"),
        ("smtps://me:s%40crt@mail.example.com", "mail.example.com", 465, "tls"),
        ("smtp://localhost:1025", "localhost", 1025, "none"),
        ("smtp://relay:25?starttls=no", "relay", 25, "none"),
    ],
)
def test_the_variable_names_a_server(url: str, host: str, port: int, security: str) -> None:
    server = server_of_environment({"TOCSIN_SMTP": url})
    assert (server.host, server.port, server.security) == (host, port, security)
    if "@" in url:
        assert server.password is not None
        assert server.password.get_secret_value() == "s@crt"


@pytest.mark.parametrize(
    "url",
    [
        "mail.example.com",
        "http://SECRET@x",
        "smtp://",
        "smtp://me@x",
        "smtp://x:99999",
        "smtp://x?tls=SECRET",
        "smtp://me:SECRET@relay?starttls=no",
    ],
)
def test_a_bad_variable_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ConfigurationError, match="TOCSIN_SMTP: ") as caught:
        server_of_environment({"TOCSIN_SMTP": url})
    assert "SECRET" not in str(caught.value)


async def test_no_secret_is_in_an_outcome_or_a_log(
    trusted: Authority, undrawn: Plotter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    config = SmtpConfig(
        host="localhost", starttls=True, ca=trusted.ca, username="x", password=SecretRef("mail")
    )
    shown = []
    async with smtp_server(starttls=trusted.context, login=True) as mailbox:
        to = target(mailbox, security=config)
        shown.append(repr(to))
        shown.append(repr(await EmailSender(plotter=undrawn).send(to, notice(issue()))))
    shown += [record.getMessage() for record in caplog.records if "mail.log" not in record.name]
    assert "SECRET" not in "\n".join(shown)
