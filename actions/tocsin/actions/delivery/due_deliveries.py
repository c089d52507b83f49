"""Starts what is due, in the event loop: its entry is on the bus by then."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from tocsin.actions.decision.planned import STOP
from tocsin.actions.delivery import stop_command as stops
from tocsin.actions.delivery.answer_links import AnswerLinks
from tocsin.actions.delivery.followed_runs import FollowedRuns
from tocsin.actions.delivery.followed_stops import FollowedStops
from tocsin.actions.delivery.notices import Notices
from tocsin.actions.delivery.receiver_queues import Attempted, Notice, ReceiverQueues
from tocsin.actions.ledger.ledger import Ledger
from tocsin.bus.port import BusUnavailable
from tocsin.runtime.leased_runs import Skip
from tocsin.schemas.configuration.sections import PricesConfig
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.topics import issue_partition

_NOT_OURS_MS: Final = 2_000


class DueDeliveries:
    """Gives the queues what is to be attempted now, and reports what needs no attempt.

    Attributes:
        links: makes the links in messages.
        prices: for estimates in messages.
        skip: whether somebody else serves a run now; None: nobody does.

    Args:
        started: the deliveries that are under way; those that it starts are added.
        report: called with what is decided in place of an attempt.
    """

    def __init__(
        self,
        ledger: Ledger,
        queues: ReceiverQueues,
        notices: Notices,
        stops: FollowedStops,
        runs: FollowedRuns,
        *,
        started: set[str],
        report: Callable[[Attempted], None],
        links: AnswerLinks,
        prices: PricesConfig,
    ) -> None:
        self.links, self.prices = links, prices
        self.skip: Skip | None = None
        self._ledger = ledger
        self._queues = queues
        self._notices = notices
        self._stops = stops
        self._runs = runs
        self._started = started
        self._report = report

    def next_ms(self) -> int | None:
        """When the next attempt is due, of receivers that have room for one."""
        full = [action for action in self._ledger.actions() if self._queues.room(action) <= 0]
        return self._ledger.next_due_ms(full)

    async def start(self, now_ms: int, owned: Collection[int]) -> None:
        """Start what is due, of the partitions of the issues topic that are ours."""
        for action in self._ledger.actions():
            room = self._queues.room(action)
            if room > 0:
                for delivery in self._ledger.due(action, now_ms, self._started, room):
                    await self._start(delivery, now_ms, owned)

    async def _start(self, delivery: Delivery, now_ms: int, owned: Collection[int]) -> None:
        mine = issue_partition(delivery.run_id) in owned
        if not mine or await self._is_skipped(delivery.run_id):
            self._ledger.postpone(delivery, now_ms + _NOT_OURS_MS)
            return
        if delivery.delivery_id in self._started:
            return
        if delivery.waits_for_people:
            # Its time was not up when the answers were last settled.
            self._ledger.postpone(delivery, now_ms)
            return
        if (waiting := self._notices.waits_for(delivery)) is not None:
            self._ledger.hold(delivery, waiting)
            return
        alone = (delivery.delivery_id,)
        if delivery.kind == STOP and self._stops.is_to_check(delivery, now_ms):
            self._report(Attempted(alone, None, now_ms))
            return
        instead = (
            self._stops.switched_off(delivery)
            or self._notices.instead(delivery, now_ms)
            or self._queues.gate(delivery, now_ms)
        )
        if instead is not None:
            if instead.next_attempt_ms is not None:
                self._ledger.postpone(delivery, instead.next_attempt_ms)
            else:
                self._report(Attempted(alone, None, now_ms, instead=instead))
            return
        together = self._notices.message(delivery, now_ms)
        self._started.update(one.delivery_id for one in together)
        stop = self._ledger.stop_for(delivery)
        did = () if stop is None else (stops.sentence(*stop),)
        handle = self._ledger.handle(delivery)
        stopped = None if stop is None else stop[0]
        stake = self._runs.stake(delivery, self.prices)
        self._queues.start(
            Notice(
                delivery,
                now_ms,
                did,
                handle,
                together[1:],
                answer_url=self.links.url,
                page_url=self.links.page,
                stop=stopped,
                stake=stake,
            )
        )

    async def _is_skipped(self, run_id: str) -> bool:
        try:
            return self.skip is not None and await self.skip(run_id)
        except BusUnavailable:
            # Not known now; the delivery has left the schedule and must come back to it.
            return True
