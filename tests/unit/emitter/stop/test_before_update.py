"""When a rank leaves before an update, and what the listener of its node hears of it."""

from __future__ import annotations

from typing import cast

import pytest

from tocsin.emitter.stop import datagrams
from tocsin.emitter.stop.before_update import Decision, Question, leaves
from tocsin.emitter.stop.rank_agreement import Agreement
from tocsin.emitter.stop.rank_socket import RankSocket


class Listener:
    """Of this node: answers each question with `on`, at once."""

    def __init__(self, on: bool) -> None:
        self.heard: list[datagrams.Message] = []
        self.question = Question(cast(RankSocket, self))
        self._on = on

    def send(self, message: datagrams.Message) -> bool:
        self.heard.append(message)
        self.question.answered({"kind": "may_leave", "on": self._on})
        return True


class Votes:
    """What the votes of all ranks come to, one after the other."""

    def __init__(self, *most: int | None) -> None:
        self._most = [*most]

    def vote(self, value: int) -> int | None:
        return self._most.pop(0)


def taken(listener: Listener, *most: int | None, ranks: int = 2) -> tuple[bool, Decision]:
    decision = Decision(listener.question, ranks)
    agreed = cast(Agreement, Votes(*most)) if ranks > 1 else None
    return decision.decide(True, 5, agreed, alike=True), decision


@pytest.mark.parametrize("most", [1, None])
def test_ranks_that_stay_do_not_announce_that_they_leave(most: int | None) -> None:
    """The announcement ends the restarts of torchrun, which a rank that stays may need."""
    listener = Listener(True)
    left, decision = taken(listener, most)
    assert (left, [leaves(each) for each in listener.heard]) == (False, [False])
    assert decision.off is not None


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_leave_announce_it_once_all_have_agreed(ranks: int) -> None:
    listener = Listener(True)
    left, decision = taken(listener, 0, ranks=ranks)
    assert (left, [leaves(each) for each in listener.heard]) == (True, [False, True])
    assert decision.off is None


def test_a_rank_alone_that_may_not_leave_stays() -> None:
    listener = Listener(False)
    left, decision = taken(listener, ranks=1)
    assert (left, [leaves(each) for each in listener.heard]) == (False, [False])
    assert decision.off == "the update was made: no stop is permitted"
