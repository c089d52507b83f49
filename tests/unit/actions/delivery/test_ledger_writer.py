"""The writer of the ledger knows its own entries when it reads them back."""

from __future__ import annotations

from support.records.issues import NOW_MS, TOPICS, delivery, issue
from tocsin.actions.delivery.failure_reports import FailureReports
from tocsin.actions.delivery.ledger_writer import LedgerWriter
from tocsin.actions.delivery.records import delivery_record
from tocsin.actions.ledger.ledger import Ledger
from tocsin.bus.port import Outgoing, Record
from tocsin.runtime.metrics import Metrics


def read_back(made: Outgoing) -> Record:
    return Record(made.partition, 1, NOW_MS, made.key, made.value, made.headers)


def writer() -> LedgerWriter:
    return LedgerWriter(Ledger(), TOPICS, FailureReports(), Metrics())


def test_it_knows_what_it_wrote_and_nothing_else() -> None:
    mine, other = writer(), writer()
    for one in (mine, other):
        one.publish(delivery(issue()), NOW_MS)
    (own,), (theirs,) = mine.drain(), other.drain()
    assert mine.wrote(read_back(own))
    assert not mine.wrote(read_back(theirs))
    # Whoever sends a delivery once more, by hand, names no writer.
    assert not mine.wrote(read_back(delivery_record(TOPICS, delivery(issue()))))


def test_once_partitions_were_given_up_its_entries_are_news_again() -> None:
    mine = writer()
    mine.publish(delivery(issue()), NOW_MS)
    (before,) = mine.drain()
    mine.release()
    assert not mine.wrote(read_back(before))
    mine.publish(delivery(issue()), NOW_MS)
    (since,) = mine.drain()
    assert mine.wrote(read_back(since))
