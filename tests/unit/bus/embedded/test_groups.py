"""Who gets which partition, and whose claim counts."""

from __future__ import annotations

import os
import subprocess

from hypothesis import given
from hypothesis import strategies as st

from tocsin.bus.embedded.groups import share_out
from tocsin.bus.embedded.leases import is_live, this_process
from tocsin.bus.port import Partition

NAMES = st.text("abcdef", min_size=1, max_size=4)


@given(
    st.dictionaries(NAMES, st.lists(st.sampled_from(["t", "u"]), unique=True), max_size=6),
    st.integers(1, 50),
    st.integers(1, 50),
)
def test_each_partition_has_exactly_one_of_its_readers(
    members: dict[str, list[str]], of_t: int, of_u: int
) -> None:
    shares = share_out(members, {"t": of_t, "u": of_u})

    owners: dict[Partition, list[str]] = {}
    for member, share in shares.items():
        for partition in share:
            assert partition.topic in members[member]
            owners.setdefault(partition, []).append(member)
    for topic, count in (("t", of_t), ("u", of_u)):
        readers = [member for member, wanted in members.items() if topic in wanted]
        for number in range(count if readers else 0):
            assert len(owners[Partition(topic, number)]) == 1
        sizes = [len([p for p in shares[reader] if p.topic == topic]) for reader in readers]
        assert not sizes or max(sizes) - min(sizes) <= 1


def test_equal_numbers_of_aligned_topics_stay_together() -> None:
    shares = share_out({"a": ["t", "u"], "b": ["t", "u"], "c": ["t", "u"]}, {"t": 12, "u": 12})
    for share in shares.values():
        numbers = {topic: {p.number for p in share if p.topic == topic} for topic in ("t", "u")}
        assert numbers["t"] == numbers["u"]
        assert len(numbers["t"]) == 4


def test_a_claim_lives_with_its_process_and_its_time() -> None:
    own = this_process()
    boot, namespace, _, start = own.split("/")
    child = subprocess.Popen(["sleep", "60"])
    try:
        with open(f"/proc/{child.pid}/stat") as file:
            child_start = file.read().rpartition(") ")[2].split()[19]
        other = f"{boot}/{namespace}/{child.pid}/{child_start}"
        assert is_live(own, expires_ms=10, now_ms=9)
        assert not is_live(own, expires_ms=10, now_ms=10)
        assert is_live(other, expires_ms=10, now_ms=9)
        assert not is_live(f"{boot}/{namespace}/{child.pid}/1", expires_ms=10, now_ms=9)
        assert not is_live(f"other/{namespace}/{os.getpid()}/{start}", expires_ms=10, now_ms=9)
        assert is_live(f"{boot}/pid:[1]/{child.pid}/1", expires_ms=10, now_ms=9)
    finally:
        child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_live(other, expires_ms=10, now_ms=9)
    child.wait()
