"""Short messages through Twilio, against a receiver with its documented shape."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import SecretStr

from support.actions.notices import notice
from support.records.issues import issue
from support.servers.certificates import authority
from support.servers.chat_services import HOSTS, chat_services
from tocsin.actions.decision.retry import Outcome
from tocsin.actions.receivers.address_guard import AddressGuard
from tocsin.actions.receivers.chat.apprise_process import AppriseProcess, Place
from tocsin.actions.receivers.kind import ReceiverContext
from tocsin.actions.receivers.sms.config import SmsReceiver
from tocsin.actions.receivers.sms.kind import Sms
from tocsin.actions.receivers.sms.sender import SmsSender, SmsTarget
from tocsin.console.context import section_registry
from tocsin.schemas.configuration.file import check_config
from tocsin.schemas.errors import ConfigurationError

ACCOUNT = "AC" + "0" * 32
CONFIG = SmsReceiver.model_validate(
    {
        "type": "sms",
        "to": ["+4915112345678", "+14155550100"],
        "twilio": {"account": ACCOUNT, "token": {"secret": "t"}, "sender": "+14155550199"},
        "template": {"text": "{word}: {rule} in {run}. {remedy}" + " more" * 80},
    }
)


def context(folder: Path, **secrets: str) -> ReceiverContext:
    wrapped = {name: SecretStr(value) for name, value in secrets.items()}
    guard = AddressGuard(private=True)
    return ReceiverContext(secrets=wrapped, guard=guard, folder=folder, environ={})


@pytest.mark.slow  # a Python that imports apprise, for each number
async def test_each_number_gets_the_text_in_two_parts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    trusted = authority(tmp_path, *HOSTS)
    target = Sms().target("pager", CONFIG, context(tmp_path, t="SECRET0123456789"))
    assert target is not None
    async with chat_services(trusted.context) as services:
        place = Place(connect_to=services.connect_to, ca=trusted.ca)
        sender = SmsSender(AppriseProcess(AddressGuard(private=True), place=place))
        outcome = await sender.send(target, notice(issue(), kind="sms"))
        assert outcome.text() == "accepted by Twilio for 2 numbers"
        assert [body["To"] for _, body in services.seen] == ["+4915112345678", "+14155550100"]
        for path, body in services.seen:
            assert path == f"api.twilio.com/2010-04-01/Accounts/{ACCOUNT}/Messages.json"
            assert body["From"] == "+14155550199"
            assert body["Body"].startswith("CRITICAL: nonfinite in run-1. ")
            assert len(body["Body"]) == 306
        services.status = 400
        one = replace(target, to=target.to[:1])
        refused = await sender.send(one, notice(issue("run-2"), kind="sms"))
    assert refused.text() == "400 Bad Request"
    assert "SECRET" not in f"{target!r} {outcome!r} {refused!r} {caplog.text}"


async def test_a_number_that_is_refused_for_good_holds_up_no_other() -> None:
    class Twilio(AppriseProcess):
        async def deliver(self, url: str, title: str, body: str) -> Outcome:
            good = url.endswith("78")
            return Outcome(status=201 if good else 400, phrase="" if good else "Bad Request")

    sender = SmsSender(Twilio(AddressGuard(private=True)))
    target = SmsTarget(
        name="pager", to=CONFIG.to, twilio=SecretStr("twilio://account:token@sender")
    )
    outcome = await sender.send(target, notice(issue(), kind="sms"))
    assert outcome.done == "accepted for 1 of 2 numbers; others: 400 Bad Request"


def test_without_its_token_it_is_left_out(tmp_path: Path) -> None:
    assert Sms().target("pager", CONFIG, context(tmp_path)) is None


def test_a_token_that_is_none_is_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="receiver 'pager': expected the token") as caught:
        Sms().target("pager", CONFIG, context(tmp_path, t="SECRET@host/"))
    assert "SECRET" not in str(caught.value)


def test_twilio_or_aws_but_not_both() -> None:
    twilio = f"{{account: {ACCOUNT}, token: {{secret: t}}, sender: '+14155550199'}}"
    text = f"""version: 1
secrets: {{t: {{env: T}}}}
receivers:
  a: {{type: sms, to: ["+14155550100"], region: eu-central-1, twilio: {twilio}}}
"""
    _, problems = check_config(text, "tocsin.yaml", section_registry())
    assert [one.line for one in problems] == [4]
    assert "either 'twilio', or 'region'" in problems[0].message
