"""A digest in the form of each kind of receiver, and which kinds take none."""

from __future__ import annotations

import json

import pytest

from support.records.issues import NOW_MS
from tocsin.actions.config import receiver_problems
from tocsin.actions.delivery.receiver_queues import Notice
from tocsin.actions.digests.intervals import ALL_RUNS, DigestReceiver, DueDigest, digest_entry
from tocsin.actions.receivers.aws import event_text
from tocsin.actions.receivers.chat.sender import body_of
from tocsin.actions.receivers.email.body import Envelope, html_of, mail_of
from tocsin.actions.receivers.message import message_for
from tocsin.actions.receivers.registry import ReceiverKinds
from tocsin.actions.receivers.sms.sender import sms_text
from tocsin.actions.receivers.templates.config import TemplateConfig
from tocsin.actions.receivers.templates.template import compile_template, words_of
from tocsin.actions.receivers.webhook.bodies import binary, structured
from tocsin.schemas.configuration.file import SectionRegistry, check_config
from tocsin.schemas.records.digests import MAX_RUNS, Digest, DigestRun

HOUR_MS = 3_600_000
DUE = DueDigest.last("mail", ALL_RUNS, 24 * HOUR_MS, NOW_MS)
EVIL = "<b>@all</b>"


def digest_notice(**more: object) -> Notice:
    runs = tuple(
        DigestRun(run_id=f"gpt-{number}", state="running", last_step=1200, last_loss=0.25)
        for number in range(MAX_RUNS)
    )
    fields = {"receiver": "mail", "from_ms": DUE.from_ms, "until_ms": DUE.until_ms, "runs": runs}
    digest = Digest.model_validate({**fields, **more})
    to = DigestReceiver("email", 24 * HOUR_MS, f"tocsin.yaml:4:5 {EVIL}")
    return Notice(digest_entry(DUE, digest, to, None, NOW_MS), NOW_MS)


def test_mail_names_the_runs_and_answers_no_other_mail() -> None:
    message = message_for(digest_notice(more_runs=4, suppressed={"silence": 2}))
    envelope = Envelope(
        sender="a@b.example", to=["c@d.example"], delivery_id=DUE.delivery_id, sent_ms=NOW_MS
    )
    mail = mail_of(message, envelope)

    assert mail["Subject"] == "[tocsin] digest of 24h"
    assert "In-Reply-To" not in mail
    assert "X-Tocsin-Issue" not in mail
    text = message.text()
    assert text.startswith("DIGEST: All is well: 24 runs, nothing wrong\n")
    assert text.count("Run: ") == MAX_RUNS + 1
    assert "and 4 more: tocsin status" in text
    assert "2 (silence)" in text
    page = html_of(message, None)
    assert "DIGEST" in page
    assert EVIL not in page


def test_chat_and_short_messages_say_it_in_few_words() -> None:
    message = message_for(digest_notice(more_runs=4))
    assert body_of(message).startswith("All is well: 24 runs, nothing wrong\nFrom: ")
    assert len(body_of(message)) <= 1_500
    assert sms_text(message) == "tocsin DIGEST 24h: All is well: 24 runs, nothing wrong."


def test_what_is_not_well_is_not_called_so() -> None:
    headlines = [
        message_for(digest_notice(**more)).headline
        for more in ({"issues": 2}, {"issues": 2, "open": 1})
    ]
    assert headlines == [
        "20 runs, 2 issues, not sent here",
        "20 runs, 1 open issue, nothing else was sent here",
    ]


def test_programs_get_its_event() -> None:
    given = digest_notice()
    bodies = [json.loads(text) for text in (structured(given).content, event_text(given))]
    for event in bodies:
        assert (event["type"], event["occasion"]) == ("tocsin.digest", "digest")
        assert event["id"] == DUE.delivery_id
        assert len(event["data"]["runs"]) == MAX_RUNS
    assert binary(given).headers["ce-type"] == "tocsin.digest"


def test_a_text_of_the_users_own_is_about_issues_and_leaves_it_alone() -> None:
    template = compile_template(TemplateConfig(text="{headline}"), str)
    assert words_of(template, digest_notice(), "standard") == "standard"


@pytest.mark.parametrize(
    ("receiver", "problem"),
    [
        ("{type: email, to: [a@b.example], digest: 24h}", ""),
        ("{type: email, to: [a@b.example], digest: 1m}", "expected at least 10m"),
        ("{type: chat, url: 'slack://a/b/c', digest: 12h}", ""),
        ("{type: webhook, url: 'https://e.example/x', digest: 24h}", ""),
        (
            "{type: webhook, url: 'https://e.example/x', body: alertmanager-v4, digest: 24h}",
            "this receiver of the type webhook cannot show a digest",
        ),
        (
            "{type: webhook, url: 'https://e.example/x', template: {text: '1'}, digest: 24h}",
            "this receiver of the type webhook cannot show a digest",
        ),
        (
            "{type: alertmanager, url: 'https://e.example/', digest: 24h}",
            "this receiver of the type alertmanager cannot show a digest",
        ),
        (
            "{type: pagerduty, routing_key: {secret: k}, digest: 24h}",
            "this receiver of the type pagerduty cannot show a digest",
        ),
    ],
)
def test_who_takes_digests(receiver: str, problem: str) -> None:
    kinds = ReceiverKinds()
    registry = SectionRegistry(kinds)
    registry.register("receivers", receiver_problems(kinds))
    text = f"version: 1\nsecrets: {{k: {{env: K}}}}\nreceivers:\n  a: {receiver}\n"

    _, problems = check_config(text, "tocsin.yaml", registry)

    assert [one.message for one in problems] == ([problem] if problem else [])
