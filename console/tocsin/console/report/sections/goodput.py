"""Goodput: which share of the run's time went into steps that were kept."""

from __future__ import annotations

from typing import Final

from tocsin.console.charts import Bar, share_bar, value_text
from tocsin.console.report.numbers import RunNumbers
from tocsin.console.report.section import Figure, Section, Table, not_captured
from tocsin.console.views.goodput import NAMES, goodput_line
from tocsin.schemas.records.goodput import PARTS
from tocsin.schemas.text import share_text

KEY: Final = "goodput"
_TITLE: Final = "Goodput"
_GOOD: Final = 0.8
_ADVICE: Final = {
    "redone": "Write checkpoints more often: less is lost when an incarnation ends.",
    "starting": "Start faster: cache compiled kernels and prepared data, import less.",
    "data_wait": "See the section on the data loader.",
    "checkpoint": "Write checkpoints less often, or asynchronously.",
    "evaluation": "Evaluate less often, or on a sample of the data.",
    "stalled": "See the issues: a separate rule reports stalls.",
    "down": "See why incarnations ended; a restart by the scheduler takes this long.",
    "unknown": "Checkpoints that tocsin sees (torch.save, safetensors) decide what was kept.",
    "ending": "Check what the program does after its last step.",
    "other": "These are phases that the program named itself.",
}


def goodput_section(numbers: RunNumbers) -> Section:
    """The parts of the wall time over all incarnations."""
    view = numbers.run.view
    goodput = None if view is None else view.goodput
    if goodput is None or goodput.wall_s <= 0 or goodput.share is None:
        return not_captured(
            KEY, _TITLE, "No goodput is known of this run.",
            "The rules compute it while they watch a run: on the embedded bus by themselves, on "
            "Kafka in `tocsin rules`.",
        )  # fmt: skip
    lost = {name: goodput.part(name) for name in PARTS[1:] if goodput.part(name) > 0}
    largest = max(lost, key=lost.__getitem__, default="")
    low = goodput.share < _GOOD and bool(largest)
    finding = f"{goodput_line(goodput)}."
    return Section(
        key=KEY, title=_TITLE, finding=finding[:1].upper() + finding[1:],
        advice=_ADVICE.get(largest, "") if low else "", status="info" if low else "good",
        figures=[
            Figure("productive share", 100 * goodput.share, "percent"),
            Figure("wall time", goodput.wall_s, "s"),
            Figure("incarnations", goodput.incarnations),
        ],
        charts=[
            share_bar(
                [Bar(NAMES[name], goodput.part(name)) for name in PARTS], unit="s",
                title="Where the time of the run went",
            )
        ],
        tables=[
            Table(
                ("part", "time", "share"),
                [
                    (
                        NAMES[name], value_text(goodput.part(name), "s"),
                        f"{share_text(100 * goodput.part(name) / goodput.wall_s)} %",
                    )
                    for name in PARTS
                    if goodput.part(name) > 0
                ],
                "Over all incarnations",
                frozenset({1, 2}),
            )
        ],
    )  # fmt: skip
