"""The helper is killed while the mail server is down: with both back, the mail comes once.

Where a process dies between the server's answer and the ledger, the mail is repeated, and says so
by its Message-ID.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from support.processes.forking import Forked
from support.processes.site import SCRIPTS, Site, helpers_of
from support.records.issues import TOPICS, issue, issue_record
from support.servers.smtp_server import Mailbox, hold_port, smtp_server, smtp_thread
from support.waiting import wait_until
from tocsin.actions.receivers.notify_option import parse_addresses
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import Partition
from tocsin.runtime.testing import CRASH_AT
from tocsin.schemas.ids import delivery_id
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.events import EVENT_TYPES
from tocsin.schemas.topics import issue_partition

TESTS = Path(__file__).parents[2]

CONFIG = """\
version: 1
bus: {{url: "{url}"}}
receivers:
  mail:
    type: email
    to: [me@example.com]
    sender: tocsin@example.com
    smtp: {{host: 127.0.0.1, port: {port}, starttls: false}}
rules:
  - nonfinite: [mail]
"""


def mail_delivery(site: Site, run_id: str) -> Delivery | None:
    """The newest state of the run's mail, from the bus."""
    newest: Delivery | None = None
    for record in site.records([Partition(TOPICS.actions, issue_partition(run_id))]):
        if record.value is not None:
            data = EVENT_TYPES.decode(record.value).data
            if isinstance(data, Delivery) and data.action == "mail":
                newest = data
    return newest


def test_a_mail_outlives_its_helper_and_the_servers_absence(embedded_site: Site) -> None:
    held, run_id = hold_port(), "mailed"
    port = held.getsockname()[1]
    embedded_site.config.write_text(CONFIG.format(url=embedded_site.bus_url, port=port))
    running = embedded_site.start(
        sys.executable, str(SCRIPTS / "tiny_cnn.py"), "--steps", "100000",
        "--fault", "nan_batch", "--fault-at", "30", run_id=run_id,
    )  # fmt: skip

    def tried() -> bool:
        delivery = mail_delivery(embedded_site, run_id)
        return delivery is not None and delivery.attempts >= 1

    def delivered() -> bool:
        delivery = mail_delivery(embedded_site, run_id)
        return delivery is not None and delivery.final

    try:
        wait_until(tried, timeout_s=90, what="the first attempt")
        before = mail_delivery(embedded_site, run_id)
        assert before is not None
        assert before.state == "pending"
        assert before.last_attempts[0].result == "connection refused"
        for helper in helpers_of(running):
            helper.kill()
        with smtp_thread(held) as mailbox:
            wait_until(delivered, timeout_s=90, what="the mail is final")
            running.process.terminate()
            finished = running.finish()
    finally:
        if running.process.poll() is None:
            running.process.kill()
            running.process.communicate(timeout=20)

    after = mail_delivery(embedded_site, run_id)
    assert after is not None
    assert (after.delivery_id, after.state) == (before.delivery_id, "delivered"), finished
    assert [mail["Message-ID"] for mail in mailbox.mails] == [f"<{after.delivery_id}@example.com>"]
    (mail,) = mailbox.mails
    assert mail["Subject"].startswith("[tocsin] nonfinite in mailed at step 3"), mail["Subject"]


async def worker(bus: Path, mailbox: Mailbox, keys: Path, crash_at: str | None = None) -> int:
    environ = {**os.environ, "PYTHONPATH": str(TESTS)}
    environ["TOCSIN_SMTP"] = f"smtp://127.0.0.1:{mailbox.port}"
    environ.pop(CRASH_AT, None)
    if crash_at is not None:
        environ[CRASH_AT] = crash_at
    command = (f"embedded:{bus}", "mailto:me@example.com", str(keys), "run-1", "30")
    child = Forked([sys.executable, "-m", "support.processes.actions", *command], env=environ)
    return await asyncio.to_thread(child.wait, 60)


@pytest.mark.parametrize(("point", "mails"), [("attempting:1", 1), ("attempted:1", 2)])
async def test_a_repeat_has_the_message_id_of_the_first(
    tmp_path: Path, point: str, mails: int
) -> None:
    found = issue(severity="warning", stop_worthy=False)
    async with smtp_server() as mailbox, EmbeddedBus(tmp_path / "bus.db") as bus:
        await bus.init(TOPICS.specs())
        producer = await bus.producer()
        await producer.publish([issue_record(found)])
        await producer.close()

        assert await worker(bus.path, mailbox, tmp_path / "keys", point) == 137
        assert await worker(bus.path, mailbox, tmp_path / "keys") == 0

        assert len(mailbox.mails) == mails
        (identity,) = {str(mail["Message-ID"]) for mail in mailbox.mails}
        (name,) = parse_addresses(["mailto:me@example.com"])
        assert identity == f"<{delivery_id(found.issue_id, name, 'firing')}@tocsin.invalid>"
