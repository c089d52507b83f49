"""Grouping, repeats and answers against a slow, obvious model, over restarts and lost results."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from support.actions.virtual_notices import START_MS, VirtualNotices
from support.records.issues import TOPICS, feedback, issue
from tocsin.actions.decision.notice_times import NoticeTimes
from tocsin.console.feedback.send import feedback_record
from tocsin.schemas.records.feedback import FeedbackAcknowledged
from tocsin.schemas.records.issues import IssueFiring

WAIT_MS, REPEAT_MS = 2_000, 10_000
NAMES = ("nonfinite", "loss_spike", "overfit")


@dataclass
class Message:
    """One that waits: what is in it, and when it is due."""

    sort: str
    due_ms: int
    keys: set[str]
    closed: bool = False
    """The worker that began it is dead: nothing joins it."""


@dataclass
class Model:
    """One run is one group. All that waits is in `waiting`; each tick looks at all of it."""

    now_ms: int = START_MS
    waiting: list[Message] = field(default_factory=list)
    sent: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    came: list[tuple[str, int]] = field(default_factory=list)
    """Repeats that the results of the last tick have brought, and when they are due."""

    def add(self, sort: str, key: str, due_ms: int) -> None:
        """Into the first message of its sort that waits until about then, else a new one."""
        alone = sort != "repeat" and any(
            self._issue(key) == self._issue(other)
            for one in self.waiting
            if one.sort != "repeat"
            for other in one.keys
        )
        for one in self.waiting:
            joins = one.sort == sort and abs(one.due_ms - due_ms) <= WAIT_MS
            if joins and not alone and not one.closed and one.due_ms > self.now_ms:
                one.keys.add(key)
                return
        self.waiting.append(Message(sort, due_ms, {key}))

    def close_all(self) -> None:
        """Nothing joins what waits now."""
        for one in self.waiting:
            one.closed = True

    def lose_results(self) -> None:
        """The next worker sends again what was sent last, and repeats come of that as before."""
        lost = {key for key, _ in self.came}
        for one in self.waiting:
            one.keys -= lost
        self.waiting = [one for one in self.waiting if one.keys]
        self.close_all()
        for key, due_ms in self.came:
            self.add("repeat", key, due_ms)

    def end_repeats(self, issue_id: str) -> None:
        """An issue is over, or somebody has answered it."""
        for one in self.waiting:
            if one.sort == "repeat":
                one.keys = {key for key in one.keys if self._issue(key) != issue_id}
        self.waiting = [one for one in self.waiting if one.keys]

    def tick(self, now_ms: int) -> None:
        """Send what is due, as often as that lets more be sent."""
        self.now_ms = now_ms
        self.came = []
        while ready := [one for one in self.waiting if one.due_ms <= now_ms and self._free(one)]:
            one = ready[0]
            self.waiting.remove(one)
            self.sent.append((now_ms, tuple(sorted(one.keys))))
            for key in sorted(one.keys) if one.sort == "repeat" else ():
                head, _, number = key.rpartition("/")
                following = f"{head}/{int(number) + 1}", now_ms + REPEAT_MS
                self.came.append(following)
                self.add("repeat", *following)

    def _free(self, message: Message) -> bool:
        """Whether no earlier notice of any of its issues still waits in another message."""
        earlier = self.waiting[: self.waiting.index(message)]
        return not any(
            self._issue(key) == self._issue(other)
            for one in earlier
            if one.sort != "repeat"
            for other in one.keys
            for key in message.keys
        )

    @staticmethod
    def _issue(key: str) -> str:
        return key.partition("/")[0]


class Notices(RuleBasedStateMachine):
    """The service beside the model."""

    def __init__(self) -> None:
        super().__init__()
        times = NoticeTimes(group_by=("run",), wait_ms=WAIT_MS, repeat_ms=REPEAT_MS)
        self.worker = VirtualNotices(times, rules=NAMES)
        self.model = Model()
        self.times = dict.fromkeys(NAMES, 0)
        self.active = dict.fromkeys(NAMES, False)

    def teardown(self) -> None:
        """Close the worker."""
        self.worker.close()

    @rule(name=st.sampled_from(NAMES))
    def fires(self, name: str) -> None:
        """An issue fires, unless it is active."""
        if self.active[name]:
            return
        self.active[name] = True
        self.times[name] += 1
        found = self._issue(name)
        self.model.end_repeats(found.issue_id)
        again = f"/{found.times}" if found.times > 1 else ""
        first = f"{found.issue_id}/mail" + (f"/firing{again}" if again else "")
        self.model.add("first", first, self.model.now_ms + WAIT_MS)
        due_ms = next(one.due_ms for one in self.model.waiting if first in one.keys)
        repeat = f"{found.issue_id}/mail/firing/repeat/{again}#/1"
        self.model.add("repeat", repeat, due_ms + REPEAT_MS)
        self.worker.issue(found)

    @rule(name=st.sampled_from(NAMES))
    def is_over(self, name: str) -> None:
        """It is resolved, if it is active."""
        if not self.active[name]:
            return
        self.active[name] = False
        found = self._issue(name, resolved=True)
        self.model.end_repeats(found.issue_id)
        again = f"/{found.times}" if found.times > 1 else ""
        key = f"{found.issue_id}/mail/resolved{again}"
        self.model.add("over", key, self.model.now_ms + WAIT_MS)
        self.worker.issue(found)

    @rule(name=st.sampled_from(NAMES))
    def is_acknowledged(self, name: str) -> None:
        """Somebody acknowledges it, active or not."""
        if not self.times[name]:
            return
        found = self._issue(name)
        self.model.end_repeats(found.issue_id)
        self.worker.give(feedback_record(TOPICS, feedback(FeedbackAcknowledged, found)))

    @rule(ticks=st.integers(1, 8))
    def time_passes(self, ticks: int) -> None:
        """Half seconds."""
        for _ in range(ticks):
            self.model.tick(self.model.now_ms + 500)
            self.worker.advance(500)

    @rule()
    def a_worker_dies(self) -> None:
        """Another one continues from the ledger."""
        self.model.close_all()
        self.worker.restart()

    @precondition(lambda self: self.worker.unsaved is not None)
    @rule()
    def a_result_is_lost(self) -> None:
        """A worker dies when a message was sent, before the ledger has that: it is sent again."""
        self.model.lose_results()
        self.worker.lose_results()

    @invariant()
    def what_was_sent_is_what_the_model_sends(self) -> None:
        """The same deliveries together, at the same times."""
        once = dict.fromkeys(self.worker.sent)
        assert len({one.message_id for one in once}) == len(once)
        sent = [(one.at_ms, tuple(map(_plain, one.keys))) for one in once]
        expected = [(at_ms, tuple(map(_plain, keys))) for at_ms, keys in self.model.sent]
        assert sorted((at, tuple(sorted(keys))) for at, keys in sent) == sorted(
            (at, tuple(sorted(keys))) for at, keys in expected
        )

    def _issue(self, name: str, *, resolved: bool = False) -> IssueFiring:
        return issue(rule=name, stop_worthy=False, resolved=resolved).model_copy(
            update={"times": self.times[name]}
        )


def _plain(key: str) -> str:
    """A repeat's key in the model has its number last, so that it can be counted up."""
    if "#" not in key:
        return key
    head, _, number = key.partition("#/")
    again = head.removeprefix(head.split("/repeat/")[0] + "/repeat/")
    return f"{head.split('/repeat/')[0]}/repeat/{number}{again}"


class LongNotices(Notices):
    """The same for `make torture`."""


Notices.TestCase.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)
LongNotices.TestCase.settings = settings(max_examples=2_000, stateful_step_count=60, deadline=None)
TestNotices = Notices.TestCase
TestLongNotices = pytest.mark.torture(LongNotices.TestCase)
