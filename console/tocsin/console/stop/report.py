"""`tocsin stops report`: which runs were stopped, and which would have been. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from rich.table import Table
from rich.text import Text

from tocsin.actions.decision.planned import STOP
from tocsin.schemas.compute_estimates import NO_PRICES, Compute, hours_of, saved_by_stop
from tocsin.schemas.configuration.sections import PricesConfig
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.records.runs_fold import RunsView
from tocsin.schemas.text import plain_line

_HOUR_MS: Final = 3_600_000

METHOD: Final = (
    "hours are device-hours: hours times accelerators (times ranks on the CPU). saved: an estimate "
    "of what was left of the runs that were stopped, by their planned steps or their time limit. "
    "would save: from the decision to the end of the run, or to its last record. wrong: "
    "the part of both in runs whose issue people called a false alarm"
)


@dataclass(slots=True)
class RuleStops:
    """The stops that one rule decided; of each training the first counts.

    Attributes:
        stopped: trainings that it stopped.
        shadow: those that it would have stopped in another mode.
        not_sent: those that a limit, the switch, a silence or people kept from being stopped.
        confirmed: issues of these that people acknowledged or resolved: they were real.
        false_alarms: those that people called false alarms.
        saved_hours: an estimate of what was left of those that were stopped, device-hours.
        saved_unknown: how many of these have no estimate.
        would_save_hours: for how long those of `shadow` and `not_sent` continued, device-hours.
        wrong_hours: the part of both that is of false alarms.
        cost: of both, in the currency of the prices, as far as devices have one.
    """

    rule: str
    stopped: int = 0
    shadow: int = 0
    not_sent: int = 0
    confirmed: int = 0
    false_alarms: int = 0
    saved_hours: float = 0.0
    saved_unknown: int = 0
    would_save_hours: float = 0.0
    wrong_hours: float = 0.0
    cost: float = 0.0

    @property
    def wrong_share(self) -> float | None:
        """The share of false alarms among the issues that people answered; None: none was."""
        answered = self.confirmed + self.false_alarms
        return self.false_alarms / answered if answered else None


def stops_of_rules(
    view: RunsView, prices: PricesConfig = NO_PRICES, *, since_ms: int = 0
) -> Sequence[RuleStops]:
    """Of each rule that decided to stop a run, by name; of stops that changed since `since_ms`."""
    rules: dict[str, RuleStops] = {}
    seen: set[tuple[str, str, str]] = set()
    for stop in view.deliveries:
        training = (stop.rule, stop.run_id, stop.incarnation)
        counts = stop.held is not None or (
            stop.state == "delivered" and not _ended_by_itself(stop, view)
        )
        if stop.kind != STOP or not counts or training in seen or stop.updated_ms < since_ms:
            continue
        seen.add(training)
        rule = rules.setdefault(stop.rule, RuleStops(stop.rule))
        given = view.feedback(stop.issue_id)
        wrong = bool(given) and given[-1].verdict == "false alarm"
        rule.false_alarms += wrong
        rule.confirmed += bool(given) and not wrong
        compute = _compute(stop, view, prices)
        hours = 0.0 if compute is None else compute.device_hours or 0.0
        if stop.state == "delivered":
            rule.stopped += 1
            rule.saved_hours += hours
            rule.saved_unknown += compute is None or compute.device_hours is None
        else:
            rule.shadow += stop.held == "shadow"
            rule.not_sent += stop.held != "shadow"
            rule.would_save_hours += hours
        rule.wrong_hours += hours if wrong else 0.0
        rule.cost += 0.0 if compute is None else compute.cost or 0.0
    return sorted(rules.values(), key=lambda one: one.rule)


def report_table(rules: Sequence[RuleStops], prices: PricesConfig = NO_PRICES) -> Table:
    """A row for each rule; with the cost where there are prices."""
    table = Table(box=None)
    table.add_column("rule")
    priced = any(one.cost for one in rules)
    hours = ("saved", "would save", "wrong", *((prices.currency,) if priced else ()))
    for name in ("stopped", "shadow", "not sent", "confirmed", "false alarms", *hours):
        table.add_column(Text(plain_line(name)), justify="right")
    for one in rules:
        share = one.wrong_share
        false = f"{one.false_alarms}" + ("" if share is None else f" ({100 * share:.0f} %)")
        cells = [str(one.stopped), str(one.shadow), str(one.not_sent), str(one.confirmed), false]
        unknown = f" ({one.saved_unknown} unknown)" if one.saved_unknown else ""
        cells.append(f"{one.saved_hours:,.1f} h{unknown}")
        cells += [f"{one.would_save_hours:,.1f} h", f"{one.wrong_hours:,.1f} h"]
        cells += [f"{one.cost:,.0f}"] if priced else []
        table.add_row(Text(plain_line(one.rule)), *cells)
    return table


def report_facts(rules: Sequence[RuleStops], prices: PricesConfig = NO_PRICES) -> dict[str, object]:
    """The report as JSON values: `version`, `rules`, `currency` and `method`."""
    found = [{**asdict(one), "wrong_share": one.wrong_share} for one in rules]
    return {"version": 1, "rules": found, "currency": prices.currency, "method": METHOD}


def _compute(stop: Delivery, view: RunsView, prices: PricesConfig) -> Compute | None:
    """What a stop has saved, or would have; None: nothing is known of its training."""
    run = view.seen.get(stop.run_id)
    training = None if run is None else run.views.get(stop.incarnation)
    if run is None or training is None:
        return None
    if stop.state == "delivered":
        return saved_by_stop(training, prices)
    newest = training is run.view
    until_ms = training.ended_ms or _last_heard_ms(training) or (run.view_ms if newest else 0)
    hours = max(0, until_ms - stop.created_ms) / _HOUR_MS
    return hours_of(training, hours, "from the decision to the end", prices)


def _ended_by_itself(stop: Delivery, view: RunsView) -> bool:
    """Whether the training is known to have ended otherwise: while the stop was on its way. One
    that a backend ended was interrupted, or is lost."""
    run = view.seen.get(stop.run_id)
    training = None if run is None else run.views.get(stop.incarnation)
    return training is not None and training.outcome in ("completed", "failed")


def _last_heard_ms(training: RunView) -> int:
    return max((rank.last_heard_ms for rank in training.ranks), default=0)
