"""What appending a batch leaves behind: against the same records, one by one."""

from __future__ import annotations

import sqlite3

from hypothesis import given, settings
from hypothesis import strategies as st

from tocsin.bus.embedded.log import append
from tocsin.bus.embedded.tables import SCHEMA, TopicCatalogue, create_topics
from tocsin.bus.port import Outgoing, Partition
from tocsin.schemas.topics import Topics

TOPICS = Topics()
NOW_MS = 1_800_000_000_000
TABLES = {
    "records": "id, append_ms, key, headers, value",
    "newest": "partition, key, id",
    "doomed": "due_ms, id",
    "partitions": "id, next_offset, last_ms, records, size_bytes",
}
RECORDS = st.lists(
    st.builds(
        lambda topic, key, value, headers: Outgoing(
            Partition(topic, 0), b"k%d" % key, value, (("h", b"x" * headers),)
        ),
        st.sampled_from([TOPICS.actions, TOPICS.issues]),
        st.integers(0, 30),
        st.sampled_from([b"1", b"two", None]),
        st.sampled_from([0, 5, 2_000]),
    ),
    min_size=1,
    max_size=150,
)


def contents(batches: list[tuple[int, list[Outgoing]]]) -> dict[str, list[tuple[object, ...]]]:
    """All rows of a bus after these were appended, each batch at its time."""
    db = sqlite3.connect(":memory:", isolation_level=None)
    db.executescript(SCHEMA)
    create_topics(db, TOPICS.specs())
    catalogue = TopicCatalogue()
    for now_ms, records in batches:
        append(db, catalogue, records, now_ms)
    found = {
        table: db.execute(f"SELECT {columns} FROM {table} ORDER BY 1, 2").fetchall()
        for table, columns in TABLES.items()
    }
    db.close()
    return found


@settings(max_examples=25, deadline=None)
@given(RECORDS, RECORDS)
def test_a_batch_is_as_its_records_one_by_one(
    first: list[Outgoing], second: list[Outgoing]
) -> None:
    batches = [(NOW_MS, first), (NOW_MS + 10, second)]
    alone = [(at_ms, [one]) for at_ms, records in batches for one in records]
    found = contents(batches)
    assert found == contents(alone)
    assert len(found["records"]) == len(first) + len(second)
