"""The stop of the run, if there was one, and who was notified of what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tocsin.console.report.numbers import RunNumbers
from tocsin.console.report.section import Paragraph, Section, Table
from tocsin.console.views.stop_history import history_lines, stop_history
from tocsin.schemas.configuration.sections import PricesConfig
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.text import counted, plain_line, time_text

KEY: Final = "stop"
_TITLE: Final = "The stop, and who was notified"
_MAX_DELIVERIES: Final = 200
_BAD: Final = frozenset({"rejected", "expired"})


def stop(numbers: RunNumbers, prices: PricesConfig) -> Section:
    """The states of the stop with their times, and a table of notices in order of time."""
    run, view = numbers.run, numbers.run.view
    every = run.runs_view
    deliveries = [one for one in every.deliveries if one.incarnation == run.incarnation]
    history = None
    if view is not None:
        history = stop_history(view, every.commands, run.incarnation, prices)
    sentences = [f"The run was not stopped by tocsin. {_sent(deliveries)}"]
    shown = []
    if history is not None:
        by = f" {history.requested_by}" if history.requested_by else ""
        sentences = [
            f"A stop was requested{' by' if by else ''}{by}. Its newest state: "
            f"{history.view.state}. {_sent(deliveries)}"
        ]
        shown.append(Paragraph("The stop", [line.strip() for line in history_lines(history)]))
    failed = [one for one in deliveries if one.state in _BAD]
    advice = ""
    if failed:
        sentences.append(f"{counted(len(failed), 'delivery', 'deliveries')} failed.")
        advice = (
            "`tocsin bus dlq` lists what could not be delivered; `tocsin drill` tests receivers."
        )
    tables = [_table(deliveries)] if deliveries else []
    return Section(
        key=KEY, title=_TITLE, finding=" ".join(sentences), advice=advice,
        status="warning" if failed else "plain", tables=tables, paragraphs=shown,
    )  # fmt: skip


def _sent(deliveries: Sequence[Delivery]) -> str:
    receivers = {
        one.action for one in deliveries if one.state == "delivered" and one.kind != "stop"
    }
    if not receivers:
        return "Nobody was notified."
    names = ", ".join(sorted(map(plain_line, receivers)))
    return f"Notified: {names}."


def _table(deliveries: Sequence[Delivery]) -> Table:
    rows = [
        (
            time_text(one.created_ms), plain_line(one.action), plain_line(one.rule), one.state,
            plain_line(one.reason), plain_line(one.decided_by),
        )
        for one in deliveries[:_MAX_DELIVERIES]
    ]  # fmt: skip
    columns = ("requested", "to", "because of", "state", "result", "decided by")
    return Table(columns, rows, "Notices and stops")
