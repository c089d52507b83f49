"""What a member of a group remembers for the next assignment."""

from __future__ import annotations

from tocsin.bus.kafka.bus import own_assignor


def test_members_of_one_process_do_not_claim_what_another_owned() -> None:
    first, second = own_assignor(), own_assignor()
    first.on_generation_assignment(5)
    assert (first.generation, second.generation) == (5, -1)
