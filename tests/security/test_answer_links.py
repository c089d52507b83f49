"""Links in messages: who can answer with them, to what, and how often."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from support.actions.virtual_actions import VirtualActions
from support.records.issues import TOPICS, delivery, issue, issue_record, record
from support.records.signed import signed_record
from tocsin.actions.decision.retry import Outcome
from tocsin.actions.delivery.answer_links import LASTS, AnswerLinks
from tocsin.actions.delivery.receiver_queues import Notice
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import Outgoing, Partition, Record
from tocsin.console.links.page import POLICY
from tocsin.console.links.server import LinkPages
from tocsin.console.views.bus_view import read_all
from tocsin.runtime import metrics as names
from tocsin.runtime.http import HttpEndpoints
from tocsin.runtime.prometheus_metrics import PrometheusMetrics
from tocsin.runtime.testing import FakeClock
from tocsin.schemas.key_folder import keys_folder, own_key
from tocsin.schemas.links import PATH, Link, LinkVerb, read_link
from tocsin.schemas.records.deliveries import DRILL, Approval, Delivery
from tocsin.schemas.records.events import Event
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.silences import SilenceSet
from tocsin.schemas.records.stops.control import StopAnswered
from tocsin.schemas.records.wire import read_event
from tocsin.schemas.signing import SigningKey, TrustedKeys
from tocsin.schemas.topics import ISSUE_PARTITIONS, issue_partition

HOST = "tocsin.example.com"
URL = f"https://{HOST}/ml"
NOW_MS = 1_795_258_012_300
HOSTILE = "</style><script>alert(1)</script>\r\nSet-Cookie: a=b\x1b[31m\u202e<img src=x>"
TOKEN = re.compile(r'name="token" value="([^"]+)"><button class="([a-z-]+)"')


def waiting_stop(about: IssueFiring, quorum: int = 1) -> Delivery:
    """A stop that people must approve."""
    asks = Approval(why="mode: ask", until_ms=NOW_MS + 600_000, quorum=quorum)
    return delivery(about, "stop", approval=asks, next_attempt_ms=NOW_MS + 600_000)


def delivery_record(made: Delivery) -> Outgoing:
    """Its entry on the bus."""
    event = Event.wrap(made, id=made.delivery_id, source="/actions", time_ms=NOW_MS)
    return record(event, TOPICS.actions, issue_partition(made.run_id), made.key)


class Site:
    """A bus with an issue, and the pages of a worker."""

    def __init__(self, bus: EmbeddedBus, folder: Path) -> None:
        self.bus = bus
        self.environ = {"XDG_CONFIG_HOME": str(folder / "config")}
        self.key = own_key(keys_folder(self.environ))
        self.trusted = TrustedKeys([self.key.public])
        self.clock = FakeClock(NOW_MS)
        self.metrics = PrometheusMetrics()
        self.public_url: str | None = URL
        self.base = ""

    @asynccontextmanager
    async def serving(self, idle_s: float = 30.0) -> AsyncIterator[Site]:
        """Until the end: a worker that has just started."""
        pages = LinkPages(
            self.bus,
            TOPICS,
            public_url=lambda: self.public_url,
            trusted=lambda: self.trusted,
            environ=self.environ,
            metrics=self.metrics,
            clock=self.clock,
        )
        endpoints = HttpEndpoints("127.0.0.1", 0, self.metrics, pages=pages.add_to, idle_s=idle_s)
        running = asyncio.create_task(endpoints.run())
        await endpoints.listening.wait()
        self.base = f"http://127.0.0.1:{endpoints.port}"
        try:
            yield self
        finally:
            endpoints.stop()
            await running

    async def put(self, *records: Outgoing) -> None:
        """Put records on the bus."""
        producer = await self.bus.producer()
        await producer.publish(records)
        await producer.close()

    async def records(self) -> list[Record]:
        """All that is on the topics that answers are written to."""
        partitions = [
            Partition(topic, number)
            for topic in (TOPICS.issues, TOPICS.control)
            for number in range(ISSUE_PARTITIONS)
        ]
        return [one async for one in read_all(self.bus, partitions)]

    async def decisions(self) -> list[object]:
        """What people have decided, each once."""
        found = {}
        for one in await self.records():
            event = read_event(one)
            if event is not None and not isinstance(event.data, IssueFiring):
                found[event.id] = event.data
        return list(found.values())

    def link(self, about: IssueFiring, person: str = "ml-mail", verb: LinkVerb = "open") -> Link:
        """The link of a page."""
        return Link(
            verb=verb,
            run_id=about.run_id,
            incarnation=about.incarnation,
            issue_id=about.issue_id,
            person=person,
            until_ms=NOW_MS + 60_000,
        )

    async def ask(
        self,
        path: str,
        token: str | None = None,
        *,
        host: str = HOST,
        method: str = "",
        body: bytes | None = None,
    ) -> tuple[int, str, aiohttp.ClientResponse]:
        """One request: a POST with the token of a button, or else a GET."""
        data = {"token": token} if token is not None else body
        kind = method or ("GET" if data is None else "POST")
        async with (
            aiohttp.ClientSession() as session,
            session.request(
                kind, self.base + path, data=data, headers={"Host": host}, allow_redirects=False
            ) as answer,
        ):
            return answer.status, await answer.text(), answer

    async def buttons(self, path: str) -> dict[str, str]:
        """The tokens of the buttons on a page, by what they do."""
        status, text, _ = await self.ask(path)
        assert status == 200, text
        return {verb: token for token, verb in TOKEN.findall(text)}

    def path(self, link: Link, key: SigningKey | None = None) -> str:
        """Where a link leads to."""
        return PATH + link.token(key or self.key)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    """A site with an issue whose stop waits for two people."""
    async with EmbeddedBus(tmp_path / "bus.db") as bus:
        await bus.init(TOPICS.specs())
        made = Site(bus, tmp_path)
        await made.put(issue_record(issue()), delivery_record(waiting_stop(issue(), quorum=2)))
        async with made.serving():
            yield made


async def test_a_get_shows_and_changes_nothing(site: Site) -> None:
    before = await site.records()
    path = site.path(site.link(issue()))
    for method in ("GET", "HEAD", "GET"):
        assert (await site.ask(path, method=method))[0] == 200
    buttons = await site.buttons(path)
    assert set(buttons) == {"approve", "reject", "ack", "resolve", "false-alarm", "silence"}
    # A scanner that fetches what a page's tokens name finds no page there.
    for token in buttons.values():
        assert (await site.ask(PATH + token))[0] == 404
    assert await site.records() == before
    assert site.metrics.value(names.LINKS, result="answered") == 0


async def test_each_button_writes_the_record_of_its_command(site: Site) -> None:
    path = site.path(site.link(issue()))
    for verb, token in (await site.buttons(path)).items():
        if verb != "approve":
            assert (await site.ask(path, token))[0] == 200, verb
    found = await site.decisions()
    (rejected,) = [one for one in found if isinstance(one, StopAnswered)]
    others = [one for one in found if one is not rejected]
    assert (rejected.verdict, rejected.by) == ("reject", "ml-mail")
    (silence,) = [one for one in others if isinstance(one, SilenceSet)]
    assert silence.match == {"run": ("run-1",), "rule": ("nonfinite",)}
    assert (silence.until_ms - NOW_MS, silence.mutes) == (3_600_000, ("notify",))
    assert {type(one).__name__ for one in others} == {
        "FeedbackAcknowledged", "FeedbackResolved", "FeedbackFalseAlarm", "SilenceSet",
    }  # fmt: skip
    # All that is on the control topic is signed by the key of this worker.
    for one in await site.records():
        if one.partition.topic == TOPICS.control:
            assert one.header("tocsin-key-id") == site.key.public.key_id.encode()


async def test_a_button_counts_once_also_after_a_restart(site: Site) -> None:
    path = site.path(site.link(issue()))
    tokens = await site.buttons(path)
    for verb in ("approve", "ack", "silence"):
        assert (await site.ask(path, tokens[verb]))[0] == 200
        assert (await site.ask(path, tokens[verb]))[0] == 409
    seen = len(await site.decisions())
    async with site.serving():
        for verb in ("approve", "ack", "silence"):
            assert (await site.ask(path, tokens[verb]))[0] == 409
        assert set(await site.buttons(path)) == {"reject", "resolve", "false-alarm"}
    assert len(await site.decisions()) == seen == 3


async def test_a_link_that_nobody_we_trust_has_signed_opens_nothing(site: Site) -> None:
    link = site.link(issue())
    stranger = site.path(link, SigningKey.generate())
    good = site.path(link)
    changed = good[:-20] + ("a" if good[-20] != "a" else "b") + good[-19:]
    for path in (stranger, changed, good[:-1], good + "0", PATH + "x" * 2_500, PATH + "%2e%2e"):
        assert (await site.ask(path))[0] == 404, path
        assert (await site.ask(path, link.token(site.key)))[0] == 404, path
    (token,) = [t for v, t in (await site.buttons(good)).items() if v == "ack"]
    forged = read_link(token, site.trusted, NOW_MS).token(SigningKey.generate())
    assert (await site.ask(good, forged))[0] == 404
    assert await site.decisions() == []


async def test_a_signed_command_is_no_link_and_a_link_no_command(site: Site) -> None:
    link = site.link(issue(), verb="approve")
    data = StopAnswered(
        run_id="run-1", incarnation=issue().incarnation, delivery_id="d", verdict="approve",
        by="ana", at_ms=1,
    )  # fmt: skip
    made = signed_record(data, data.key.encode(), site.key)
    signature = dict(made.headers)["tocsin-signature"].decode().rstrip("=")
    token = signature.replace("+", "-").replace("/", ".") + link.token(site.key)[86:]
    assert (await site.ask(PATH + token))[0] == 404


async def test_an_old_link_neither_shows_nor_acts(site: Site) -> None:
    path = site.path(site.link(issue()))
    tokens = await site.buttons(path)
    site.clock.advance(ms=60_000)
    assert (await site.ask(path))[0] == 410
    assert (await site.ask(path, tokens["approve"]))[0] == 410
    assert await site.decisions() == []


async def test_a_button_works_only_on_its_own_page(site: Site) -> None:
    other = issue("run-2")
    await site.put(issue_record(other), delivery_record(waiting_stop(other)))
    mine, theirs = site.path(site.link(issue())), site.path(site.link(other))
    bob = site.path(site.link(issue(), person="bob"))
    tokens = await site.buttons(mine)
    for page in (theirs, bob):
        assert (await site.ask(page, tokens["approve"]))[0] == 403
    # The token of a page is no button, and that of a button no page.
    assert (await site.ask(mine, mine.removeprefix(PATH)))[0] == 403
    assert (await site.ask(PATH + tokens["ack"], tokens["approve"]))[0] == 404
    # An answer about a stop of another incarnation finds none.
    again = site.path(site.link(issue(training=1)))
    assert (await site.ask(again))[0] == 404
    assert await site.decisions() == []


async def test_two_links_of_two_people_are_two_and_one_clicked_twice_is_one(site: Site) -> None:
    trusted = site.trusted
    actions = VirtualActions(
        {"ml": lambda notice: Outcome(status=200)},
        more="defaults: {mode: ask}\n",
        stops=lambda notice: Outcome(sent=True),
        trusted=trusted,
    )
    await actions.take(issue())
    (stop,) = actions.last("stop")
    assert stop.approval is not None
    two = stop.approval.model_copy(update={"quorum": 2})
    stop = stop.model_copy(update={"approval": two, "updated_ms": stop.updated_ms + 1})
    await actions.follow(delivery_record(stop))
    await site.put(delivery_record(stop))

    async def click(person: str) -> list[int]:
        path = site.path(site.link(issue(), person=person))
        token = (await site.buttons(path))["approve"]
        seen = {(one.partition, one.offset) for one in await site.records()}
        statuses = [(await site.ask(path, token))[0] for _ in range(2)]
        fresh = [one for one in await site.records() if (one.partition, one.offset) not in seen]
        await actions.follow(*[one for one in fresh if one.partition.topic == TOPICS.control])
        return statuses

    assert await click("ana-mail") == [200, 409]
    (stop,) = actions.last("stop")
    assert stop.waits_for_people
    assert stop.approval is not None
    assert stop.approval.by == ("ana-mail",)
    assert await click("bob-chat") == [200, 409]
    (stop,) = actions.last("stop")
    assert not stop.waits_for_people
    assert stop.approval is not None
    assert stop.approval.by == ("ana-mail", "bob-chat")


async def test_no_text_of_a_run_becomes_markup_or_a_header(site: Site) -> None:
    evil = issue("run-3").model_copy(
        update={"reason": HOSTILE, "rule": HOSTILE[:90], "labels": {"a<b": HOSTILE}}
    )
    await site.put(issue_record(evil))
    status, text, answer = await site.ask(site.path(site.link(evil, person=HOSTILE[:50])))
    assert status == 200
    assert not re.search(r"<(script|img)", text)
    assert text.count("</style>") == 1
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "Set-Cookie" not in answer.headers


async def test_a_rules_name_with_a_pattern_silences_no_other_rule(site: Site) -> None:
    evil = issue("run-4").model_copy(update={"rule": "*"})
    await site.put(issue_record(evil))
    path = site.path(site.link(evil))
    assert (await site.ask(path, (await site.buttons(path))["silence"]))[0] == 200
    (silence,) = await site.decisions()
    assert isinstance(silence, SilenceSet)
    assert silence.match["rule"] == ("[*]",)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "rebound.test", f"{HOST}.attacker.test", f"{HOST}:9464", "x" * 300]
)
async def test_another_name_is_refused_so_that_a_rebound_one_is(site: Site, host: str) -> None:
    path = site.path(site.link(issue()))
    tokens = await site.buttons(path)
    assert (await site.ask(path, host=host))[0] == 421
    assert (await site.ask(path, tokens["ack"], host=host))[0] == 421
    assert (await site.ask(path, host=f"{HOST.upper()}:443"))[0] == 200
    assert await site.decisions() == []


async def test_nothing_is_served_once_the_configuration_names_no_url(site: Site) -> None:
    site.public_url = None
    assert (await site.ask(site.path(site.link(issue()))))[0] == 404


async def test_other_methods_and_bodies_are_refused_with_the_same_headers(site: Site) -> None:
    path = site.path(site.link(issue()))
    methods = ("PUT", "DELETE", "PATCH", "OPTIONS")
    found = {method: await site.ask(path, method=method) for method in methods}
    assert {status for status, _, _ in found.values()} == {405}
    big = b"token=" + b"a" * 9_000
    form = "application/x-www-form-urlencoded"
    for body, kind, expected in (
        (b"{}", "application/json", 415),
        (b"--x\r\n\r\n", "multipart/form-data; boundary=x", 415),
        (b"token=\xff", form, 400),
        (b"a=b&c=d&token=e", form, 400),
        (b"token=a&token=b", form, 400),
        (big, form, 413),
    ):
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                site.base + path, data=body, headers={"Host": HOST, "Content-Type": kind}
            ) as answer,
        ):
            assert answer.status == expected, body[:20]
            found[str(body[:20])] = (answer.status, "", answer)
    found["GET"] = await site.ask(path)
    for _, _, answer in found.values():
        assert answer.headers["Content-Security-Policy"] == POLICY
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert answer.headers["Cache-Control"] == "no-store"
    assert "script" not in POLICY
    assert "default-src 'none'" in POLICY
    assert await site.decisions() == []


async def test_a_client_that_never_ends_its_request_is_cut_off(site: Site) -> None:
    async with site.serving(idle_s=0.05):
        host, port = site.base.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as slow:
            slow.sendall(b"GET / HTTP/1.1\r\nHost: ")
            assert await asyncio.to_thread(slow.recv, 100) == b""


def test_who_gets_a_link() -> None:
    key = SigningKey.generate()
    links = AnswerLinks(URL, key)
    entry = delivery(issue(), "ml-mail")
    url = links.url(entry)
    assert url == links.url(entry.model_copy(update={"attempts": 3}))
    link = read_link(url.removeprefix(URL + PATH), TrustedKeys([key.public]), NOW_MS)
    assert (link.verb, link.person, link.issue_id) == ("open", "ml-mail", issue().issue_id)
    assert link.until_ms - NOW_MS == LASTS.total_seconds() * 1000
    week_later = NOW_MS + 7 * 86_400_000
    redriven = entry.model_copy(update={"redrives": 1, "redriven_ms": week_later})
    url_then = links.url(redriven)
    assert url_then == links.url(redriven.model_copy(update={"attempts": 3}))
    link = read_link(url_then.removeprefix(URL + PATH), TrustedKeys([key.public]), week_later)
    assert link.until_ms - week_later == LASTS.total_seconds() * 1000
    assert links.url(entry.model_copy(update={"issue_state": "resolved"})) == ""
    assert links.url(entry.model_copy(update={"occasion": DRILL})) == ""
    assert AnswerLinks(None, key).url(entry) == ""
    left_out = AnswerLinks(URL, key, without=["ml-mail"])
    assert (left_out.url(entry), bool(left_out.url(delivery(issue(), "ml-chat")))) == ("", True)
    # No chat changes a character of it, no mail program breaks it, and it is not too long.
    assert re.fullmatch(r"https://[A-Za-z0-9./-]+", url)
    assert len(url) < 500
    assert Notice(entry, NOW_MS).answer_url(entry) == ""
